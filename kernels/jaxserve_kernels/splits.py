"""Splits of a decode row, and the kernel that merges what each split left.

Splits follow from the row's own length alone, so a row's result has the same bits in any batch.
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

from jaxserve_kernels.tiling import SplitRule

LOG2_E = math.log2(math.e)
FLOOR = float(jnp.finfo(jnp.float32).min)
"""Below every score, and finite: the difference of two peaks is never NaN."""


class Sums(NamedTuple):
    """Softmax state of a group of query heads, not yet divided; exponents are of 2."""

    peak_G: Any
    total_G: Any
    values_GH: Any


class Span(NamedTuple):
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
        return cdiv(self.end - self.start, self.per_split)


def cdiv(a: jax.Array, b: jax.Array | int) -> jax.Array:
    """``a`` over ``b``, rounded up; neither is negative."""
    return lax.div(a + (b - 1), jnp.asarray(b, jnp.int32))


def lanes(size: int) -> jax.Array:
    """0, 1, ... up to ``size`` rounded up to a power of two, as Triton's arrays must be."""
    return lax.iota(jnp.int32, pl.next_power_of_2(size))


def span_of(length: jax.Array, rule: SplitRule, window: int | None) -> Span:
    """What a row of ``length`` tokens reads."""
    first = jnp.zeros_like(length) if window is None else jnp.maximum(length - window, 0)
    start, end = lax.div(first, jnp.int32(rule.keys)), cdiv(length, rule.keys)
    per_split = jnp.clip(cdiv(end - start, rule.few_splits), rule.min_split, rule.mid_split)
    per_split = jnp.maximum(per_split, cdiv(end - start, rule.max_splits))
    return Span(first, length, start, end, per_split)


def divided(sums: Sums, sink_G: jax.Array | None) -> jax.Array:
    """The result, zeros where nothing was seen; ``sink_G`` are scores whose values are zero."""
    keep_G, total_G = jnp.ones_like(sums.total_G), sums.total_G
    if sink_G is not None:
        sink_G *= LOG2_E
        peak_G = jnp.maximum(sums.peak_G, sink_G)
        keep_G = jnp.exp2(sums.peak_G - peak_G)
        total_G = keep_G * total_G + jnp.exp2(sink_G - peak_G)
    return sums.values_GH * (keep_G / jnp.where(total_G == 0.0, 1.0, total_G))[..., None]


def _merge_kernel(
    sums: Any,
    lengths_ref: Any,
    sinks_ref: Any,
    out_ref: Any,
    *,
    rule: SplitRule,
    window: int | None,
) -> None:
    """Program (row, query head): the sums of all splits as one result."""
    row, query_head = pl.program_id(0), pl.program_id(1)
    G, H = out_ref.shape[1] // sums.values_GH.shape[1], out_ref.shape[2]
    head, member = lax.div(query_head, jnp.int32(G)), lax.rem(query_head, jnp.int32(G))
    # As many lanes for any table, so that the order of the sum does not depend on its width.
    split, lane = lanes(rule.max_splits), lanes(H)
    mask_S = split < span_of(plt.load(lengths_ref.at[row]), rule, window).splits
    at = (row, head, split, member)
    peak_S = plt.load(sums.peak_G.at[at], mask=mask_S, other=FLOOR)
    total_S = plt.load(sums.total_G.at[at], mask=mask_S, other=0.0)
    at_values = (row, head, split[:, None], member, lane[None])
    mask_SH = mask_S[:, None] & (lane < H)[None]
    values_SH = plt.load(sums.values_GH.at[at_values], mask=mask_SH, other=0.0)
    peak = jnp.max(peak_S)
    keep_S = jnp.where(mask_S, jnp.exp2(peak_S - peak), 0.0)
    merged = Sums(peak, jnp.sum(keep_S * total_S), jnp.sum(keep_S[:, None] * values_SH, axis=0))
    result_H = divided(merged, None if sinks_ref is None else plt.load(sinks_ref.at[query_head]))
    at_out = (row, query_head, lane)
    plt.store(out_ref.at[at_out], result_H.astype(out_ref.dtype), mask=lane < H)


def merge_splits(
    sums: Sums,
    context_lens_B: jax.Array,
    sinks_N: jax.Array | None,
    out: jax.ShapeDtypeStruct,
    *,
    rule: SplitRule,
    window: int | None,
    interpret: bool,
) -> jax.Array:
    """The result ``out`` [B, N, H] of sums [B, K, S, X] twice and [B, K, S, X, H].

    X may be more than N // K: what lies past that is not read, nor are splits that a row does not
    have. A row without any gives zeros.
    """
    return pl.pallas_call(
        partial(_merge_kernel, rule=rule, window=window),
        grid=out.shape[:2],
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_decode_merge",
    )(sums, context_lens_B, sinks_N)
