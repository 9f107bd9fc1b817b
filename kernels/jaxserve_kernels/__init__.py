"""Paged attention for JAX: decode and ragged prefill over a KV pool of blocks.

Shape letters, used in every name:

    B decode rows      T packed prefill tokens    S prefill segments    P blocks a row
    N query heads      K kv heads                 G query heads a kv head (N // K)
    H head size        C blocks of the pool       Z tokens a block

A *block* is the allocator's unit, a *tile* what a kernel takes in one trip. Nothing is ever read
from block 0, the null block, to any effect: padded tokens write to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve_kernels import rectangle, streamed_xla
from jaxserve_kernels.write import write_kv

__all__ = ["IMPLEMENTATIONS", "paged_attention", "paged_prefill", "write_kv"]

_MODULES: dict[str, Any] = {"rectangle": rectangle, "streamed_xla": streamed_xla}
_CHOICES: dict[str, tuple[str, ...]] = {
    "auto": ("streamed_xla", "rectangle"),
    "streamed": ("streamed_xla",),
    **{name: (name,) for name in _MODULES},
}
IMPLEMENTATIONS = tuple(_CHOICES)
"""Values of ``implementation``: two families that take the first member the device can run, then
each implementation by its own name."""

_FLOATS = ("float32", "bfloat16", "float16")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _check_int32(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    _require(array.dtype == jnp.int32, f"{name} is {array.dtype}, must be int32")
    _require(array.shape == shape, f"{name} has shape {array.shape}, must be {shape}")


def _check_pools(q: jax.Array, q_name: str, k_pool: jax.Array, v_pool: jax.Array) -> None:
    _require(q.ndim == 3, f"{q_name} has {q.ndim} dimensions, must have 3")
    _require(k_pool.ndim == 4, f"k_pool_CKZH has {k_pool.ndim} dimensions, must have 4")
    _require(
        v_pool.shape == k_pool.shape,
        f"v_pool_CKZH has shape {v_pool.shape}, k_pool_CKZH {k_pool.shape}; must be equal",
    )
    for name, array in ((q_name, q), ("k_pool_CKZH", k_pool), ("v_pool_CKZH", v_pool)):
        _require(array.dtype.name in _FLOATS, f"{name} is {array.dtype}, must be one of {_FLOATS}")
        _require(min(array.shape) > 0, f"{name} has shape {array.shape}, no side may be 0")
    _require(
        v_pool.dtype == k_pool.dtype,
        f"v_pool_CKZH is {v_pool.dtype}, k_pool_CKZH {k_pool.dtype}; must be equal",
    )
    _require(
        q.shape[2] == k_pool.shape[3],
        f"{q_name} has head size {q.shape[2]}, k_pool_CKZH {k_pool.shape[3]}; must be equal",
    )
    _require(
        q.shape[1] % k_pool.shape[1] == 0,
        f"{q_name} has {q.shape[1]} query heads, no multiple of k_pool_CKZH's "
        f"{k_pool.shape[1]} kv heads",
    )


def _check_tables(name: str, tables: jax.Array) -> None:
    _require(tables.ndim == 2, f"{name} has {tables.ndim} dimensions, must have 2")
    _require(min(tables.shape) > 0, f"{name} has shape {tables.shape}, no side may be 0")


def _check_options(window: int | None, soft_cap: float | None) -> None:
    _require(window is None or window >= 1, f"window is {window}, must be at least 1 or None")
    _require(soft_cap is None or soft_cap > 0, f"soft_cap is {soft_cap}, must be above 0 or None")


def _first_that_runs(op: str, implementation: str, call: Callable[[Any], jax.Array]) -> jax.Array:
    """The result of the first implementation that does not raise NotImplementedError."""
    if implementation not in _CHOICES:
        raise ValueError(f"implementation is {implementation!r}, must be one of {IMPLEMENTATIONS}")
    reasons = []
    for name in _CHOICES[implementation]:
        try:
            return call(getattr(_MODULES[name], op))
        except NotImplementedError as reason:
            reasons.append(f"{name}: {reason}")
    raise NotImplementedError("; ".join(reasons))


def paged_attention(
    q_BNH: jax.Array,
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    block_tables_BP: jax.Array,
    context_lens_B: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Attention of one new token a row over the row's own tokens: [B, N, H] in q's dtype.

    Row b's query sits at position ``context_lens_B[b] - 1`` and sees positions 0 up to its own, or
    the last ``window`` of them; its K/V are in the pool already. Position p lies in block
    ``block_tables_BP[b, p // Z]`` at offset ``p % Z``. Scores are ``scale * q . k``, squashed to
    ``soft_cap * tanh(score / soft_cap)`` if asked, with softmax and accumulation in float32.

    A row of length 0 gives zeros. Table entries past a row's length may hold anything, and so may
    memory outside a row's own tokens, NaN included. A length above P * Z is the caller's error and
    is not seen. A row's result is bit-identical in any batch under a streamed implementation.

    Queries and pools are float32, bfloat16 or float16; tables and lengths are int32. Raises
    ValueError naming the argument, NotImplementedError if no implementation of those asked for
    runs here.
    """
    _check_pools(q_BNH, "q_BNH", k_pool_CKZH, v_pool_CKZH)
    _check_tables("block_tables_BP", block_tables_BP)
    B = q_BNH.shape[0]
    _check_int32("block_tables_BP", block_tables_BP, (B, block_tables_BP.shape[1]))
    _check_int32("context_lens_B", context_lens_B, (B,))
    _check_options(window, soft_cap)
    return _first_that_runs(
        "paged_attention",
        implementation,
        lambda run: run(
            q_BNH,
            k_pool_CKZH,
            v_pool_CKZH,
            block_tables_BP,
            context_lens_B,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        ),
    )


def paged_prefill(
    q_TNH: jax.Array,
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    block_tables_SP: jax.Array,
    context_lens_S: jax.Array,
    cu_query_lens_S1: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Causal attention of S packed segments of new tokens over their rows: [T, N, H] in q's dtype.

    Segment s owns tokens ``cu_query_lens_S1[s]`` to ``cu_query_lens_S1[s + 1] - 1`` (the sums never
    decrease and start at 0), the last of its ``context_lens_S[s]`` tokens, whose K/V are all in the
    pool already. Tokens past the last segment give zeros; a segment may be empty. The rest is as in
    :func:`paged_attention`.
    """
    _check_pools(q_TNH, "q_TNH", k_pool_CKZH, v_pool_CKZH)
    _check_tables("block_tables_SP", block_tables_SP)
    S = block_tables_SP.shape[0]
    _check_int32("block_tables_SP", block_tables_SP, block_tables_SP.shape)
    _check_int32("context_lens_S", context_lens_S, (S,))
    _check_int32("cu_query_lens_S1", cu_query_lens_S1, (S + 1,))
    _check_options(window, soft_cap)
    return _first_that_runs(
        "paged_prefill",
        implementation,
        lambda run: run(
            q_TNH,
            k_pool_CKZH,
            v_pool_CKZH,
            block_tables_SP,
            context_lens_S,
            cu_query_lens_S1,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        ),
    )
