"""The oracle: paged attention in numpy float64, one query token at a time.

It shares no code with the implementations and visits only the tokens a query may see, so whatever
lies elsewhere in memory cannot reach its results.
"""

from __future__ import annotations

import numpy as np


def _attend(
    q_NH: np.ndarray,
    k_pool: np.ndarray,
    v_pool: np.ndarray,
    table: np.ndarray,
    position: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: np.ndarray | None,
    k_scale: np.ndarray | float | None,
    v_scale: np.ndarray | float | None,
) -> np.ndarray:
    """One token's query heads over the tokens it sees, in float64: [N, H]."""
    _, num_kv_heads, block_size, _ = k_pool.shape
    group = q_NH.shape[0] // num_kv_heads
    first = 0 if window is None else max(0, position - window + 1)
    places = [(int(table[p // block_size]), p % block_size) for p in range(first, position + 1)]
    k_scales = np.broadcast_to(1.0 if k_scale is None else k_scale, num_kv_heads)
    v_scales = np.broadcast_to(1.0 if v_scale is None else v_scale, num_kv_heads)
    out = np.zeros(q_NH.shape, np.float64)
    for k in range(num_kv_heads):
        keys = np.array([k_pool[c, k, z] for c, z in places]).astype(np.float64) * k_scales[k]
        values = np.array([v_pool[c, k, z] for c, z in places]).astype(np.float64) * v_scales[k]
        for n in range(k * group, (k + 1) * group):
            scores = scale * (keys @ q_NH[n].astype(np.float64))
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if sinks is not None:
                scores = np.append(scores, np.float64(sinks[n]))
            weights = np.exp(scores - scores.max())
            out[n] = (weights / weights.sum())[: len(places)] @ values
    return out


def paged_attention(
    q_BNH: np.ndarray,
    k_pool_CKZH: np.ndarray,
    v_pool_CKZH: np.ndarray,
    block_tables_BP: np.ndarray,
    context_lens_B: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    k_scale: np.ndarray | float | None = None,
    v_scale: np.ndarray | float | None = None,
) -> np.ndarray:
    """Same contract as :func:`jaxserve_kernels.paged_attention`, in float64: [B, N, H]."""
    out = np.zeros(q_BNH.shape, np.float64)
    for b, length in enumerate(context_lens_B):
        if length > 0:
            out[b] = _attend(
                q_BNH[b],
                k_pool_CKZH,
                v_pool_CKZH,
                block_tables_BP[b],
                int(length) - 1,
                scale,
                window,
                soft_cap,
                sinks,
                k_scale,
                v_scale,
            )
    return out


def paged_prefill(
    q_TNH: np.ndarray,
    k_pool_CKZH: np.ndarray,
    v_pool_CKZH: np.ndarray,
    block_tables_SP: np.ndarray,
    context_lens_S: np.ndarray,
    cu_query_lens_S1: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    k_scale: np.ndarray | float | None = None,
    v_scale: np.ndarray | float | None = None,
) -> np.ndarray:
    """Same contract as :func:`jaxserve_kernels.paged_prefill`, in float64: [T, N, H]."""
    out = np.zeros(q_TNH.shape, np.float64)
    for s, context in enumerate(context_lens_S):
        start, end = int(cu_query_lens_S1[s]), int(cu_query_lens_S1[s + 1])
        for t in range(start, end):
            out[t] = _attend(
                q_TNH[t],
                k_pool_CKZH,
                v_pool_CKZH,
                block_tables_SP[s],
                int(context) - (end - t),
                scale,
                window,
                soft_cap,
                sinks,
                k_scale,
                v_scale,
            )
    return out
