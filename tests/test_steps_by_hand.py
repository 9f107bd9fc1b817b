"""The steps called by hand: against whole forward passes, the engine, and the arrays' one list."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve import BootConfig, EngineConfig, SamplingParams
from jaxserve.boot import resolve
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.model.attention import kv_pool_specs
from jaxserve.plan.pool import kv_bytes_per_block, plan_kv_pool
from jaxserve.runtime.booted import BootedEngine
from jaxserve.runtime.engine import Engine
from jaxserve.runtime.executables import zeros
from jaxserve.runtime.runner import ModelRunner
from jaxserve.steps import (
    ALL_ALLOWED,
    NULL_BLOCK,
    DecodeShape,
    PrefillBuckets,
    compile_steps,
    decode_step,
    fork_rows,
    mask_spec,
    plan_capture,
    prefill_batch_specs,
    shape_structs,
    steps_of,
)
from jaxserve.steps import pack_mask as mask_of
from tests.models import TINY, module_of, pack_mask

CONFIG = EngineConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, block_size=8)
A, B = [5, 9, 2, 44, 17, 3, 8], [7, 101]


@nnx.jit
def forward(module, tokens_T):
    """Logits [T, V] of one whole sequence, without any cache."""
    return module(tokens_T[None])[0]


def greedy(module, prompt, count):
    """The likeliest continuation, each token from a whole forward pass."""
    tokens = list(prompt)
    for _ in range(count):
        padded = jnp.asarray(tokens + [0] * (64 - len(tokens)), jnp.int32)
        tokens.append(int(forward(module, padded)[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def module():
    return module_of(TINY, seed=3)


@pytest.fixture(scope="module")
def steps():
    return compile_steps(TINY, CONFIG)


@pytest.fixture(scope="module")
def params(steps, module):
    return steps.place(module)


@pytest.fixture(scope="module")
def booted(steps, params):
    """An engine over the same executables."""
    config = resolve(CONFIG, TINY, jax.default_backend())
    shapes = steps.shapes
    runner = ModelRunner(params, steps.executables, shapes)
    pool = plan_kv_pool(config, kv_bytes_per_block(TINY, 8, "float32"), host_bytes=2**30)
    engine = Engine(
        TINY,
        config,
        runner,
        num_blocks=shapes.num_blocks,
        decode_buckets=steps.buckets,
        prefill_buckets=PrefillBuckets(32),
    )
    return BootedEngine(
        engine=engine,
        runner=runner,
        executables=steps.executables,
        model=TINY,
        config=config,
        pool=pool,
        capture=plan_capture(steps.buckets, num_heads=TINY.num_heads),
        seconds={},
    )


def decode_all(steps, params, pool, state, first, count):
    """Tokens [rows][1 + count] of ``count`` decode steps after ``first``."""
    drawn = [np.asarray(first)[: steps.shapes.max_num_seqs]]
    for _ in range(count):
        pool, state, output = steps.decode(params, pool, state)
        drawn.append(np.asarray(output.tokens_X))
    return np.stack(drawn, axis=1).tolist(), pool, state


def test_two_rows_by_hand_continue_as_whole_forward_passes_do(steps, params, module):
    pool, state = steps.allocate()
    pool, state, drawn = steps.prefill(params, pool, state, steps.pack([A, B]))
    tokens, _, _ = decode_all(steps, params, pool, state, drawn.tokens_X, 11)
    assert tokens[0] == greedy(module, A, 12)
    assert tokens[1] == greedy(module, B, 12)


def test_a_prompt_longer_than_a_batch_goes_in_piece_by_piece(steps, params, module):
    long = np.random.default_rng(0).integers(0, TINY.vocab_size, 45).tolist()
    pool, state = steps.allocate()
    with pytest.raises(InvalidRequest, match="45 tokens in a batch of at most 32"):
        steps.pack([long])
    batch = steps.pack([long[:30]], rows=[2])
    pool, state, _ = steps.prefill(params, pool, state, batch)
    batch = steps.pack([long], rows=[2], starts=[30])
    pool, state, drawn = steps.prefill(params, pool, state, batch)
    first = np.zeros(4, np.int32)
    first[2] = drawn.tokens_X[0]
    tokens, _, _ = decode_all(steps, params, pool, state, first, 5)
    assert tokens[2] == greedy(module, long, 6)


def test_a_loop_by_hand_draws_what_the_engine_draws(steps, params, booted):
    settings = [
        SamplingParams(temperature=0.9, top_p=0.9, seed=seed, max_tokens=9, ignore_eos=True)
        for seed in range(4)
    ]
    pool, state = steps.allocate()
    pool, state, drawn = steps.prefill(params, pool, state, steps.pack([A] * 4, settings))
    tokens, _, _ = decode_all(steps, params, pool, state, drawn.tokens_X, 8)
    for seed, asked in enumerate(settings):
        booted.engine.add_request(str(seed), A, asked)
    by_engine = {str(seed): [] for seed in range(4)}
    while booted.engine.has_unfinished_requests():
        for update in booted.engine.step():
            by_engine[update.request_id] += update.new_token_ids
    assert tokens == list(by_engine.values())
    assert len(set(map(tuple, tokens))) == 4


def test_every_array_is_that_of_the_one_description(steps, params):
    shapes = steps.shapes
    pool, state = steps.allocate()
    same = chex.assert_trees_all_equal_shapes_and_dtypes
    same((pool, state), shape_structs((shapes.pool_specs(), shapes.state_specs())))
    batch = steps.pack([A, B])
    specs = prefill_batch_specs(32, 4, shapes.blocks_per_row, TINY.vocab_size)
    same(batch, shape_structs(specs))
    pool, state, drawn = steps.prefill(params, pool, state, batch)
    chex.assert_shape(drawn.tokens_X, (4,))
    pool, state, drawn = steps.decode(params, pool, state, shape=DecodeShape(2, 64))
    chex.assert_shape(drawn.tokens_X, (2,))
    same((pool, state), shape_structs((shapes.pool_specs(), shapes.state_specs())))


def test_rows_own_blocks_that_nobody_shares_and_never_the_null_block(steps):
    tables = steps.tables_BP
    chex.assert_shape(tables, (4, steps.shapes.blocks_per_row))
    assert np.unique(tables).size == tables.size
    assert tables.min() > NULL_BLOCK
    assert tables.max() < steps.shapes.num_blocks


def test_a_forked_row_goes_on_as_its_source_and_leaves_it_alone(steps, params, module):
    pool, state = steps.allocate()
    pool, state, drawn = steps.prefill(params, pool, state, steps.pack([A, B]))
    first = int(drawn.tokens_X[0])
    pool, state = steps.fork(pool, state, [1, 0, 0, -1])
    assert state.context_lens_B.tolist() == [2, 7, 7, 0]
    state = state._replace(last_tokens_B=state.last_tokens_B.at[2].set(77))
    heads = [int(drawn.tokens_X[1]), first, 77, 0]
    tokens, _, _ = decode_all(steps, params, pool, state, heads, 9)
    assert tokens[0] == greedy(module, B, 10)
    assert tokens[1] == greedy(module, A, 10)
    assert tokens[2][1:] == greedy(module, [*A, 77], 9)


def test_a_fork_is_the_same_whether_layers_share_an_array_or_not(steps):
    shapes = steps.shapes
    rng = np.random.default_rng(1)
    apart = jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype),
        shape_structs(kv_pool_specs(TINY, shapes.num_blocks, 8, "float32")),
    )
    stacked = type(apart)(*((jnp.concatenate(half),) for half in apart))
    state = zeros(shapes.state_specs())._replace(
        block_tables_BP=jnp.asarray(steps.tables_BP), context_lens_B=jnp.asarray([9, 0, 3, 0])
    )
    fork = partial(
        fork_rows,
        state=state,
        sources_B=jnp.asarray([2, 0, 0, -1]),
        own_tables_BP=jnp.asarray(steps.tables_BP),
        num_blocks=shapes.num_blocks,
    )
    one, _ = fork(apart)
    other, _ = fork(stacked)
    chex.assert_trees_all_equal(
        type(apart)(*((jnp.concatenate(half),) for half in one)),
        other,
    )
    tables = steps.tables_BP
    np.testing.assert_array_equal(one.k[1][tables[0]], apart.k[1][tables[2]])
    np.testing.assert_array_equal(one.v[0][tables[2]], apart.v[0][tables[0]])


def test_a_row_sits_out_and_a_mask_forces_a_token(steps, params, module):
    pool, state = steps.allocate()
    pool, state, drawn = steps.prefill(params, pool, state, steps.pack([A, B]))
    mask = np.stack([pack_mask(allowed, TINY.vocab_size) for allowed in ({50}, None, None, None)])
    others = np.asarray([False, True, True, True])
    pool, state, output = steps.decode(params, pool, state, sits_out_B=others, mask_BW=mask)
    assert int(output.tokens_X[0]) == 50
    assert state.context_lens_B.tolist() == [8, 2, 0, 0]
    heads = [50, int(drawn.tokens_X[1]), 0, 0]
    tokens, _, _ = decode_all(steps, params, pool, state, heads, 4)
    first = int(drawn.tokens_X[0])
    assert tokens[0][1:] == greedy(module, [*A, first, 50], 4)
    assert tokens[1] == greedy(module, B, 5)


@pytest.mark.parametrize("rows", [2, 4])
def test_a_jitted_step_is_traced_once_a_bucket_whatever_the_rows_hold(steps, params, rows):
    shapes = steps.shapes
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(*arrays):
        shape = DecodeShape(rows, 64)
        return decode_step(*arrays, config=TINY, backend=shapes.backend, shape=shape, block_size=8)

    pool, state = steps.allocate()
    mask = np.full(mask_spec(rows, TINY.vocab_size).shape, ALL_ALLOWED, np.uint32)
    for prompts in ([A], [A, B], [B, A, B]):
        pool, state, _ = steps.prefill(params, pool, state, steps.pack(prompts))
        pool, state, _ = steps.decode(params, pool, state)
        step.trace(params, pool, state, np.zeros(rows, np.int32), mask)
    with pytest.raises(AssertionError, match="traced > 1 times"):
        step.trace(params, pool, state, np.zeros(rows, np.int16), mask)


def test_what_only_an_engine_acts_on_is_refused_by_name(steps):
    for setting in ({"n": 2}, {"presence_penalty": 1.0}, {"allowed_token_ids": (1,)}):
        with pytest.raises(InvalidRequest, match=f"{next(iter(setting))}="):
            steps.pack([A], SamplingParams(**setting))
    with pytest.raises(InvalidRequest, match="stop="):
        steps.pack([A], SamplingParams(stop="a"))
    with pytest.raises(InvalidRequest, match="0 tokens"):
        steps.pack([[]])
    with pytest.raises(InvalidRequest, match="1 settings for 2 prompts"):
        steps.pack([A, B], [SamplingParams()])
    with pytest.raises(InvalidRequest, match="or more lists of token ids"):
        steps.pack(A)
    with pytest.raises(InvalidRequest, match=f"token {TINY.vocab_size} is outside the vocabulary"):
        steps.pack([[TINY.vocab_size]])
    with pytest.raises(InvalidRequest, match="in a row of 64"):
        steps.pack([[1] * 64], starts=[60])


def test_a_mask_is_a_bit_a_token_and_one_of_another_shape_is_refused(steps, params):
    allowed = np.random.default_rng(0).random((3, TINY.vocab_size)) < 0.5
    by_bit = [pack_mask(set(np.flatnonzero(row).tolist()), TINY.vocab_size) for row in allowed]
    np.testing.assert_array_equal(mask_of(allowed), np.stack(by_bit))
    pool, state = steps.allocate()
    with pytest.raises(InvalidRequest, match=r"mask_BW has shape \(4, \d+\), .*pack_mask"):
        steps.decode(params, pool, state, mask_BW=np.ones((4, TINY.vocab_size), bool))
    with pytest.raises(InvalidRequest, match=r"sits_out_B has shape \(3,\), must have \(4,\)"):
        steps.decode(params, pool, state, sits_out_B=np.zeros(3, bool))


def test_a_second_compile_of_the_same_steps_takes_them_from_the_directory(tmp_path):
    boot = BootConfig(compile_cache_dir=tmp_path)
    config = replace(CONFIG, max_num_seqs=1)
    kinds = [
        {built.cache for built in compile_steps(TINY, config, boot, use_tqdm=False).executables.all}
        for _ in range(2)
    ]
    assert kinds[1] == {"hit"}
    assert "hit" not in kinds[0]


def test_a_mask_holds_from_the_first_token_on(steps, params):
    pool, state = steps.allocate()
    allowed = np.zeros((2, TINY.vocab_size), bool)
    allowed[0, [50, 51]] = allowed[1, 60] = True
    mask = mask_of(allowed)
    batch = steps.pack([A, B], mask_SW=mask)
    pool, state, first = steps.prefill(params, pool, state, batch)
    later = np.concatenate([mask, np.full_like(mask, ALL_ALLOWED)])
    pool, state, second = steps.decode(params, pool, state, mask_BW=later)
    for drawn in (first, second):
        assert int(drawn.tokens_X[0]) in (50, 51)
        assert int(drawn.tokens_X[1]) == 60
    with pytest.raises(InvalidRequest, match=r"mask_SW has shape \(1, \d+\), must have \(2"):
        steps.pack([A, B], mask_SW=mask[:1])


def test_two_prompts_in_one_row_and_sources_that_are_no_row_are_refused(steps):
    with pytest.raises(InvalidRequest, match=r"rows \[1, 1\] name a row twice"):
        steps.pack([A, B], rows=[1, 1])
    with pytest.raises(InvalidRequest, match="one or more"):
        steps.pack([])
    batch = steps.pack(np.array([A[:2], B]))
    np.testing.assert_array_equal(batch.tokens_T[:4], [*A[:2], *B])
    pool, state = steps.allocate()
    for sources, told in (([0, 1, 2, 4], "0 to 3"), ([0.5, 1, 2, 3], "0 to 3"), ([0], "shape")):
        with pytest.raises(InvalidRequest, match=told):
            steps.fork(pool, state, sources)


def test_an_engines_own_steps_are_taken_as_they_are(steps, booted):
    taken = steps_of(booted)
    assert taken.shapes == steps.shapes
    assert taken.buckets == steps.buckets
    assert taken.executables is booted.executables


def test_a_pool_too_small_for_rows_that_own_their_blocks_is_refused(booted):
    small = replace(booted, pool=replace(booted.pool, num_blocks=20))
    with pytest.raises(ConfigError, match="20 blocks, and 4 rows of 64 tokens own 33"):
        steps_of(small)


def test_a_row_that_is_not_there_is_refused(steps):
    with pytest.raises(InvalidRequest, match="raise max_num_seqs"):
        steps.pack([[1]] * 99)
