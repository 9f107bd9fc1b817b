"""The KV pool, and the one door to the attention kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jaxserve_kernels import paged_attention, paged_prefill, write_kv
from jaxserve_kernels.tiling import decode_tile

from jaxserve.config import AttentionBackend, ModelConfig
from jaxserve.plan.batch import ArraySpec, kv_pool_spec

__all__ = ["KVPool", "attend_decode", "attend_prefill", "decode_tile", "kv_pool_specs", "write_kv"]


class KVPool(NamedTuple):
    """One K and one V array [C, K, Z, H] per layer; every step takes it donated and gives it back.

    Separate arrays per layer, because an update in place of a slice of one stacked array, read in
    the same program, makes XLA copy the pool. Steps that walk stacked layers in a loop carry one
    array of L * C blocks instead: layer l's block c is l * C + c, so nothing is sliced.
    """

    k: tuple[Any, ...]
    v: tuple[Any, ...]


def kv_pool_specs(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: str, *, stacked: bool = False
) -> KVPool:
    """``KVPool`` of ArraySpec, for ``stacked`` layers or for one array a layer."""
    arrays = 1 if stacked else config.num_layers
    spec: ArraySpec = kv_pool_spec(
        num_blocks * config.num_layers // arrays,
        config.num_kv_heads,
        block_size,
        config.head_dim,
        dtype,
    )
    return KVPool(k=(spec,) * arrays, v=(spec,) * arrays)


def attend_decode(
    config: ModelConfig,
    backend: AttentionBackend,
    q_BNH: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables_BP: jax.Array,
    context_lens_B: jax.Array,
) -> jax.Array:
    """One query a row against that row's blocks, [B, N, H]; empty rows give zeros."""
    return paged_attention(
        q_BNH,
        k_pool,
        v_pool,
        block_tables_BP,
        context_lens_B,
        scale=config.head_dim**-0.5,
        window=config.sliding_window,
        implementation=backend,
    )


def attend_prefill(
    config: ModelConfig,
    backend: AttentionBackend,
    q_TNH: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables_SP: jax.Array,
    context_lens_S: jax.Array,
    cu_query_lens_S1: jax.Array,
) -> jax.Array:
    """Packed queries against their own segments' blocks, causal, [T, N, H]."""
    return paged_prefill(
        q_TNH,
        k_pool,
        v_pool,
        block_tables_SP,
        context_lens_S,
        cu_query_lens_S1,
        scale=config.head_dim**-0.5,
        window=config.sliding_window,
        implementation=backend,
    )
