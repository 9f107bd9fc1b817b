"""The jitted steps: against an uncached forward pass, in place, and never off their shapes."""

import re
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import NoExecutable
from jaxserve.model.definition import params_of
from jaxserve.model.params import param_specs
from jaxserve.plan.batch import DecodeState, mask_spec
from jaxserve.plan.buckets import DecodeShape
from jaxserve.runtime.compiler import compile_executables
from jaxserve.runtime.executables import (
    StepShapes,
    shape_structs,
    zeros,
)
from jaxserve.runtime.runner import ModelRunner
from jaxserve.runtime.steps import decode_step, permute_rows
from tests.models import FULL, TINY, greedy_by_full_forward, module_of, pack_prefill

BLOCK, WIDTH, ROWS = 8, 64, 4
P = WIDTH // BLOCK


def shapes_of(config, backend, num_blocks=40, decode=(4,), prefill=(32,)):
    return StepShapes(
        model=config,
        dtype="float32",
        backend=backend,
        num_blocks=num_blocks,
        block_size=BLOCK,
        blocks_per_row=P,
        max_num_seqs=ROWS,
        decode=tuple(DecodeShape(rows, WIDTH) for rows in decode),
        prefill_tokens=prefill,
    )


@pytest.fixture(scope="module", params=[("tiny", "streamed"), ("full", "rectangle")], ids=str)
def built(request):
    """(module, shapes, executables) of one config and backend."""
    config, backend = {"tiny": TINY, "full": FULL}[request.param[0]], request.param[1]
    shapes = shapes_of(config, backend)
    return module_of(config), shapes, compile_executables(shapes, workers=2)


def pack(chunks, tokens=32):
    return pack_prefill(chunks, tokens=tokens, segments=ROWS, blocks_per_row=P, block_size=BLOCK)


def test_chunked_packed_prefill_and_decode_equal_an_uncached_forward_pass(built):
    module, shapes, executables = built
    runner = ModelRunner(params_of(module), executables, shapes)
    rng = np.random.default_rng(5)
    a, b, c = (rng.integers(0, 131, n).tolist() for n in (37, 9, 1))
    blocks = {"a": [7, 3, 9, 30, 2, 12, 11], "b": [20, 1, 5, 4], "c": [8, 6, 10]}

    def prefill(*chunks):
        return runner.prefill(pack(list(chunks))).read()

    none = 10**6
    prefill((a[:20], 0, blocks["a"], none), (b[:3], 0, blocks["b"], none))
    first = prefill(
        (b[3:], 3, blocks["b"], 1), (c, 0, blocks["c"], 0), (a[20:], 20, blocks["a"], 2)
    )
    got = {"b": [int(first[0])], "c": [int(first[1])], "a": [int(first[2])]}
    order, lens = ["c", "b", "a"], {"a": 37, "b": 9, "c": 1}
    for _ in range(12):
        new_blocks = np.zeros(4, np.int32)
        for row, name in enumerate(order):
            if lens[name] % BLOCK == 0:
                new_blocks[row] = blocks[name][lens[name] // BLOCK]
            lens[name] += 1
        tokens = runner.decode(DecodeShape(4, WIDTH), new_blocks).read()
        for row, name in enumerate(order):
            got[name].append(int(tokens[row]))
    for name, prompt in (("a", a), ("b", b), ("c", c)):
        assert got[name] == greedy_by_full_forward(module, prompt, 13), name


def test_a_permuted_row_goes_on_where_it_was_and_an_emptied_one_stays_empty(built):
    module, shapes, executables = built
    prompts = [[5, 6, 7], [90, 3], [14, 15, 16, 17]]
    blocks = [[4, 5], [6, 7], [8, 9]]
    runner = ModelRunner(params_of(module), executables, shapes)
    first = runner.prefill(
        pack([(p, 0, b, r) for r, (p, b) in enumerate(zip(prompts, blocks, strict=True))])
    ).read()
    runner.permute_rows(np.asarray([2, 0, -1, -1], np.int32))
    tokens = runner.decode(DecodeShape(4, WIDTH), np.zeros(4, np.int32)).read()
    assert [int(first[2]), int(tokens[0])] == greedy_by_full_forward(module, prompts[2], 2)
    assert [int(first[0]), int(tokens[1])] == greedy_by_full_forward(module, prompts[0], 2)
    assert runner.context_lens().tolist() == [5, 4, 0, 0]


def test_every_step_gives_back_the_shapes_it_took(built):
    _, shapes, executables = built
    pool, state = shape_structs(shapes.pool_specs()), shape_structs(shapes.state_specs())
    for built_step in (*executables.decode.values(), *executables.prefill.values()):
        out_pool, out_state, output = built_step.compiled.out_info
        chex.assert_trees_all_equal_shapes_and_dtypes(out_pool, pool)
        chex.assert_trees_all_equal_shapes_and_dtypes(out_state, state)
        for scores in (output.scores, output.prompt):
            if scores is not None:
                chex.assert_type(list(scores), [jnp.float32, jnp.int32, jnp.int32, jnp.float32])
                chex.assert_rank(list(scores), [1, 1, 2, 2])
        chex.assert_type(output.tokens_X, jnp.int32)
        chex.assert_rank(output.tokens_X, 1)


def test_permute_rows_moves_every_leaf_of_the_state():
    state = zeros(shapes_of(TINY, "streamed").state_specs())
    filled = jax.tree.map(
        lambda x: jnp.arange(1, x.size + 1, dtype=x.dtype).reshape(x.shape), state
    )
    filled = filled._replace(counts_BV=jnp.ones_like(filled.counts_BV))  # where 3 rows differ
    filled = filled._replace(counts_BV=filled.counts_BV.at[3].set(7))
    moved = permute_rows(filled, jnp.asarray([3, -1, 0, -1], jnp.int32))
    assert isinstance(moved, DecodeState)
    for old, new in zip(jax.tree.leaves(filled), jax.tree.leaves(moved), strict=True):
        np.testing.assert_array_equal(new[0], old[3])
        np.testing.assert_array_equal(new[2], old[0])
        assert not np.asarray(new[1]).any()
        assert not np.asarray(new[3]).any()


def test_no_step_copies_the_pool(built):
    """Every pool byte is aliased, workspace ignores the pool's size, no copy of its shape."""
    _, shapes, small = built
    many = replace(shapes, num_blocks=100 * shapes.num_blocks)
    large = compile_executables(many, workers=2)
    assert [step.temp_bytes for step in small.all] == [step.temp_bytes for step in large.all]
    state_bytes = sum(s.nbytes for s in jax.tree.leaves(shapes.state_specs()))
    pool_bytes = sum(s.nbytes for half in many.pool_specs() for s in half)
    c = shapes.model
    layer = f"f32[{many.num_blocks},{c.num_kv_heads},{BLOCK},{c.head_dim}]"
    for step in (*large.decode.values(), *large.prefill.values()):
        text = step.compiled.as_text()
        assert layer in text, "the pattern below would match nothing"
        assert not re.findall(rf"= {re.escape(layer)}\S* copy\(", text), step.name
        aliased = step.compiled.memory_analysis().alias_size_in_bytes
        assert aliased == pool_bytes + state_bytes, step.name


def test_an_undonated_pool_would_be_seen_as_a_copy(built):
    """The trap for the test above: without donation nothing is aliased."""
    _, shapes, _ = built
    step = partial(
        decode_step,
        config=shapes.model,
        backend=shapes.backend,
        shape=shapes.decode[0],
        block_size=BLOCK,
    )
    compiled = (
        jax.jit(step)
        .lower(
            param_specs(shapes.model, "float32"),
            shape_structs(shapes.pool_specs()),
            shape_structs(shapes.state_specs()),
            jax.ShapeDtypeStruct((ROWS,), jnp.int32),
            shape_structs(mask_spec(ROWS, shapes.model.vocab_size)),
        )
        .compile()
    )
    assert compiled.memory_analysis().alias_size_in_bytes == 0


def test_a_shape_that_was_not_compiled_is_an_error_that_lists_what_was(built):
    _, shapes, executables = built
    with pytest.raises(NoExecutable, match="decode 3x64 was not compiled"):
        executables.decode_for(DecodeShape(3, WIDTH))
    with pytest.raises(NoExecutable, match="prefill 33 was not compiled"):
        executables.prefill_for(33)
    with pytest.raises(TypeError):
        executables.decode_for(shapes.decode[0])(1, 2, 3)
