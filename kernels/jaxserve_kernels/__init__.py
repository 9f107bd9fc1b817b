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
from functools import partial
from types import ModuleType
from typing import Any

import jax
from jax import lax

from jaxserve_kernels import rectangle, streamed_mosaic, streamed_triton, streamed_xla
from jaxserve_kernels.arguments import (
    check_int32,
    check_options,
    check_pools,
    check_tables,
    checked_extras,
    require,
)
from jaxserve_kernels.write import write_kv

__all__ = ["IMPLEMENTATIONS", "paged_attention", "paged_prefill", "write_kv"]

_MODULES: dict[str, ModuleType] = {
    "rectangle": rectangle,
    "streamed_xla": streamed_xla,
    "streamed_triton": streamed_triton,
    "streamed_mosaic": streamed_mosaic,  # in no family until a GPU has said that it is faster
}
# Written for NVIDIA GPUs: these take ``interpret``, which is on where they are lowered for others.
_KERNELS = frozenset({"streamed_triton", "streamed_mosaic"})
# Interpreted, these call the host, which no branch of a program for a GPU may: whether to interpret
# them is settled when they are traced, by the target.
_TRACED_FOR_TARGET = frozenset({"streamed_mosaic"})
# Members of a family in the order they are tried: lowered for CUDA, lowered for anything else.
_FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "auto": (("streamed_triton", "streamed_xla", "rectangle"), ("streamed_xla", "rectangle")),
    "streamed": (("streamed_triton", "streamed_xla"), ("streamed_xla",)),
}
IMPLEMENTATIONS = (*_FAMILIES, *_MODULES)
"""Values of ``implementation``: two families that take the first member the platform can run, then
each implementation by its own name."""

_Candidates = tuple[tuple[str, Callable[..., jax.Array]], ...]


def _first_that_runs(
    candidates: _Candidates, interpret: bool, *arrays: Any, **options: Any
) -> jax.Array:
    """The result of the first candidate that does not raise NotImplementedError."""
    reasons = []
    for name, call in candidates:
        kernel = {"interpret": interpret} if name in _KERNELS else {}
        try:
            return call(*arrays, **options, **kernel)
        except NotImplementedError as reason:
            reasons.append(f"{name}: {reason}")
    raise NotImplementedError("; ".join(reasons))


# Jitted so that the layers of a model are traced once.
@partial(jax.jit, static_argnames=("cuda", "other", "scale", "window", "soft_cap"))
def _run(*arrays: Any, cuda: _Candidates, other: _Candidates, **options: Any) -> jax.Array:
    """What ``cuda`` gives where the program is lowered for CUDA, elsewhere what ``other`` does.

    Lowering decides, not this process's devices, so a program made here for a GPU has the kernels.
    """
    if cuda == other and _KERNELS.isdisjoint(name for name, _ in cuda):
        return _first_that_runs(other, False, *arrays, **options)
    if not _TRACED_FOR_TARGET.isdisjoint(name for name, _ in other):
        return _first_that_runs(other, not streamed_mosaic.for_gpu(), *arrays, **options)
    return lax.platform_dependent(
        *arrays,
        cuda=partial(_first_that_runs, cuda, False, **options),
        default=partial(_first_that_runs, other, True, **options),
    )


def _candidates(op: str, implementation: str) -> dict[str, _Candidates]:
    """``cuda`` and ``other`` of ``_run``."""
    require(
        implementation in IMPLEMENTATIONS,
        f"implementation is {implementation!r}, must be one of {IMPLEMENTATIONS}",
    )
    cuda, other = _FAMILIES.get(implementation, ((implementation,), (implementation,)))

    def functions(names: tuple[str, ...]) -> _Candidates:
        modules = ((name, _MODULES[name]) for name in names)
        return tuple((name, getattr(module, op)) for name, module in modules if hasattr(module, op))

    return {"cuda": functions(cuda), "other": functions(other)}


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
    sinks: jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Attention of one new token a row over the row's own tokens: [B, N, H] in q's dtype.

    Row b's query sits at position ``context_lens_B[b] - 1`` and sees positions 0 up to its own, or
    the last ``window`` of them; its K/V are in the pool already. Position p lies in block
    ``block_tables_BP[b, p // Z]`` at offset ``p % Z``. Scores are ``scale * q . k``, squashed to
    ``soft_cap * tanh(score / soft_cap)`` if asked. ``sinks`` [N] are further scores, taken as they
    are, that a head's softmax counts and whose values are zero. Softmax and sums are in float32.

    A row of length 0 costs nothing and gives zeros. Table entries past a row's length may hold
    anything, and so may memory outside a row's own tokens, NaN included. A length above P * Z is
    the caller's error and is not seen. A row's result is bit-identical in any batch under a
    streamed implementation.

    Queries are float32, bfloat16 or float16, tables and lengths int32. Pools have one of those
    float dtypes, or are float8_e4m3fn or int8 with ``k_scale`` and ``v_scale``, float32 [K] or one
    for all heads, that their values are to be multiplied with.

    Raises ValueError naming the argument, NotImplementedError if no implementation of those asked
    for runs here.
    """
    check_pools("q_BNH", q_BNH, k_pool_CKZH, v_pool_CKZH)
    check_tables("block_tables_BP", block_tables_BP)
    B, N, _ = q_BNH.shape
    check_int32("block_tables_BP", block_tables_BP, (B, block_tables_BP.shape[1]))
    check_int32("context_lens_B", context_lens_B, (B,))
    check_options(window, soft_cap)
    return _run(
        q_BNH,
        k_pool_CKZH,
        v_pool_CKZH,
        block_tables_BP,
        context_lens_B,
        checked_extras(sinks, k_scale, v_scale, N, k_pool_CKZH, v_pool_CKZH),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        **_candidates("paged_attention", implementation),
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
    sinks: jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Causal attention of S packed segments of new tokens over their rows: [T, N, H] in q's dtype.

    Segment s owns tokens ``cu_query_lens_S1[s]`` to ``cu_query_lens_S1[s + 1] - 1`` (the sums never
    decrease and start at 0), the last of its ``context_lens_S[s]`` tokens, whose K/V are all in the
    pool already. Tokens past the last segment give zeros; a segment may be empty. The rest is as in
    :func:`paged_attention`.
    """
    check_pools("q_TNH", q_TNH, k_pool_CKZH, v_pool_CKZH)
    check_tables("block_tables_SP", block_tables_SP)
    S, N = block_tables_SP.shape[0], q_TNH.shape[1]
    check_int32("block_tables_SP", block_tables_SP, block_tables_SP.shape)
    check_int32("context_lens_S", context_lens_S, (S,))
    check_int32("cu_query_lens_S1", cu_query_lens_S1, (S + 1,))
    check_options(window, soft_cap)
    return _run(
        q_TNH,
        k_pool_CKZH,
        v_pool_CKZH,
        block_tables_SP,
        context_lens_S,
        cu_query_lens_S1,
        checked_extras(sinks, k_scale, v_scale, N, k_pool_CKZH, v_pool_CKZH),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        **_candidates("paged_prefill", implementation),
    )
