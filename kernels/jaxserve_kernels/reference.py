"""The oracle: paged attention in numpy float64, one token and one head at a time.

It shares no code with the implementations and visits only the tokens a query may see, so whatever
lies elsewhere in memory cannot reach its results.
"""

from __future__ import annotations

import numpy as np


def _attend(
    q_H: np.ndarray,
    keys: list[np.ndarray],
    values: list[np.ndarray],
    scale: float,
    soft_cap: float | None,
) -> np.ndarray:
    scores = np.array([float(np.dot(q_H, key)) * scale for key in keys])
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    weights = np.exp(scores - scores.max())
    out = np.zeros_like(q_H)
    for weight, value in zip(weights / weights.sum(), values, strict=True):
        out += weight * value
    return out


def _query(
    q_NH: np.ndarray,
    k_pool: np.ndarray,
    v_pool: np.ndarray,
    table: np.ndarray,
    position: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> np.ndarray:
    _, num_kv_heads, block_size, _ = k_pool.shape
    group = q_NH.shape[0] // num_kv_heads
    first = 0 if window is None else max(0, position - window + 1)
    places = [(int(table[p // block_size]), p % block_size) for p in range(first, position + 1)]
    out = np.zeros(q_NH.shape, np.float64)
    for n in range(q_NH.shape[0]):
        keys = [k_pool[c, n // group, z].astype(np.float64) for c, z in places]
        values = [v_pool[c, n // group, z].astype(np.float64) for c, z in places]
        out[n] = _attend(q_NH[n].astype(np.float64), keys, values, scale, soft_cap)
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
) -> np.ndarray:
    """Same contract as :func:`jaxserve_kernels.paged_attention`, in float64: [B, N, H]."""
    out = np.zeros(q_BNH.shape, np.float64)
    for b, length in enumerate(context_lens_B):
        if length > 0:
            out[b] = _query(
                q_BNH[b],
                k_pool_CKZH,
                v_pool_CKZH,
                block_tables_BP[b],
                int(length) - 1,
                scale,
                window,
                soft_cap,
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
) -> np.ndarray:
    """Same contract as :func:`jaxserve_kernels.paged_prefill`, in float64: [T, N, H]."""
    out = np.zeros(q_TNH.shape, np.float64)
    for s, context in enumerate(context_lens_S):
        start, end = int(cu_query_lens_S1[s]), int(cu_query_lens_S1[s + 1])
        for t in range(start, end):
            out[t] = _query(
                q_TNH[t],
                k_pool_CKZH,
                v_pool_CKZH,
                block_tables_SP[s],
                int(context) - (end - t),
                scale,
                window,
                soft_cap,
            )
    return out
