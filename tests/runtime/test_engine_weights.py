"""New weights and sleep between two steps of the engine over the real model."""

import json
from collections import defaultdict
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.boot import build_engine
from jaxserve.checkpoint import Checkpoint
from jaxserve.checkpoint.export import hf_config, write_safetensors
from jaxserve.checkpoint.orbax_files import write_orbax
from jaxserve.config import EngineConfig, SamplingParams
from jaxserve.errors import InvalidWeights, NotReady
from jaxserve.model.canonical import (
    canonical_tensors,
    canonical_tree,
    check_canonical,
    engine_params,
    pure_tree,
    replace_params,
)
from jaxserve.model.definition import params_of
from jaxserve.plan.buckets import PrefillBuckets
from jaxserve.runtime.engine import Engine
from jaxserve.runtime.sizing import decode_buckets
from tests.models import FULL, TINY, greedy_by_full_forward, module_of

CONFIG = EngineConfig(
    max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32, block_size=8, num_blocks=20
)
PROMPT = list(range(3, 23))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def booted():
    checkpoint = Checkpoint(name="tiny", config=TINY, tokenizer=None, tensors=None)
    return build_engine(checkpoint, CONFIG)


@pytest.fixture
def engine(booted):
    booted.runner.permute_rows(np.full(CONFIG.max_num_seqs, -1, np.int32))
    compiles = len(booted.executables.late)
    yield Engine(
        TINY,
        booted.config,
        booted.runner,
        num_blocks=20,
        decode_buckets=decode_buckets(booted.config),
        prefill_buckets=PrefillBuckets(CONFIG.max_num_batched_tokens),
    )
    assert len(booted.executables.late) == compiles  # no step was compiled for new weights


def finish(engine, tokens=None, versions=None):
    tokens = defaultdict(list) if tokens is None else tokens
    while engine.has_unfinished_requests():
        for update in engine.step():
            tokens[update.request_id] += update.new_token_ids
            if versions is not None and update.new_token_ids:
                versions.append(update.weight_version)
        engine.audit()
    return tokens


def answer(engine, name="r", prompt=PROMPT, params=GREEDY):
    engine.add_request(name, prompt, params)
    return finish(engine)[name]


def hf_tree(module):
    """The module's weights as a flat mapping of Hugging Face names, [out, in]."""
    return {
        name: leaf.T if turned else leaf
        for name, (leaf, turned) in canonical_tensors(module).items()
    }


def files(module, directory, kind):
    directory.mkdir()
    tensors = {name: np.asarray(leaf) for name, leaf in hf_tree(module).items()}
    (directory / "config.json").write_text(json.dumps(hf_config(TINY)))
    if kind == "orbax":
        write_orbax(directory / "params", tensors.items())
    else:
        write_safetensors(directory, tensors.items(), 10**9)
    return directory


TREES = {
    "module": lambda module, directory: module,
    "state": lambda module, directory: nnx.state(module),
    "pure dict": lambda module, directory: nnx.to_pure_dict(nnx.state(module)),
    "hugging face names": lambda module, directory: hf_tree(module),
    "numpy": lambda module, directory: jax.tree.map(np.asarray, hf_tree(module)),
    "params": lambda module, directory: params_of(module, stacked=True),
    "orbax": partial(files, kind="orbax"),
    "safetensors": partial(files, kind="safetensors"),
}


@pytest.mark.parametrize("form", TREES)
def test_after_an_update_tokens_are_those_of_the_new_model(form, engine, tmp_path):
    module = module_of(TINY, seed=10 + list(TREES).index(form))
    before = answer(engine)
    assert engine.update_params(TREES[form](module, tmp_path / "model")) == 1
    after = answer(engine, "after")
    assert after == greedy_by_full_forward(module, PROMPT, 8)
    assert after != before
    assert engine.stats().weight_version == 1


def test_params_in_the_engines_layout_are_taken_without_a_copy(engine, booted):
    params = params_of(module_of(TINY, seed=3), stacked=True)
    engine.update_params(params)
    for ours, theirs in zip(
        jax.tree.leaves(booted.runner.params), jax.tree.leaves(params), strict=True
    ):
        assert ours.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()


def test_arrays_lent_to_the_engine_are_never_donated_or_deleted(engine, tmp_path):
    module = module_of(TINY, seed=21)
    lent = params_of(module, stacked=True)
    for take_away in (
        lambda: engine.update_params(module_of(TINY, seed=22)),
        lambda: engine.update_params(files(module_of(TINY, seed=23), tmp_path / "m", "orbax")),
        lambda: (engine.sleep(level=2), engine.wake()),
    ):
        engine.update_params(lent)
        take_away()
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(lent))
    engine.update_params(lent)
    assert answer(engine) == greedy_by_full_forward(module, PROMPT, 8)


def test_canonical_weights_take_the_memory_of_the_old_ones(engine, booted):
    engine.update_params(module_of(TINY, seed=3))  # the engine's own from here on
    old = {a.unsafe_buffer_pointer() for a in jax.tree.leaves(booted.runner.params)}
    engine.update_params(module_of(TINY, seed=4))
    new = {a.unsafe_buffer_pointer() for a in jax.tree.leaves(booted.runner.params)}
    assert new == old


@pytest.mark.parametrize("stacked", [False, True])
def test_the_compilers_account_of_an_update_has_no_second_copy_of_the_weights(stacked):
    module = module_of(TINY)
    old, tree = params_of(module, stacked=stacked), pure_tree(module)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(old))
    memory = replace_params.lower(old, tree, TINY, stacked).compile().memory_analysis()
    assert memory.alias_size_in_bytes == weights
    unaliased = memory.output_size_in_bytes - memory.alias_size_in_bytes  # a table of pointers
    assert memory.temp_size_in_bytes + unaliased < weights / 4


@pytest.mark.parametrize("config", [TINY, FULL], ids=["tiny", "full"])
@pytest.mark.parametrize("stacked", [False, True])
def test_every_canonical_form_gives_the_same_parameters(config, stacked):
    module = module_of(config, seed=2)
    wanted = params_of(module, stacked=stacked)
    for tree in (module, nnx.state(module), nnx.to_pure_dict(nnx.state(module)), hf_tree(module)):
        check_canonical(tree, config, "float32")
        got = engine_params(tree, config, stacked=stacked)
        jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("config", [TINY, FULL], ids=["tiny", "full"])
@pytest.mark.parametrize("stacked", [False, True])
def test_the_canonical_tree_of_parameters_is_the_modules_state(config, stacked):
    module = module_of(config, seed=2)
    tree = canonical_tree(params_of(module, stacked=stacked), config)
    got, wanted = canonical_tensors(tree), canonical_tensors(module)
    assert got.keys() == wanted.keys()
    for name, (leaf, turned) in wanted.items():
        assert got[name][1] == turned
        np.testing.assert_array_equal(got[name][0], leaf, err_msg=name)


def broken(change):
    tree = hf_tree(module_of(TINY, seed=5))
    change(tree)
    return tree


REFUSED = {
    "a missing leaf": (
        lambda tree: tree.pop("model.layers.1.mlp.up_proj.weight"),
        r"model\.layers\.1\.mlp\.up_proj\.weight is missing",
    ),
    "a leaf too many": (
        lambda tree: tree.update({"model.extra.weight": jnp.ones(3)}),
        r"model\.extra\.weight is no tensor of this model",
    ),
    "another shape": (
        lambda tree: tree.update({"model.norm.weight": jnp.ones(47)}),
        r"model\.norm\.weight has shape \[47\], the engine's is \[48\]",
    ),
    "another dtype": (
        lambda tree: tree.update({"model.norm.weight": jnp.ones(48, jnp.bfloat16)}),
        r"model\.norm\.weight is bfloat16, the engine's weights are float32",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_does_not_fit_is_refused_by_path_and_nothing_changes(fault, engine):
    change, message = REFUSED[fault]
    before = answer(engine)
    with pytest.raises(InvalidWeights, match=message):
        engine.update_params(broken(change), requests="abort")
    assert engine.weight_version == 0
    assert answer(engine, "again") == before


def test_params_of_another_layout_are_refused(engine):
    with pytest.raises(InvalidWeights, match="stacked=True"):
        engine.update_params(params_of(module_of(TINY), stacked=False))
    wrong = params_of(module_of(TINY), stacked=True)._replace(final_norm_D=jnp.ones(7))
    with pytest.raises(InvalidWeights, match=r"final_norm_D has shape \[7\]"):
        engine.update_params(wrong)


def test_a_path_that_is_no_model_is_refused(engine, tmp_path):
    with pytest.raises(InvalidWeights, match="no such file"):
        engine.update_params(tmp_path / "nowhere")
    before = answer(engine)
    other = replace(TINY, hidden_size=96)
    assert before == answer(engine, "again")
    with pytest.raises(InvalidWeights, match="has shape"):
        engine.update_params(hf_tree(module_of(other)))


def test_a_version_must_rise(engine):
    with pytest.raises(InvalidWeights, match="above 0"):
        engine.update_params(module_of(TINY), version=0)
    with pytest.raises(InvalidWeights, match="below 2"):
        engine.update_params(module_of(TINY), version=10**400)
    assert engine.update_params(module_of(TINY), version=10) == 10
    with pytest.raises(InvalidWeights, match="above 10"):
        engine.update_params(module_of(TINY), version=10)


def test_no_block_of_older_weights_is_shared(engine):
    answer(engine)
    hits = engine.stats().prefix_cache_hits
    answer(engine, "same weights")
    assert engine.stats().prefix_cache_hits > hits
    hits = engine.stats().prefix_cache_hits
    engine.update_params(module_of(TINY, seed=9))
    answer(engine, "new weights")
    assert engine.stats().prefix_cache_hits == hits


def steps(engine, count, tokens):
    for _ in range(count):
        for update in engine.step():
            tokens[update.request_id] += update.new_token_ids


def test_kept_requests_go_on_and_say_which_weights_drew_each_token(engine):
    tokens, versions = defaultdict(list), []
    engine.add_request("r", PROMPT, replace(GREEDY, max_tokens=12))
    for _ in range(5):
        for update in engine.step():
            tokens[update.request_id] += update.new_token_ids
            versions.append(update.weight_version)
    engine.update_params(module_of(TINY, seed=9), requests="keep")
    finish(engine, tokens, versions)
    assert len(tokens["r"]) == 12
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}


def test_recomputed_requests_continue_as_the_new_model_would(engine):
    tokens = defaultdict(list)
    engine.add_request("r", PROMPT, replace(GREEDY, max_tokens=12))
    steps(engine, 5, tokens)
    module = module_of(TINY, seed=9)
    engine.update_params(module, requests="recompute")
    steps(engine, 1, tokens)  # what was in flight is of the old model
    told = list(tokens["r"])
    finish(engine, tokens)
    rest = greedy_by_full_forward(module, PROMPT + told, 12 - len(told))
    assert tokens["r"][len(told) :] == rest


def test_aborted_requests_end_and_give_back_every_block(engine):
    engine.add_request("r", PROMPT, GREEDY)
    engine.add_request("s", PROMPT[:5], GREEDY)
    steps(engine, 3, defaultdict(list))
    engine.update_params(module_of(TINY, seed=9), requests="abort")
    ended = {u.request_id: u.finish_reason for u in engine.step() if u.finish_reason}
    assert ended == {"r": "abort", "s": "abort"}
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    engine.audit()


@pytest.mark.parametrize("level", [1, 2])
def test_requests_survive_a_sleep_and_give_the_same_tokens(level, engine, booted):
    engine.update_params(hf_tree(module_of(TINY, seed=31)))  # the engine's own, not lent
    alone = answer(engine, "alone")
    engine.reset_prefix_cache()
    tokens = defaultdict(list)
    engine.add_request("r", PROMPT, GREEDY)
    steps(engine, 3, tokens)
    on_device = jax.tree.leaves(booted.runner.params)
    engine.sleep(level=level)
    pool = [a for half in booted.runner._pool for a in half]
    assert all(a.is_deleted() for a in pool)
    assert {a.is_deleted() for a in on_device} == {level == 2}
    if level == 2:
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(booted.runner.params))
    steps(engine, 2, tokens)  # tells what was in flight, runs nothing
    assert not engine.has_unfinished_requests()
    assert engine.stats().asleep
    engine.add_request("meanwhile", PROMPT, GREEDY)
    engine.wake()
    assert not engine.stats().asleep
    finish(engine, tokens)
    assert tokens["r"] == alone
    assert tokens["meanwhile"] == alone


def test_an_engine_told_to_refuse_does_not_sleep_over_a_request_and_takes_none_asleep(engine):
    engine.add_request("r", PROMPT, GREEDY)
    with pytest.raises(NotReady, match="1 requests are not finished"):
        engine.sleep(requests="refuse")
    finish(engine)
    engine.sleep(requests="refuse")
    with pytest.raises(NotReady, match="takes no requests"):
        engine.add_request("s", PROMPT, GREEDY)
    with pytest.raises(NotReady, match="wake it"):
        engine.update_params(module_of(TINY))
    with pytest.raises(NotReady, match="sleeps already"):
        engine.sleep()
    engine.wake()
    with pytest.raises(NotReady, match="does not sleep"):
        engine.wake()
    assert len(answer(engine, "s")) == 8
