"""Paged decode streamed by a Pallas kernel for Hopper, lowered by Mosaic GPU.

A row's splits follow from its own length alone, so it has the same bits in any batch. Each leaves
its sums in float32, not yet divided, and a second kernel merges them. Prefill, where products and
not memory set the pace, is the Triton kernel's.
"""

from __future__ import annotations

import re
from typing import Any

import jax
from jax.extend.backend import get_default_device

from jaxserve_kernels.arguments import Extras
from jaxserve_kernels.splits import merge_splits
from jaxserve_kernels.streamed_triton_prefill import paged_prefill
from jaxserve_kernels.tiling import programs_sharing, split_rule

__all__ = ["paged_attention", "paged_prefill"]

_OLDEST_JAX = (0, 11, 2)
_HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")
_MAX_GROUP = 32  # more queries at once would spill
_RULE = split_rule(64)  # keys of a trip, as long as wgmma's M axis


def _target() -> Any:
    """The device that is compiled for, as Mosaic GPU sees it: the mesh's, or this process's."""
    return jax.sharding.get_abstract_mesh().abstract_device or get_default_device()


def for_gpu() -> bool:
    """Whether what is traced now is for a GPU."""
    return _target().platform in ("gpu", "cuda")


def _check(q_BNH: jax.Array, pool: jax.Array, interpret: bool) -> None:
    """Raise NotImplementedError for what the kernel, this jax or the target cannot do."""
    if jax.__version_info__ < _OLDEST_JAX:
        raise NotImplementedError(
            f"jax {jax.__version__} is older than {'.'.join(map(str, _OLDEST_JAX))}"
        )
    kind = _target().device_kind
    if not interpret and not _HOPPER.search(kind):
        raise NotImplementedError(f"{kind} is no Hopper GPU")
    _, K, Z, H = pool.shape
    if q_BNH.dtype != pool.dtype or pool.dtype.name not in ("bfloat16", "float16"):
        raise NotImplementedError(
            f"queries of {q_BNH.dtype} over a pool of {pool.dtype}: both bfloat16 or both float16"
        )
    if H not in (64, 128, 256):
        raise NotImplementedError(f"head size {H} is not 64, 128 or 256")
    if Z % 8 or Z & (Z - 1):
        raise NotImplementedError(f"block size {Z} is no power of two from 8")
    if q_BNH.shape[1] // K > _MAX_GROUP:
        raise NotImplementedError(
            f"{q_BNH.shape[1] // K} query heads a kv head are more than {_MAX_GROUP}"
        )


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
    _check(q_BNH, k_pool_CKZH, interpret)
    # Only here: it takes a second, which programs that never come here need not spend.
    from jaxserve_kernels.mosaic_decode import Options, decode_sums

    K, Z = k_pool_CKZH.shape[1:3]
    width = block_tables_BP.shape[1] * Z
    splits = _RULE.most(width if window is None else min(width, window))
    programs = programs_sharing(splits, q_BNH.shape[0] * K)
    sums = decode_sums(
        q_BNH,
        k_pool_CKZH,
        v_pool_CKZH,
        block_tables_BP,
        context_lens_B,
        splits=splits,
        options=Options(scale, window, soft_cap, _RULE, programs),
        interpret=interpret,
    )
    return merge_splits(
        sums,
        context_lens_B,
        extras.sinks_N,
        jax.ShapeDtypeStruct(q_BNH.shape, q_BNH.dtype),
        rule=_RULE,
        window=window,
        interpret=interpret,
    )
