"""The Llama-family forward pass over packed tokens and a paged KV pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxserve.config import ModelConfig
from jaxserve.model.attention import KVPool, write_kv
from jaxserve.model.linear import linear, product
from jaxserve.model.params import LayerParams, Params
from jaxserve.model.rotary import rotary_table, rotate


class Attend(Protocol):
    """The read of one layer: q [T, N, H] against the pool's arrays, [T, N, H].

    ``first_block`` is where the layer's block 0 lies in them.
    """

    def __call__(
        self,
        first_block: jax.Array | int,
        q_TNH: jax.Array,
        k_pool: jax.Array,
        v_pool: jax.Array,
        /,
    ) -> jax.Array: ...


def rms_norm(x_TD: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm with float32 statistics (Zhang & Sennrich 2019, arXiv 1910.07467)."""
    x32 = x_TD.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return weight_D[None, :] * (x32 * scale).astype(x_TD.dtype)


def _attention(
    config: ModelConfig,
    layer: LayerParams,
    x_TD: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    table: tuple[jax.Array, jax.Array],
    slots_T: jax.Array,
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of one layer: writes the new K/V, then reads; returns (output, k_pool, v_pool)."""
    tokens = x_TD.shape[0]
    qkv = linear(x_TD, layer.qkv_ED, layer.qkv_bias_E)
    heads = qkv.reshape(tokens, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
    v_TKH = heads[:, config.num_heads + config.num_kv_heads :]
    turned = rotate(heads[:, : config.num_heads + config.num_kv_heads], table)
    q_TNH, k_TKH = turned[:, : config.num_heads], turned[:, config.num_heads :]
    k_pool, v_pool = write_kv(k_pool, v_pool, k_TKH, v_TKH, slots_T)
    out = attend(q_TNH, k_pool, v_pool).reshape(tokens, config.q_size)
    return linear(out, layer.out_DQ, layer.out_bias_D), k_pool, v_pool


def _ffn(layer: LayerParams, x_TD: jax.Array) -> jax.Array:
    """SwiGLU feed-forward (Shazeer 2020, arXiv 2002.05202)."""
    gate, up = jnp.split(linear(x_TD, layer.gate_up_JD, layer.gate_up_bias_J), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, layer.down_DF, layer.down_bias_D)


def forward(
    config: ModelConfig,
    params: Params,
    pool: KVPool,
    tokens_T: jax.Array,
    positions_T: jax.Array,
    slots_T: jax.Array,
    attend: Attend,
) -> tuple[KVPool, jax.Array]:
    """All layers over T tokens: their K/V go to ``slots_T`` of each layer's blocks.

    ``attend`` is the read; decode and prefill differ in it alone. Returns the pool and the last
    hidden states [T, D], normed.
    """
    table = rotary_table(config, positions_T)
    x_TD = params.embed_VD[tokens_T]

    def run(
        layer: LayerParams,
        x_TD: jax.Array,
        k_pool: jax.Array,
        v_pool: jax.Array,
        first_block: jax.Array | int,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        normed = rms_norm(x_TD, layer.attn_norm_D, config.rms_norm_eps)
        slots = slots_T + first_block * k_pool.shape[2]
        out, k_pool, v_pool = _attention(
            config, layer, normed, k_pool, v_pool, table, slots, partial(attend, first_block)
        )
        x_TD = x_TD + out
        x_TD = x_TD + _ffn(layer, rms_norm(x_TD, layer.ffn_norm_D, config.rms_norm_eps))
        return x_TD, k_pool, v_pool

    if isinstance(params.layers, LayerParams):
        stacked = params.layers
        num_blocks = pool.k[0].shape[0] // config.num_layers
        x_TD, *halves = jax.lax.fori_loop(
            0,
            config.num_layers,
            lambda i, carry: run(jax.tree.map(lambda a: a[i], stacked), *carry, i * num_blocks),
            (x_TD, pool.k[0], pool.v[0]),
        )
        pool = KVPool(*((half,) for half in halves))
    else:
        k, v = list(pool.k), list(pool.v)
        for i, layer in enumerate(params.layers):
            x_TD, k[i], v[i] = run(layer, x_TD, k[i], v[i], 0)
        pool = KVPool(tuple(k), tuple(v))
    return pool, rms_norm(x_TD, params.final_norm_D, config.rms_norm_eps)


def logits(params: Params, hidden_XD: jax.Array) -> jax.Array:
    """Scores of the next token, float32 [X, V]."""
    head_VD = params.embed_VD if params.head_VD is None else params.head_VD
    return product(hidden_XD, head_VD)
