"""How the Triton prefill cuts its work, and that no cut changes a bit of a token's result."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxserve_kernels import paged_prefill
from jaxserve_kernels.streamed_triton_prefill import _cut

TOKENS, QUERIES = 64, 8
SEGMENTS = 6
cut = jax.jit(partial(_cut, TOKENS, QUERIES))
six = partial(st.lists, min_size=SEGMENTS, max_size=SEGMENTS)


@given(
    queries=six(st.integers(0, 20)).filter(lambda q: sum(q) <= TOKENS),
    earlier=six(st.integers(0, 50)),
)
def test_tiles_hold_each_token_once_at_its_position_of_its_own_row(queries, earlier):
    cu = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    context = np.array([new + old for new, old in zip(queries, earlier, strict=True)], np.int32)
    tiles = cut(context, cu)
    seen = []
    for row, start, end, shift, length in zip(*map(np.asarray, tiles), strict=True):
        for token in range(start, min(start + QUERIES, end)):
            seen.append(token)
            if token >= cu[-1]:
                assert length == 0
                continue
            assert cu[row] <= token < cu[row + 1] == end
            assert token + shift == context[row] - (cu[row + 1] - token)
            assert length == context[row]
    assert sorted(seen) == list(range(TOKENS))


K, G, H, Z = 2, 3, 64, 16
LENGTH = 150
run = jax.jit(partial(paged_prefill, scale=0.125, implementation="streamed_triton"))


def chunk(q: np.ndarray, pools: tuple, table: np.ndarray, start: int, end: int) -> np.ndarray:
    """Tokens start to end - 1 of a row as one segment, some way into the packed tokens."""
    before, width = 5, 160
    packed = np.full((width, *q.shape[1:]), np.nan, q.dtype)
    packed[:before] = 0
    packed[before : before + end - start] = q[start:end]
    out = run(
        packed,
        *pools,
        np.stack([table, table]),
        np.array([before, end], np.int32),
        np.array([0, before, before + end - start], np.int32),
    )
    return np.asarray(out)[before : before + end - start]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cuts", [[7, 64, 65], [149]])
def test_a_prompt_has_the_same_bits_in_whatever_chunks_it_is_computed(dtype, cuts):
    rng = np.random.default_rng(0)
    table = (rng.permutation(10) + 1).astype(np.int32)
    pools = rng.standard_normal((2, 11, K, Z, H), np.float32).astype(jnp.dtype(dtype))
    q = rng.standard_normal((LENGTH, K * G, H), np.float32).astype(jnp.dtype(dtype))
    whole = chunk(q, tuple(pools), table, 0, LENGTH)
    edges = [0, *cuts, LENGTH]
    parts = [chunk(q, tuple(pools), table, *span) for span in pairwise(edges)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
