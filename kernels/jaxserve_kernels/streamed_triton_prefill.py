"""Ragged causal prefill over paged keys, in Pallas for Triton: one kernel, no rectangle.

A program takes a tile of queries of one segment and one kv head, with the heads that share the kv
head packed into the rows of its products, and walks the tiles of keys those queries can see. Keys
are cut at multiples of the tile from position 0, and a tile that shows a query nothing leaves its
softmax state bit for bit as it was: a token's result depends neither on the tokens packed beside
it nor on how its prompt was cut into chunks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxserve_kernels.arguments import NARROW, Extras
from jaxserve_kernels.widening import check_pool, float8_unit, widened

# Below every score, and finite: a tile that shows a query nothing leaves exp2(0), never NaN.
_FLOOR = float(jnp.finfo(jnp.float32).min)
_LOG2_E = math.log2(math.e)


class _Tiling(NamedTuple):
    """Sizes of a program; ``queries`` times ``group`` rows are multiplied at once.

    Triton's tensors have power-of-two sides: ``group`` and ``lanes`` are the query heads of a kv
    head and the head size, rounded up.
    """

    queries: int
    group: int
    keys: int
    lanes: int
    num_stages: int


def _tiling(group: int, head_size: int, itemsize: int) -> _Tiling:
    """Fits the registers and the shared memory of Ampere, Ada and Hopper without spills.

    Products of float32 have no tensor cores: their operands go through registers whole.
    """
    padded, lanes = pl.next_power_of_2(group), pl.next_power_of_2(head_size)
    if itemsize == 4:
        rows, keys, num_stages = 16, 16, 1
    else:
        rows, keys, num_stages = 128 if lanes <= 128 else 64, 64 if lanes <= 64 else 32, 2
    return _Tiling(
        queries=max(rows // padded, 1),
        group=padded,
        keys=keys,
        lanes=lanes,
        num_stages=num_stages,
    )


class _Tiles(NamedTuple):
    """What each program works on, int32 [tiles] each; unused ones have no tokens.

    ``end`` is one past the last token of the segment; a token at index t of the packed tokens has
    position t + ``shift``, and ``context`` is 0 for the tokens past the last segment.
    """

    row: jax.Array
    start: jax.Array
    end: jax.Array
    shift: jax.Array
    context: jax.Array


def _cut(
    tokens: int, queries: int, context_lens_S: jax.Array, cu_query_lens_S1: jax.Array
) -> _Tiles:
    """Cut each segment into tiles of ``queries`` tokens; padding is a segment without context."""
    segments = context_lens_S.shape[0]
    cu = jnp.concatenate([cu_query_lens_S1, jnp.array([tokens], jnp.int32)])
    context = jnp.concatenate([context_lens_S, jnp.zeros((1,), jnp.int32)])
    ends = jnp.cumsum((cu[1:] - cu[:-1] + queries - 1) // queries, dtype=jnp.int32)
    # Every segment that is not empty wastes part of a tile at most.
    tile = jnp.arange(pl.cdiv(tokens, queries) + min(segments + 1, tokens), dtype=jnp.int32)
    passed = tile[:, None] >= ends[None, :]
    row = jnp.minimum(jnp.sum(passed, axis=1, dtype=jnp.int32), segments)
    before = jnp.max(jnp.where(passed, ends[None, :], 0), axis=1)
    used = tile < ends[-1]
    start = jnp.where(used, cu[row] + (tile - before) * queries, tokens)
    return _Tiles(
        # The padding's row of the block tables does not exist; it reads none of it.
        row=jnp.minimum(row, segments - 1),
        start=start,
        end=jnp.where(used, cu[row + 1], tokens),
        shift=context[row] - cu[row + 1],
        context=jnp.where(used, context[row], 0),
    )


def _compute_dtype(q_dtype: jnp.dtype, pool_dtype: jnp.dtype) -> jnp.dtype:
    """Dtype of the operands of both products, which holds every value of either array."""
    same = pool_dtype.name in NARROW or q_dtype == pool_dtype
    return q_dtype if same else jnp.dtype(jnp.float32)


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    tables_ref: Any,
    tiles: Any,
    extras: Any,
    out_ref: Any,
    *,
    tiling: _Tiling,
    unit: int,
    group: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """One tile of queries against one kv head; scores are kept in units of log 2."""
    tile, kv_head = pl.program_id(0), pl.program_id(1)
    row, start, end, shift, context = (plt.load(ref.at[tile]) for ref in tiles)
    _, _, block_size, head_size = k_ref.shape
    keys, rows = tiling.keys, tiling.queries * tiling.group
    compute = _compute_dtype(q_ref.dtype, k_ref.dtype)
    dot = partial(plt.dot, precision=lax.Precision.HIGHEST if compute == jnp.float32 else None)

    lane = jnp.arange(tiling.lanes, dtype=jnp.int32)[None, :]
    index = jnp.arange(rows, dtype=jnp.int32)
    token, member = start + index // tiling.group, index % tiling.group
    mine = (token < end) & (member < group)
    # What no row owns is masked, and its indices stay apart from those of rows that do.
    head = kv_head * group + member
    at = (token[:, None], head[:, None], lane)
    stored = mine[:, None] & (lane < head_size)
    q = plt.load(q_ref.at[at], mask=stored, other=0.0).astype(compute)
    position = token + shift
    factor: Any = scale * unit
    if extras.k_scale_K is not None:
        factor *= plt.load(extras.k_scale_K.at[kv_head])

    # Positions the tile's queries see between them; nothing outside is read.
    limit = jnp.minimum(start + tiling.queries + shift, context)
    first = jnp.zeros_like(limit)
    if window is not None:
        first = jnp.maximum(start + shift - (window - 1), 0)

    def fold(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, values = state
        key = j * keys + jnp.arange(keys, dtype=jnp.int32)
        held = (key >= first) & (key < limit)
        block = plt.load(tables_ref.at[row, key // block_size], mask=held, other=0)
        place = (block[:, None], kv_head, (key % block_size)[:, None], lane)
        read = held[:, None] & (lane < head_size)
        # Unread values are zeros: a softmax weight of zero does not silence a NaN.
        zero = jnp.zeros((), k_ref.dtype)
        k = widened(plt.load(k_ref.at[place], mask=read, other=zero), compute, unit)
        v = widened(plt.load(v_ref.at[place], mask=read, other=zero), compute, unit)
        scores = dot(q, k, trans_b=True) * factor
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        visible = held[None, :] & (key[None, :] <= position[:, None])
        if window is not None:
            visible &= key[None, :] > position[:, None] - window
        scores = jnp.where(visible, scores * _LOG2_E, _FLOOR)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        keep = jnp.exp2(peak - new_peak)
        weights = jnp.where(visible, jnp.exp2(scores - new_peak[:, None]), 0.0)
        total = keep * total + jnp.sum(weights, axis=1)
        return new_peak, total, keep[:, None] * values + dot(weights.astype(compute), v)

    if extras.sinks_N is None:
        peak, total = jnp.full((rows,), _FLOOR), jnp.zeros((rows,))
    else:
        peak = plt.load(extras.sinks_N.at[head], mask=mine, other=0.0) * _LOG2_E
        total = jnp.ones((rows,))
    _, total, values = lax.fori_loop(
        first // keys,
        pl.cdiv(limit, keys),
        fold,
        (peak, total, jnp.zeros((rows, tiling.lanes))),
    )
    if extras.v_scale_K is not None:
        values *= unit * plt.load(extras.v_scale_K.at[kv_head])
    out = values / jnp.where(total == 0.0, 1.0, total)[:, None]
    plt.store(out_ref.at[at], out.astype(out_ref.dtype), mask=stored)


def paged_prefill(
    q_TNH: jax.Array,
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    block_tables_SP: jax.Array,
    context_lens_S: jax.Array,
    cu_query_lens_S1: jax.Array,
    extras: Extras,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    interpret: bool,
) -> jax.Array:
    """See :func:`jaxserve_kernels.paged_prefill`."""
    check_pool(k_pool_CKZH)
    T, N, H = q_TNH.shape
    K = k_pool_CKZH.shape[1]
    compute = _compute_dtype(q_TNH.dtype, k_pool_CKZH.dtype)
    tiling = _tiling(N // K, H, compute.itemsize)
    tiles = _cut(T, tiling.queries, context_lens_S, cu_query_lens_S1)
    return pl.pallas_call(
        partial(
            _kernel,
            tiling=tiling,
            unit=float8_unit(k_pool_CKZH.dtype, interpret),
            group=N // K,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        ),
        grid=(tiles.start.shape[0], K),
        out_shape=jax.ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype),
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=tiling.num_stages),
        interpret=interpret,
        name="paged_prefill",
    )(q_TNH, k_pool_CKZH, v_pool_CKZH, block_tables_SP, tiles, extras)
