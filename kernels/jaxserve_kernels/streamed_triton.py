"""Paged decode streamed by a Pallas kernel, lowered by Triton for Ampere, Ada and Hopper.

A program takes one row, one kv head and all query heads of that, so each key and value is read
once. It walks a row's splits, tile by tile; splits follow from the row's own length alone, so a
row's result has the same bits in any batch. Where a row may have several, each leaves its sums in
float32, not yet divided, and a second kernel merges them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxserve_kernels.arguments import NARROW, Extras
from jaxserve_kernels.splits import (
    FLOOR,
    LOG2_E,
    Span,
    Sums,
    cdiv,
    divided,
    lanes,
    merge_splits,
    span_of,
)
from jaxserve_kernels.streamed_triton_prefill import paged_prefill
from jaxserve_kernels.tiling import DecodePlan, decode_plan, programs_sharing
from jaxserve_kernels.widening import check_pool, float8_unit, widened

__all__ = ["paged_attention", "paged_prefill"]


class _Options(NamedTuple):
    """What is fixed when the kernel is made; ``compute`` is the dtype of what is multiplied.

    ``programs`` share a row's ``splits``, the most a row can have. Values of a float8 pool are
    multiplied as if they were ``float8_unit`` times smaller.
    """

    scale: float
    window: int | None
    soft_cap: float | None
    plan: DecodePlan
    splits: int
    programs: int
    compute: Any
    float8_unit: int


def _fold_tile(
    index: jax.Array,
    sums: Sums,
    *,
    row: jax.Array,
    head: jax.Array,
    q_GH: jax.Array,
    k_ref: Any,
    v_ref: Any,
    tables_ref: Any,
    factor: jax.Array | float,
    span: Span,
    options: _Options,
) -> Sums:
    """The sums with one tile of keys and values in them."""
    keys, (Z, H) = options.plan.rule.keys, k_ref.shape[2:]
    position = index * keys + lanes(keys)
    seen = position < span.length
    if options.window is not None:
        seen &= position >= span.first
    column, offset = lax.div(position, jnp.int32(Z)), lax.rem(position, jnp.int32(Z))
    block = plt.load(tables_ref.at[row, column], mask=seen, other=0)
    lane = lanes(H)
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
        scores = (options.soft_cap * LOG2_E) * jnp.tanh(scores)
    scores = jnp.where(seen[None], scores, FLOOR)
    peak_G = jnp.maximum(sums.peak_G, jnp.max(scores, axis=1))
    keep_G = jnp.exp2(sums.peak_G - peak_G)
    weights = jnp.exp2(scores - peak_G[:, None])
    values_GH = dot(weights.astype(options.compute), v_WH)
    return Sums(
        peak_G,
        keep_G * sums.total_G + jnp.sum(weights, axis=1),
        keep_G[:, None] * sums.values_GH + values_GH,
    )


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

    ``out`` is the result [B, N, H] where a row has one split, else ``Sums``: [B, K, S, G] twice
    and values [B, K, S, G, H].
    """
    row, head, program = (pl.program_id(axis) for axis in range(3))
    rule, H = options.plan.rule, q_ref.shape[2]
    G = q_ref.shape[1] // k_ref.shape[1]
    span = span_of(plt.load(lengths_ref.at[row]), rule, options.window)

    heads, lane = lanes(options.plan.group), lanes(H)
    mask_G, mask_GH = heads < G, (heads < G)[:, None] & (lane < H)[None]
    at_q = (row, (head * G + heads)[:, None], lane[None])
    q_GH = plt.load(q_ref.at[at_q], mask=mask_GH, other=0.0)
    factor = options.scale * (LOG2_E if options.soft_cap is None else 1 / options.soft_cap)
    factor *= options.float8_unit
    if extras.k_scale_K is not None:
        factor *= plt.load(extras.k_scale_K.at[head])
    if (q_GH.dtype, options.compute) == (jnp.bfloat16, jnp.float16):  # into float16's range
        q_GH = q_GH.astype(jnp.float32)
        size_G = jnp.max(jnp.abs(q_GH), axis=1)
        size_G = jnp.where(size_G == 0.0, 1.0, size_G)
        q_GH, factor = q_GH / size_G[:, None], factor * size_G[:, None]
    q_GH = q_GH.astype(options.compute)

    def sums_of(split: jax.Array) -> Sums:
        start = span.start + split * span.per_split
        sums = lax.fori_loop(
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
            Sums(
                jnp.full(heads.shape, FLOOR, jnp.float32),
                jnp.zeros(heads.shape, jnp.float32),
                jnp.zeros(mask_GH.shape, jnp.float32),
            ),
        )
        if extras.v_scale_K is None:
            return sums
        unit = plt.load(extras.v_scale_K.at[head]) * options.float8_unit
        return sums._replace(values_GH=sums.values_GH * unit)

    if options.splits == 1:
        sink_G = None
        if extras.sinks_N is not None:
            sink_G = plt.load(extras.sinks_N.at[head * G + heads], mask=mask_G)
        result_GH = divided(sums_of(jnp.int32(0)), sink_G)
        plt.store(out[0].at[at_q], result_GH.astype(out[0].dtype), mask=mask_GH)
        return
    peak_ref, total_ref, values_ref = out

    def keep_split(i: jax.Array, _: None) -> None:
        split = program + i * options.programs
        sums = sums_of(split)
        at = (row, head, split, heads)
        plt.store(peak_ref.at[at], sums.peak_G, mask=mask_G)
        plt.store(total_ref.at[at], sums.total_G, mask=mask_G)
        at_values = (row, head, split, heads[:, None], lane[None])
        plt.store(values_ref.at[at_values], sums.values_GH, mask=mask_GH)

    lax.fori_loop(0, cdiv(span.splits - program, options.programs), keep_split, None)


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
    plan = decode_plan(N // K, H, k_pool_CKZH.dtype.itemsize, compute.itemsize)
    width = block_tables_BP.shape[1] * Z
    splits = plan.rule.most(width if window is None else min(width, window))
    options = _Options(
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        plan=plan,
        splits=splits,
        programs=programs_sharing(splits, B * K),
        compute=compute,
        float8_unit=float8_unit(k_pool_CKZH.dtype, interpret),
    )
    result = jax.ShapeDtypeStruct((B, N, H), q_BNH.dtype)
    per_head = jax.ShapeDtypeStruct((B, K, splits, N // K), jnp.float32)
    per_lane = jax.ShapeDtypeStruct((*per_head.shape, H), jnp.float32)
    out = pl.pallas_call(
        partial(_decode_kernel, options=options),
        grid=(B, K, options.programs),
        out_shape=result if splits == 1 else (per_head, per_head, per_lane),
        compiler_params=plt.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret,
        name="paged_decode",
    )(q_BNH, k_pool_CKZH, v_pool_CKZH, block_tables_BP, context_lens_B, extras)
    if splits == 1:
        return out
    return merge_splits(
        Sums(*out),
        context_lens_B,
        extras.sinks_N,
        result,
        rule=plan.rule,
        window=window,
        interpret=interpret,
    )
