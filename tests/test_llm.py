"""LLM in this process: vLLM's calls over the real tiny model, and what they refuse."""

import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.checkpoint import load_checkpoint
from jaxserve.errors import (
    ConfigError,
    InvalidRequest,
    InvalidWeights,
    NotReady,
    RequestFailed,
)
from jaxserve.model.canonical import canonical_tensors
from tests.models import TINY, greedy_by_full_forward, module_of
from tests.serve_fakes import byte_level_tokenizer

MODEL = replace(TINY, vocab_size=324)
CONFIG = EngineConfig(
    max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, block_size=8, num_blocks=40
)
PROMPT = [5, 9, 2, 44, 17]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    import json

    from jaxserve.checkpoint.export import hf_config

    directory = tmp_path_factory.mktemp("tokenizer")
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (directory / "config.json").write_text(json.dumps(hf_config(MODEL)))
    return directory


@pytest.fixture(scope="module")
def module():
    return module_of(MODEL, seed=1)


@pytest.fixture(scope="module")
def llm(module, tokenizer_dir):
    with LLM(params=module, tokenizer=tokenizer_dir, config=CONFIG, use_tqdm=False) as llm:
        yield llm
        assert llm.num_late_compiles == 0
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_greedy_tokens_are_those_of_the_module(llm, module):
    (output,) = llm.generate(PROMPT, GREEDY)
    assert list(output.outputs[0].token_ids) == greedy_by_full_forward(module, PROMPT, 6)
    assert output.finished
    assert output.prompt_token_ids == tuple(PROMPT)
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text == llm.decode(output.outputs[0].token_ids)


def test_outputs_come_in_the_order_of_the_prompts_whatever_their_length(llm):
    prompts = [PROMPT[: 1 + i % 5] for i in range(9)]
    settings = [replace(GREEDY, max_tokens=1 + (7 * i) % 11) for i in range(9)]
    outputs = llm.generate(prompts, settings)
    assert [list(o.prompt_token_ids) for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [s.max_tokens for s in settings]
    alone = [
        llm.generate(p, s)[0].outputs[0].token_ids for p, s in zip(prompts, settings, strict=True)
    ]
    assert [o.outputs[0].token_ids for o in outputs] == alone


def test_text_goes_in_and_comes_out(llm):
    (output,) = llm.generate("hello", replace(GREEDY, max_tokens=10))
    assert output.prompt == "hello"
    assert list(output.prompt_token_ids) == llm.encode("hello")
    assert output.outputs[0].text == llm.decode(output.outputs[0].token_ids)


def test_the_choices_of_a_seeded_request_differ_and_repeat(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=8, ignore_eos=True)
    (first,), (again,) = llm.generate(PROMPT, params), llm.generate(PROMPT, params)
    tokens = [choice.token_ids for choice in first.outputs]
    assert len(set(tokens)) == 3
    assert tokens == [choice.token_ids for choice in again.outputs]
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    (alone,) = llm.generate(PROMPT, replace(params, n=1))
    assert alone.outputs[0].token_ids == tokens[0]


def test_a_stream_grows_to_what_generate_gives(llm):
    steps = list(llm.stream(PROMPT, GREEDY))
    assert [len(step.outputs[0].token_ids) for step in steps] == sorted(
        len(step.outputs[0].token_ids) for step in steps
    )
    assert steps[-1].finished
    assert not steps[0].finished
    (whole,) = llm.generate(PROMPT, GREEDY)
    assert steps[-1].outputs[0].token_ids == whole.outputs[0].token_ids


def test_streams_read_in_turn_do_not_mix_and_one_left_early_gives_its_blocks_back(llm):
    alone = [list(llm.stream(p, GREEDY))[-1].outputs[0].token_ids for p in (PROMPT, PROMPT[::-1])]
    first, second = llm.stream(PROMPT, GREEDY), llm.stream(PROMPT[::-1], GREEDY)
    left = llm.stream(PROMPT, GREEDY)
    next(left)
    ends = {}
    for _ in range(20):
        for name, stream in (("first", first), ("second", second)):
            ends[name] = next(stream, ends.get(name))
    left.close()
    list(llm.stream(PROMPT, GREEDY))
    assert [ends[name].outputs[0].token_ids for name in ("first", "second")] == alone
    assert llm.stats().num_running == 0


def test_a_stop_string_ends_the_text_before_it(llm):
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=40, ignore_eos=True)
    (whole,) = llm.generate("abc", params)
    text = whole.outputs[0].text
    stop = text[5:7]
    (cut,) = llm.generate("abc", replace(params, stop=(stop,)))
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    llm.generate(PROMPT, GREEDY)
    assert llm.stats().num_running == 0


def test_scores_are_the_models_own_log_probabilities(llm, module):
    tokens = [*PROMPT, 3, 250, 77]
    logits = module(np.asarray([tokens], np.int32))[0]
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    wanted = [float(logprobs[i, token]) for i, token in enumerate(tokens[1:])]
    got = llm.score(tokens)
    assert got[0] is None
    np.testing.assert_allclose(got[1:], wanted, atol=2e-5)


def test_scores_equal_what_decode_returned(llm):
    params = replace(GREEDY, max_tokens=12, logprobs=3)
    (output,) = llm.generate(PROMPT, params)
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert [entry.token_id for entry in choice.logprobs] == list(choice.token_ids)
    scores = llm.score([*PROMPT, *choice.token_ids])[len(PROMPT) :]
    np.testing.assert_allclose([t.logprob for t in choice.logprobs], scores, atol=2e-5)
    stepwise = llm.score([*PROMPT, *choice.token_ids], num_prompt_tokens=len(PROMPT))
    np.testing.assert_allclose(stepwise[len(PROMPT) :], scores, atol=2e-5)
    assert choice.cumulative_logprob == pytest.approx(sum(scores), abs=1e-4)


def test_a_conversation_is_rendered_by_the_models_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == "<user>hi<assistant>"
    both = llm.chat([messages, messages], GREEDY)
    assert [o.outputs[0].text for o in both] == [output.outputs[0].text] * 2


def test_weights_change_between_two_calls_and_outputs_say_so(llm, module):
    (before,) = llm.generate(PROMPT, GREEDY)
    other = module_of(MODEL, seed=8)
    try:
        assert llm.update_params(nnx.state(other)) == llm.weight_version
        (after,) = llm.generate(PROMPT, GREEDY)
        assert list(after.outputs[0].token_ids) == greedy_by_full_forward(other, PROMPT, 6)
        assert after.outputs[0].weight_versions == (llm.weight_version,)
        assert before.outputs[0].weight_versions == (llm.weight_version - 1,)
        with pytest.raises(InvalidWeights, match="missing"):
            llm.update_params({"a": np.ones(3)})
    finally:
        llm.update_params(module)


def test_a_request_that_is_refused_leaves_nothing_behind(llm):
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        llm.generate([PROMPT, [10**6]], GREEDY)
    with pytest.raises(InvalidRequest, match="2 sampling_params for 1 prompts"):
        llm.generate(PROMPT, [GREEDY, GREEDY])
    llm.generate(PROMPT, GREEDY)
    assert llm.stats().num_running + llm.stats().num_waiting == 0


def test_a_prompt_may_come_as_vllms_mapping(llm):
    (plain,) = llm.generate([PROMPT], GREEDY)
    for given in ({"prompt_token_ids": PROMPT}, [{"prompt_token_ids": PROMPT}]):
        (output,) = llm.generate(given, GREEDY)
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    with pytest.raises(InvalidRequest, match="'prompt_token_ids', 'multi_modal_data'"):
        llm.generate({"prompt_token_ids": PROMPT, "multi_modal_data": {}}, GREEDY)


def test_prompts_may_be_arrays(llm):
    listed = llm.generate([PROMPT, PROMPT], GREEDY)
    for given in (np.array([PROMPT, PROMPT]), [np.array(PROMPT)] * 2):
        outputs = llm.generate(given, GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in listed]


def test_numbers_that_are_no_token_ids_are_refused(llm):
    for wrong in ([1.5, 2.0], np.array([1.5, 2.0]), [[1.5]], {"prompt_token_ids": None}):
        with pytest.raises(InvalidRequest, match="a text, or a list of token ids"):
            llm.generate(wrong, GREEDY)


def test_a_text_where_messages_or_token_ids_belong_is_refused_in_a_line(llm):
    with pytest.raises(InvalidRequest, match="a list of messages"):
        llm.chat("hello")
    for wrong in ("hello", ["hello"], []):
        with pytest.raises(InvalidRequest, match="at least one token id"):
            llm.score(wrong)


def test_a_progress_bar_counts_the_prompts(llm, capsys):
    llm.generate([PROMPT, PROMPT], GREEDY, use_tqdm=True)
    said = capsys.readouterr().err
    assert "2/2" in said
    assert "tok/s" in said


def test_sleep_levels_are_named_and_requests_are_refused_while_closed(module):
    llm = LLM(params=module, config=replace(CONFIG, max_num_seqs=1), use_tqdm=False)
    with pytest.raises(ConfigError, match="sleep level 3"):
        llm.sleep(3)
    llm.sleep(2)
    llm.wake()
    with pytest.raises(ConfigError, match="no tokenizer"):
        llm.generate("text")
    assert len(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids) == 6
    llm.close()
    with pytest.raises(NotReady, match="closed"):
        llm.generate(PROMPT, GREEDY)


def test_what_cannot_be_built_is_said_in_a_line(module):
    with pytest.raises(ConfigError, match="not both"):
        LLM("model", params=module)
    with pytest.raises(ConfigError, match="model_config"):
        LLM(params={"x": np.ones(3)})
    with pytest.raises(InvalidWeights, match="missing"):
        LLM(params={"x": np.ones(3, np.float32)}, model_config=MODEL, config=CONFIG)


def test_importing_the_package_loads_no_jax():
    code = "import sys, jaxserve; jaxserve.SamplingParams(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_in_deterministic_mode_a_score_is_bit_for_bit_what_generate_returned(module):
    config = replace(CONFIG, max_num_seqs=2, deterministic=True)
    with LLM(params=module, config=config, use_tqdm=False) as llm:
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=10, logprobs=0)
        both = llm.generate([PROMPT, PROMPT[::-1]], params)
        for output in both:
            (choice,) = output.outputs
            tokens = [*output.prompt_token_ids, *choice.token_ids]
            scores = llm.score(tokens, num_prompt_tokens=len(output.prompt_token_ids))
            assert scores[len(output.prompt_token_ids) :] == [t.logprob for t in choice.logprobs]


def test_a_saved_model_is_loaded_as_the_same_model_and_restored_by_its_module(
    llm, module, tmp_path
):
    saving = llm.save(tmp_path / "model")
    llm.generate(PROMPT, GREEDY)  # runs on meanwhile
    path = saving.wait()
    checkpoint = load_checkpoint(str(tmp_path / "model"), load_format="orbax")
    assert checkpoint.config == MODEL
    assert checkpoint.tensors is not None
    for name, (leaf, turned) in canonical_tensors(module).items():
        wanted = np.asarray(leaf.T if turned else leaf)
        np.testing.assert_array_equal(checkpoint.tensors.get(name), wanted, err_msg=name)
    with ocp.StandardCheckpointer() as reader:
        tree = reader.restore(path)
    other = module_of(MODEL, seed=9)
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, nnx.restore_int_paths(tree))
    nnx.update(other, state)
    assert greedy_by_full_forward(other, PROMPT, 6) == greedy_by_full_forward(module, PROMPT, 6)
    with pytest.raises(ConfigError, match="exists"):
        llm.save(tmp_path / "model")


def test_a_stream_that_others_calls_bring_to_its_end_still_gives_its_last_output(llm):
    whole = list(llm.stream(PROMPT, replace(GREEDY, max_tokens=3)))[-1]
    stream = llm.stream(PROMPT, replace(GREEDY, max_tokens=3))
    next(stream)
    llm.generate([9, 9, 9], replace(GREEDY, max_tokens=10))
    rest = list(stream)
    assert rest[-1].finished
    assert rest[-1].outputs[0].token_ids == whole.outputs[0].token_ids


def test_a_request_that_fails_tells_its_own_reader_alone(llm):
    bad = SamplingParams(
        max_tokens=10, allowed_token_ids=(7,), bad_words=("x",), bad_words_token_ids=((7, 7),)
    )
    healthy = llm.stream(PROMPT, replace(GREEDY, max_tokens=12))
    next(healthy)
    failing = llm.stream(PROMPT, bad)
    next(failing)
    (other,) = llm.generate([4, 5], GREEDY)
    assert other.finished
    with pytest.raises(RequestFailed, match="leave no token"):
        list(failing)
    with pytest.raises(RequestFailed, match="leave no token"):
        llm.generate(PROMPT, bad)
    (alone,) = llm.generate(PROMPT, replace(GREEDY, max_tokens=12))
    assert list(healthy)[-1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_waiting_for_a_sleeping_engine_is_refused(llm):
    llm.sleep()
    try:
        with pytest.raises(NotReady, match=r"wake\(\) first"):
            llm.generate(PROMPT, GREEDY)
    finally:
        llm.wake()
    assert llm.generate(PROMPT, GREEDY)[0].finished


def test_numpy_tokens_are_tokens(llm):
    (plain,) = llm.generate(PROMPT, GREEDY)
    for prompt in (np.array(PROMPT), [np.int32(token) for token in PROMPT]):
        assert llm.generate(prompt, GREEDY)[0].outputs == plain.outputs
    assert llm.score(np.array(PROMPT)) == llm.score(PROMPT)
    with pytest.raises(InvalidRequest, match="num_prompt_tokens=-1"):
        llm.score(PROMPT, num_prompt_tokens=-1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_k", 2**40), ("logprobs", 1.5), ("prompt_logprobs", 1.5), ("max_tokens", 2.5)],
)
def test_settings_the_engine_could_not_run_are_refused_by_name(field, value):
    with pytest.raises(InvalidRequest, match=field):
        SamplingParams(**{field: value})


def test_one_stop_string_may_come_without_its_tuple():
    assert SamplingParams(stop="abc").stop == ("abc",)


def deleted(tree):
    array = jax.numpy.array(tree["model.norm.weight"])
    array.delete()
    return {**tree, "model.norm.weight": array}


@pytest.mark.parametrize(
    "broken",
    [
        deleted,
        lambda tree: {**tree, "model.norm.weight": "x"},
        lambda tree: {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in tree.items()},
        lambda tree: {1: np.ones(3), "a": np.ones(2)},
        lambda tree: "~nobodyxyz/x",
        lambda tree: None,
    ],
    ids=["donated", "text", "specs", "keys", "path", "nothing"],
)
def test_a_tree_of_anything_is_refused_and_the_engine_goes_on(broken, llm, module):
    tree = {name: leaf.T if turned else leaf for name, (leaf, turned) in tensors(module)}
    before = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    with pytest.raises(InvalidWeights):
        llm.update_params(broken(tree))
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == before
    with pytest.raises(InvalidRequest, match="requests='bogus'"):
        llm.update_params(tree, requests="bogus")


def tensors(module):
    return canonical_tensors(module).items()
