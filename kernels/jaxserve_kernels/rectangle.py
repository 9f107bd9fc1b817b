"""Paged attention by the rectangle: gather every row to the table's full width, score it densely.

The width is P * Z tokens whatever the rows hold, so time and memory grow with the table.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve_kernels.arguments import Extras
from jaxserve_kernels.heads import finished, scaled_queries


def _gather(pool_CKZH: jax.Array, block_tables_XP: jax.Array) -> jax.Array:
    """Blocks of each row side by side, [X, K, P * Z, H] in float32; wild ids are clamped."""
    blocks = pool_CKZH.at[block_tables_XP].get(mode="clip").astype(jnp.float32)
    X, P, K, Z, H = blocks.shape
    return blocks.transpose(0, 2, 1, 3, 4).reshape(X, K, P * Z, H)


def _softmax(
    scores: jax.Array, visible: jax.Array, soft_cap: float | None, sinks: jax.Array | None
) -> jax.Array:
    """Attention weights over the last axis; all zeros where nothing is visible.

    ``sinks`` broadcasts against ``scores`` with a last axis of 1.
    """
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        peak = jnp.maximum(peak, sinks)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.where(visible, jnp.exp(scores - peak), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks - peak)
    return weights / jnp.where(total == 0.0, 1.0, total)


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
) -> jax.Array:
    """See :func:`jaxserve_kernels.paged_attention`."""
    K = k_pool_CKZH.shape[1]
    k_BKWH = _gather(k_pool_CKZH, block_tables_BP)
    v_BKWH = _gather(v_pool_CKZH, block_tables_BP)
    position = jnp.arange(k_BKWH.shape[2], dtype=jnp.int32)[None, :]
    visible_BW = position < context_lens_B[:, None]
    if window is not None:
        visible_BW &= position >= context_lens_B[:, None] - window
    # A weight of zero does not silence a NaN, so unseen values are replaced, not only unweighted.
    v_BKWH = jnp.where(visible_BW[:, None, :, None], v_BKWH, 0.0)
    q_BKGH = scaled_queries(q_BNH, scale, K, extras)
    scores = jnp.einsum("BKGH,BKWH->BKGW", q_BKGH, k_BKWH, precision="highest")
    sinks = None if extras.sinks_N is None else extras.sinks_N.reshape(1, K, -1, 1)
    weights = _softmax(scores, visible_BW[:, None, None, :], soft_cap, sinks)
    out = jnp.einsum("BKGW,BKWH->BKGH", weights, v_BKWH, precision="highest")
    return finished(out, extras, q_BNH.dtype)


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
) -> jax.Array:
    """See :func:`jaxserve_kernels.paged_prefill`."""
    T = q_TNH.shape[0]
    S, K = block_tables_SP.shape[0], k_pool_CKZH.shape[1]
    k_SKWH = _gather(k_pool_CKZH, block_tables_SP)
    v_SKWH = _gather(v_pool_CKZH, block_tables_SP)
    key = jnp.arange(k_SKWH.shape[2], dtype=jnp.int32)[None, :]
    v_SKWH = jnp.where((key < context_lens_S[:, None])[:, None, :, None], v_SKWH, 0.0)
    token = jnp.arange(T, dtype=jnp.int32)[:, None]
    q_TKGH = scaled_queries(q_TNH, scale, K, extras)
    sinks = None if extras.sinks_N is None else extras.sinks_N.reshape(K, -1, 1, 1)

    def add_segment(s: jax.Array, out_TKGH: jax.Array) -> jax.Array:
        start, end = cu_query_lens_S1[s], cu_query_lens_S1[s + 1]
        last_key = token + (context_lens_S[s] - end)
        visible_TW = (token >= start) & (token < end) & (key <= last_key)
        if window is not None:
            visible_TW &= key > last_key - window
        scores = jnp.einsum("TKGH,KWH->KGTW", q_TKGH, k_SKWH[s], precision="highest")
        weights = _softmax(scores, visible_TW[None, None], soft_cap, sinks)
        return out_TKGH + jnp.einsum("KGTW,KWH->TKGH", weights, v_SKWH[s], precision="highest")

    # One segment at a time: scores are [K, G, T, W], not S times that.
    out = lax.fori_loop(0, S, add_segment, jnp.zeros(q_TKGH.shape, jnp.float32))
    return finished(out, extras, q_TNH.dtype)
