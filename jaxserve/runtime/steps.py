"""The three pure programs an engine runs: permute rows, decode, prefill.

    pool, state, tokens_B = decode_step(params, pool, state, new_blocks_B, config=..., ...)

Each takes the pool and the decode state and gives them back changed. Under ``jax.jit`` donate
both, or every step copies the pool.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxserve.config import AttentionBackend, ModelConfig
from jaxserve.model.attention import KVPool, attend_decode, attend_prefill
from jaxserve.model.linear import cpu_compiler_options
from jaxserve.model.params import Params
from jaxserve.model.sampling import sample
from jaxserve.model.transformer import forward, logits
from jaxserve.plan.batch import NULL_BLOCK, DecodeState, PrefillBatch, SamplingRows
from jaxserve.plan.buckets import DecodeShape


def permute_rows(state: DecodeState, sources_B: jax.Array) -> DecodeState:
    """Row b of the result is row ``sources_B[b]`` of ``state``, or an empty row where it is -1."""
    empty_B = sources_B < 0

    def move(x: jax.Array) -> jax.Array:
        moved = x[jnp.maximum(sources_B, 0)]
        return jnp.where(empty_B.reshape((-1,) + (1,) * (x.ndim - 1)), jnp.zeros_like(x), moved)

    return jax.tree.map(move, state)


def decode_step(
    params: Params,
    pool: KVPool,
    state: DecodeState,
    new_blocks_B: jax.Array,
    *,
    config: ModelConfig,
    backend: AttentionBackend,
    shape: DecodeShape,
    block_size: int,
) -> tuple[KVPool, DecodeState, jax.Array]:
    """One token for each of the first ``shape.rows`` rows of ``state``.

    ``new_blocks_B`` int32 [rows]: the block of each row's token where that token opens a block,
    else NULL_BLOCK. ``shape.width`` bounds the tokens a row may hold, the new one included.
    Returns the pool, the state and the drawn tokens, int32 [rows]; empty rows draw nonsense and
    stay empty.
    """
    rows = jax.tree.map(lambda x: x[: shape.rows], state)
    lens_B = rows.context_lens_B
    active_B = lens_B > 0
    column_B = lens_B // block_size
    lanes_B = jnp.arange(shape.rows)
    opened_B = jnp.where(
        new_blocks_B != NULL_BLOCK, new_blocks_B, rows.block_tables_BP[lanes_B, column_B]
    )
    tables_BP = rows.block_tables_BP.at[lanes_B, column_B].set(opened_B)
    slots_B = jnp.where(
        active_B, opened_B * block_size + lens_B % block_size, NULL_BLOCK * block_size
    )
    seen_B = jnp.where(active_B, lens_B + 1, 0)
    read_tables_BP = tables_BP[:, : -(-shape.width // block_size)]

    pool, hidden_BD = forward(
        config,
        params,
        pool,
        rows.last_tokens_B,
        lens_B,
        slots_B,
        lambda first_block, q, k, v: attend_decode(
            config, backend, q, k, v, read_tables_BP + first_block, seen_B
        ),
    )
    tokens_B = sample(logits(params, hidden_BD), rows.sampling, seen_B)
    state = state._replace(
        block_tables_BP=state.block_tables_BP.at[: shape.rows].set(tables_BP),
        context_lens_B=state.context_lens_B.at[: shape.rows].set(seen_B),
        last_tokens_B=state.last_tokens_B.at[: shape.rows].set(tokens_B),
    )
    return pool, state, tokens_B


def prefill_step(
    params: Params,
    pool: KVPool,
    state: DecodeState,
    batch: PrefillBatch,
    *,
    config: ModelConfig,
    backend: AttentionBackend,
) -> tuple[KVPool, DecodeState, jax.Array]:
    """Chunks of up to S prompts; a prompt that ends moves into its decode row with a first token.

    Returns the pool, the state and one drawn token a segment, int32 [S]; those of segments whose
    prompt goes on mean nothing.
    """
    pool, hidden_TD = forward(
        config,
        params,
        pool,
        batch.tokens_T,
        batch.positions_T,
        batch.slots_T,
        lambda first_block, q, k, v: attend_prefill(
            config,
            backend,
            q,
            k,
            v,
            batch.block_tables_SP + first_block,
            batch.context_lens_S,
            batch.cu_query_lens_S1,
        ),
    )
    last_S = jnp.maximum(batch.cu_query_lens_S1[1:] - 1, 0)
    tokens_S = sample(logits(params, hidden_TD[last_S]), batch.sampling, batch.context_lens_S)

    def insert(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[batch.rows_S].set(new, mode="drop")

    state = DecodeState(
        block_tables_BP=insert(state.block_tables_BP, batch.block_tables_SP),
        context_lens_B=insert(state.context_lens_B, batch.context_lens_S),
        last_tokens_B=insert(state.last_tokens_B, tokens_S),
        sampling=SamplingRows(*map(insert, state.sampling, batch.sampling)),
    )
    return pool, state, tokens_S


def compiler_options(platform: str) -> dict[str, bool]:
    """What steps are compiled with on a platform ("cpu", "cuda", ...)."""
    return cpu_compiler_options() if platform == "cpu" else {}


def jit_decode(
    config: ModelConfig,
    backend: AttentionBackend,
    shape: DecodeShape,
    block_size: int,
    platform: str,
    *,
    persist_inputs: bool = True,
) -> jax.stages.Wrapped:
    """``decode_step`` of one shape, jitted with the pool donated, and the state if it persists."""
    step = partial(decode_step, config=config, backend=backend, shape=shape, block_size=block_size)
    donated = (1, 2) if persist_inputs else (1,)
    return jax.jit(step, donate_argnums=donated, compiler_options=compiler_options(platform))


def jit_prefill(
    config: ModelConfig,
    backend: AttentionBackend,
    platform: str,
    *,
    persist_inputs: bool = True,
) -> jax.stages.Wrapped:
    """``prefill_step`` jitted with the pool donated, and the state if it persists."""
    step = partial(prefill_step, config=config, backend=backend)
    donated = (1, 2) if persist_inputs else (1,)
    return jax.jit(step, donate_argnums=donated, compiler_options=compiler_options(platform))


def jit_permute(*, persist_inputs: bool = True) -> jax.stages.Wrapped:
    """``permute_rows`` jitted with the state donated if it persists."""
    return jax.jit(permute_rows, donate_argnums=0 if persist_inputs else ())
