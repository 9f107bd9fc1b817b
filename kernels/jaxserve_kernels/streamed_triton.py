"""Paged decode streamed by a Pallas kernel, lowered by Triton for Ampere, Ada and Hopper.

A program takes one row, one kv head and all query heads of that, so each key and value is read
once. It walks a row's splits, tile by tile; splits follow from the row's own length alone, so a
row's result has the same bits in any batch. Where a row may have several, each leaves its sums in
float32, not yet divided, and a second kernel merges them.
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
from jaxserve_kernels.streamed_triton_prefill import paged_prefill
from jaxserve_kernels.tiling import DecodePlan, decode_plan
from jaxserve_kernels.widening import check_pool, float8_unit, widened

__all__ = ["paged_attention", "paged_prefill"]

_LOG2_E = math.log2(math.e)
# Below every score, and finite: the difference of two peaks is never NaN.
_FLOOR = float(jnp.finfo(jnp.float32).min)


class _Options(NamedTuple):
    """What is fixed when a kernel is made; ``compute`` is the dtype of what is multiplied.

    Values of a float8 pool are multiplied as if they were ``float8_unit`` times smaller.
    """

    scale: float
    window: int | None
    soft_cap: float | None
    plan: DecodePlan
    compute: Any
    float8_unit: int


class _Sums(NamedTuple):
    """Softmax state of a group of query heads, not yet divided; exponents are of 2."""

    peak_G: jax.Array
    total_G: jax.Array
    values_GH: jax.Array


class _Span(NamedTuple):
    """What a row reads: positions ``first`` to ``length - 1``, which lie in tiles ``start`` to
    ``end - 1``, ``per_split`` tiles a split."""

    first: jax.Array
    length: jax.Array
    start: jax.Array
    end: jax.Array
    per_split: jax.Array

    @property
    def splits(self) -> jax.Array:
        """How many there are, none in an empty row."""
        return _cdiv(self.end - self.start, self.per_split)


def _cdiv(a: jax.Array, b: jax.Array | int) -> jax.Array:
    return lax.div(a + (b - 1), jnp.asarray(b, jnp.int32))


def _lanes(size: int) -> jax.Array:
    """0, 1, ... up to ``size`` rounded up to a power of two, which Triton's arrays must be."""
    return lax.iota(jnp.int32, pl.next_power_of_2(size))


def _span(length: jax.Array, options: _Options) -> _Span:
    plan = options.plan
    first = jnp.zeros_like(length)
    if options.window is not None:
        first = jnp.maximum(length - options.window, 0)
    start, end = lax.div(first, jnp.int32(plan.keys)), _cdiv(length, plan.keys)
    per_split = jnp.clip(_cdiv(end - start, plan.few_splits), plan.min_split, plan.mid_split)
    per_split = jnp.maximum(per_split, _cdiv(end - start, plan.max_splits))
    return _Span(first, length, start, end, per_split)


def _fold_tile(
    index: jax.Array,
    sums: _Sums,
    *,
    row: jax.Array,
    head: jax.Array,
    q_GH: jax.Array,
    k_ref: Any,
    v_ref: Any,
    tables_ref: Any,
    factor: jax.Array | float,
    span: _Span,
    options: _Options,
) -> _Sums:
    """The sums with one tile of keys and values in them."""
    Z, H = k_ref.shape[2:]
    position = index * options.plan.keys + _lanes(options.plan.keys)
    seen = position < span.length
    if options.window is not None:
        seen &= position >= span.first
    column, offset = lax.div(position, jnp.int32(Z)), lax.rem(position, jnp.int32(Z))
    block = plt.load(tables_ref.at[row, column], mask=seen, other=0)
    lane = _lanes(H)
    at = (block[:, None], head, offset[:, None], lane[None])
    # What is not seen is not read: whatever memory holds there, NaN included, becomes zero.
    mask = seen[:, None] & (lane < H)[None]
    zero = jnp.zeros((), k_ref.dtype)
    k_WH = widened(
        plt.load(k_ref.at[at], mask=mask, other=zero), options.compute, options.float8_unit
    )
    v_WH = widened(
        plt.load(v_ref.at[at], mask=mask, other=zero), options.compute, options.float8_unit
    )

    dot = partial(plt.dot, precision=lax.Precision.HIGHEST)
    scores = dot(q_GH, k_WH, trans_b=True) * factor
    if options.soft_cap is not None:
        scores = (options.soft_cap * _LOG2_E) * jnp.tanh(scores)
    scores = jnp.where(seen[None], scores, _FLOOR)
    peak_G = jnp.maximum(sums.peak_G, jnp.max(scores, axis=1))
    keep_G = jnp.exp2(sums.peak_G - peak_G)
    weights = jnp.exp2(scores - peak_G[:, None])
    values_GH = dot(weights.astype(options.compute), v_WH)
    return _Sums(
        peak_G,
        keep_G * sums.total_G + jnp.sum(weights, axis=1),
        keep_G[:, None] * sums.values_GH + values_GH,
    )


def _divided(
    sums: _Sums,
    extras: Any,
    head: jax.Array,
    query_heads: jax.Array,
    mask: jax.Array | None,
    options: _Options,
) -> jax.Array:
    """The result of ``query_heads``, [..., H]: zeros where no key was seen."""
    keep, total = float(options.float8_unit), sums.total_G
    if extras.sinks_N is not None:
        sink_G = plt.load(extras.sinks_N.at[query_heads], mask=mask) * _LOG2_E
        peak_G = jnp.maximum(sums.peak_G, sink_G)
        keep = jnp.exp2(sums.peak_G - peak_G)
        total = keep * total + jnp.exp2(sink_G - peak_G)
        keep *= options.float8_unit
    if extras.v_scale_K is not None:
        keep *= plt.load(extras.v_scale_K.at[head])
    factor_G = keep / jnp.where(total == 0.0, 1.0, total)
    return sums.values_GH * factor_G[..., None]


def _decode_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    tables_ref: Any,
    lengths_ref: Any,
    extras: Any,
    *out: Any,
    options: _Options,
) -> None:
    """Program (row, kv head, i): splits i, i + programs, ... of the row.

    ``out`` is the result [B, N, H] where a row has one split, else ``_Sums``: [B, K, S, G] twice
    and values [B, K, S, G, H].
    """
    row, head, program = (pl.program_id(axis) for axis in range(3))
    plan, H = options.plan, q_ref.shape[2]
    G = q_ref.shape[1] // k_ref.shape[1]
    span = _span(plt.load(lengths_ref.at[row]), options)

    heads, lane = lax.iota(jnp.int32, plan.group), _lanes(H)
    mask_G, mask_GH = heads < G, (heads < G)[:, None] & (lane < H)[None]
    at_q = (row, (head * G + heads)[:, None], lane[None])
    q_GH = plt.load(q_ref.at[at_q], mask=mask_GH, other=0.0)
    factor = options.scale * (_LOG2_E if options.soft_cap is None else 1 / options.soft_cap)
    factor *= options.float8_unit
    if extras.k_scale_K is not None:
        factor *= plt.load(extras.k_scale_K.at[head])
    if (q_GH.dtype, options.compute) == (jnp.bfloat16, jnp.float16):  # into float16's range
        q_GH = q_GH.astype(jnp.float32)
        size_G = jnp.max(jnp.abs(q_GH), axis=1)
        size_G = jnp.where(size_G == 0.0, 1.0, size_G)
        q_GH, factor = q_GH / size_G[:, None], factor * size_G[:, None]
    q_GH = q_GH.astype(options.compute)

    def sums_of(split: jax.Array) -> _Sums:
        start = span.start + split * span.per_split
        return lax.fori_loop(
            start,
            jnp.minimum(start + span.per_split, span.end),
            partial(
                _fold_tile,
                row=row,
                head=head,
                q_GH=q_GH,
                k_ref=k_ref,
                v_ref=v_ref,
                tables_ref=tables_ref,
                factor=factor,
                span=span,
                options=options,
            ),
            _Sums(
                jnp.full(heads.shape, _FLOOR, jnp.float32),
                jnp.zeros(heads.shape, jnp.float32),
                jnp.zeros(mask_GH.shape, jnp.float32),
            ),
        )

    if plan.splits == 1:
        sums = sums_of(jnp.int32(0))
        result = _divided(sums, extras, head, head * G + heads, mask_G, options)
        plt.store(out[0].at[at_q], result.astype(out[0].dtype), mask=mask_GH)
        return
    peak_ref, total_ref, values_ref = out

    def keep_split(i: jax.Array, _: None) -> None:
        split = program + i * plan.programs
        sums = sums_of(split)
        at = (row, head, split, heads)
        plt.store(peak_ref.at[at], sums.peak_G, mask=mask_G)
        plt.store(total_ref.at[at], sums.total_G, mask=mask_G)
        at_values = (row, head, split, heads[:, None], lane[None])
        plt.store(values_ref.at[at_values], sums.values_GH, mask=mask_GH)

    lax.fori_loop(0, _cdiv(span.splits - program, plan.programs), keep_split, None)


def _merge_kernel(
    sums: Any, lengths_ref: Any, extras: Any, out_ref: Any, *, options: _Options
) -> None:
    """Program (row, query head): the sums of all splits as one result."""
    row, query_head = pl.program_id(0), pl.program_id(1)
    G, H = sums.values_GH.shape[3:]
    head, member = lax.div(query_head, jnp.int32(G)), lax.rem(query_head, jnp.int32(G))
    splits = _span(plt.load(lengths_ref.at[row]), options).splits
    # As many lanes for any table, so that the order of the sum does not depend on its width.
    split, lane = _lanes(options.plan.max_splits), _lanes(H)
    mask_S = split < splits
    at = (row, head, split, member)
    peak_S = plt.load(sums.peak_G.at[at], mask=mask_S, other=_FLOOR)
    total_S = plt.load(sums.total_G.at[at], mask=mask_S, other=0.0)
    mask_SH = mask_S[:, None] & (lane < H)[None]
    at_values = (row, head, split[:, None], member, lane[None])
    values_SH = plt.load(sums.values_GH.at[at_values], mask=mask_SH, other=0.0)
    peak = jnp.max(peak_S)
    keep_S = jnp.where(mask_S, jnp.exp2(peak_S - peak), 0.0)
    merged = _Sums(peak, jnp.sum(keep_S * total_S), jnp.sum(keep_S[:, None] * values_SH, axis=0))
    result = _divided(merged, extras, head, query_head, None, options)
    at_out = (row, query_head, lane)
    plt.store(out_ref.at[at_out], result.astype(out_ref.dtype), mask=lane < H)


def _compute_dtype(q_dtype: Any, pool_dtype: Any) -> Any:
    """What both products take: exact for the pool's values and, up to a factor, the query's."""
    if pool_dtype.name not in NARROW:
        return q_dtype if q_dtype == pool_dtype else jnp.dtype(jnp.float32)
    if pool_dtype == jnp.float8_e4m3fn and q_dtype == jnp.bfloat16:
        return jnp.dtype(jnp.float16)  # one instruction converts two values, for bfloat16 four
    return q_dtype


def paged_attention(
    q_BNH: jax.Array,
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    block_tables_BP: jax.Array,
    context_lens_B: jax.Array,
    extras: Extras,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    interpret: bool,
) -> jax.Array:
    """See :func:`jaxserve_kernels.paged_attention`."""
    B, N, H = q_BNH.shape
    _, K, Z, _ = k_pool_CKZH.shape
    check_pool(k_pool_CKZH)
    compute = _compute_dtype(q_BNH.dtype, k_pool_CKZH.dtype)
    width = block_tables_BP.shape[1] * Z
    plan = decode_plan(
        B * K, width if window is None else min(width, window), N // K, H, compute.itemsize
    )
    unit = float8_unit(k_pool_CKZH.dtype, interpret)
    options = _Options(scale, window, soft_cap, plan, compute, unit)
    out_shape = jax.ShapeDtypeStruct((B, N, H), q_BNH.dtype)
    per_head = jax.ShapeDtypeStruct((B, K, plan.splits, N // K), jnp.float32)
    sums_shape = (
        per_head,
        per_head,
        jax.ShapeDtypeStruct((*per_head.shape, H), jnp.float32),
    )
    out = pl.pallas_call(
        partial(_decode_kernel, options=options),
        grid=(B, K, plan.programs),
        out_shape=out_shape if plan.splits == 1 else sums_shape,
        compiler_params=plt.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret,
        name="paged_decode",
    )(q_BNH, k_pool_CKZH, v_pool_CKZH, block_tables_BP, context_lens_B, extras)
    if plan.splits == 1:
        return out
    return pl.pallas_call(
        partial(_merge_kernel, options=options),
        grid=(B, N),
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=plan.merge_warps, num_stages=1),
        interpret=interpret,
        name="paged_decode_merge",
    )(_Sums(*out), context_lens_B, extras)
