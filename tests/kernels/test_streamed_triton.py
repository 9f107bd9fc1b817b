"""The Triton decode kernel beyond the contract: its splits, and what it refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxserve_kernels import paged_attention, reference, splits, streamed_triton, tiling, widening

K, Z, H = 1, 16, 64


@given(
    keys=st.sampled_from([16, 32, 64]),
    width=st.integers(1, 200_000),
    window=st.none() | st.integers(1, 9000),
    pairs=st.integers(1, 4096),
    seed=st.integers(0, 2**16),
)
def test_the_splits_of_any_row_are_whole_tiles_that_fit_the_plan(keys, width, window, pairs, seed):
    rule = tiling.split_rule(keys)
    most = rule.most(width if window is None else min(width, window))
    lengths = np.random.default_rng(seed).integers(0, width + 1, 64, np.int32)
    lengths[:2] = 0, width
    span = jax.vmap(partial(splits.span_of, rule=rule, window=window))(lengths)
    counts = np.asarray(jax.vmap(lambda s: s.splits)(span))
    first, start, end, per_split = map(np.asarray, (span.first, *span[2:]))
    np.testing.assert_array_equal(first, np.maximum(lengths - (window or width), 0))
    np.testing.assert_array_equal(start, first // keys)
    np.testing.assert_array_equal(end, -(-lengths // keys))
    assert (counts[lengths > 0] >= 1).all()
    assert (counts[lengths == 0] == 0).all()
    assert (counts <= most).all()
    assert (counts * per_split >= end - start).all()
    assert ((counts - 1) * per_split < np.maximum(end - start, 1)).all()
    assert 1 <= tiling.programs_sharing(most, pairs) <= most <= rule.max_splits


LENGTHS = (0, 1, 255, 257, 2100, 5000)


@pytest.fixture(scope="module")
def long_rows():
    """Queries, pools, tables and lengths of rows with up to 16 splits."""
    rng = np.random.default_rng(0)
    width = -(-max(LENGTHS) // Z)
    q, pools = rng.standard_normal((len(LENGTHS), 3, H)), rng.standard_normal((2, width, K, Z, H))
    tables = np.stack([rng.permutation(width) for _ in LENGTHS]).astype(np.int32)
    return (*map(np.float32, (q, *pools)), tables, np.array(LENGTHS, np.int32))


@pytest.mark.parametrize("sinks", [None, np.float32([2.0, -np.inf, 5.0])])
def test_rows_of_many_splits_equal_the_reference(long_rows, sinks):
    got = paged_attention(*long_rows, scale=0.2, sinks=sinks, implementation="streamed_triton")
    want = reference.paged_attention(*long_rows, scale=0.2, sinks=sinks)
    np.testing.assert_allclose(np.asarray(got), want, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("programs", [3])
def test_how_many_programs_share_a_row_changes_no_bit(long_rows, monkeypatch, programs):
    call = partial(
        streamed_triton.paged_attention,
        extras=streamed_triton.Extras(None, None, None),
        scale=0.2,
        window=None,
        soft_cap=None,
        interpret=True,
    )
    many = np.asarray(jax.jit(call)(*long_rows))
    assert tiling.programs_sharing(20, len(LENGTHS)) > programs
    monkeypatch.setattr(streamed_triton, "programs_sharing", lambda *_: programs)
    few = np.asarray(jax.jit(lambda *arrays: call(*arrays))(*long_rows))
    np.testing.assert_array_equal(few, many)


def test_float8_without_instructions_for_it_has_the_same_values():
    finite = np.arange(256, dtype=np.uint8)[(np.arange(256) & 0x7F) != 0x7F]
    values = finite.view(jnp.float8_e4m3fn)
    moved = widening.widened(jnp.asarray(values), jnp.float16, 2**8)
    np.testing.assert_array_equal(np.asarray(moved, np.float32) * 2**8, values.astype(np.float32))


@pytest.mark.parametrize(
    ("head_size", "pool", "why"),
    [
        (72, jax.ShapeDtypeStruct((8, 1, Z, 72), jnp.float32), "head size 72"),
        (512, jax.ShapeDtypeStruct((8, 1, Z, 512), jnp.float32), "head size 512"),
        (64, jax.ShapeDtypeStruct((2**22, 1, Z, 64), jnp.int8), "4294967296 elements of int8"),
    ],
)
def test_what_the_kernel_cannot_do_is_passed_over_by_the_family(head_size, pool, why):
    scales = {"k_scale": 1.0, "v_scale": 1.0} if pool.dtype == jnp.int8 else {}
    call = partial(paged_attention, scale=0.1, **scales)
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    q = jax.ShapeDtypeStruct((2, 4, head_size), jnp.float32)
    rest = (q, pool, pool, ints((2, 4)), ints((2,)))
    with pytest.raises(NotImplementedError, match=why):
        jax.eval_shape(partial(call, implementation="streamed_triton"), *rest)
    assert jax.eval_shape(partial(call, implementation="auto"), *rest).shape == q.shape
