"""The Llama-family forward pass over packed tokens and a paged KV pool."""

from __future__ import annotations

from typing import Protocol

import jax

from jaxserve.config import ModelConfig
from jaxserve.model.attention import KVPool
from jaxserve.model.linear import product
from jaxserve.model.params import LayerParams, Params
from jaxserve.model.projections import add_product, attention_inputs, gated, rms_norm
from jaxserve.model.rotary import rotary_table


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


def forward(
    config: ModelConfig,
    params: Params,
    pool: KVPool,
    tokens_T: jax.Array,
    positions_T: jax.Array,
    slots_T: jax.Array,
    attend: Attend,
    *,
    deterministic: bool = False,
) -> tuple[KVPool, jax.Array]:
    """All layers over T tokens: their K/V go to ``slots_T`` of each layer's blocks.

    ``attend`` is the read; decode and prefill differ in it alone. ``deterministic``: see
    ``product``. Returns the pool and the last hidden states [T, D], normed.
    """
    table = rotary_table(config, positions_T)
    how = {"deterministic": deterministic}
    x_TD = params.embed_VD[tokens_T]

    def run(
        layer: LayerParams,
        x_TD: jax.Array,
        k_pool: jax.Array,
        v_pool: jax.Array,
        first_block: jax.Array | int,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        slots = slots_T + first_block * k_pool.shape[2]
        q_TNH, k_pool, v_pool = attention_inputs(
            config, layer, x_TD, table, slots, k_pool, v_pool, **how
        )
        out_TQ = attend(first_block, q_TNH, k_pool, v_pool).reshape(-1, config.q_size)
        x_TD = add_product(x_TD, out_TQ, layer.out_DQ, layer.out_bias_D, **how)
        gated_TF = gated(config, layer, x_TD, **how)
        x_TD = add_product(x_TD, gated_TF, layer.down_DF, layer.down_bias_D, **how)
        return x_TD, k_pool, v_pool

    if isinstance(params.layers, LayerParams):
        stacked = params.layers
        num_blocks = pool.k[0].shape[0] // config.num_layers

        def step(
            i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            return run(jax.tree.map(lambda a: a[i], stacked), *carry, i * num_blocks)

        start = (x_TD, pool.k[0], pool.v[0])
        x_TD, k_pool, v_pool = jax.lax.fori_loop(0, config.num_layers, step, start)
        pool = KVPool((k_pool,), (v_pool,))
    else:
        k, v = list(pool.k), list(pool.v)
        for i, layer in enumerate(params.layers):
            x_TD, k[i], v[i] = run(layer, x_TD, k[i], v[i], 0)
        pool = KVPool(tuple(k), tuple(v))
    return pool, rms_norm(x_TD, params.final_norm_D, config.rms_norm_eps)


def logits(params: Params, hidden_XD: jax.Array, *, deterministic: bool = False) -> jax.Array:
    """Scores of the next token, float32 [X, V]."""
    head_VD = params.embed_VD if params.head_VD is None else params.head_VD
    return product(hidden_XD, head_VD, deterministic=deterministic)
