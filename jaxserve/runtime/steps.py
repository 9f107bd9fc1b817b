"""The pure programs an engine runs: decode, prefill, permute rows, write a row's counts.

    pool, state, output = decode_step(params, pool, state, new_blocks_B, mask_BW, config=..., ...)

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
from jaxserve.model.logprobs import score_prompt
from jaxserve.model.next_token import idle_as_neutral, next_tokens
from jaxserve.model.params import Params
from jaxserve.model.penalties import count_tokens, penalised
from jaxserve.model.transformer import forward, logits
from jaxserve.plan.batch import (
    NULL_BLOCK,
    SIT_OUT,
    DecodeState,
    LogitBias,
    PrefillBatch,
    SamplingRows,
    StepOutput,
)
from jaxserve.plan.buckets import DecodeShape


def permute_rows(state: DecodeState, sources_B: jax.Array) -> DecodeState:
    """Row b of the result is row ``sources_B[b]`` of ``state``, or an empty row where it is -1.

    The counts, most of the state's bytes, move only when some row has a penalty.
    """
    empty_B = sources_B < 0
    counted = jnp.any(penalised(state.sampling) & (state.context_lens_B > 0))

    def move(x: jax.Array) -> jax.Array:
        moved = x[jnp.maximum(sources_B, 0)]
        return jnp.where(empty_B.reshape((-1,) + (1,) * (x.ndim - 1)), jnp.zeros_like(x), moved)

    counts_BV = jax.lax.cond(counted, move, lambda x: x, state.counts_BV)
    moved = jax.tree.map(move, state._replace(counts_BV=()))
    return moved._replace(counts_BV=counts_BV)


def write_counts(state: DecodeState, row: jax.Array, counts_V: jax.Array) -> DecodeState:
    """``state`` with the token counts of ``row`` (int32 scalar) replaced by ``counts_V`` uint16."""
    return state._replace(counts_BV=state.counts_BV.at[row].set(counts_V))


def decode_step(
    params: Params,
    pool: KVPool,
    state: DecodeState,
    new_blocks_B: jax.Array,
    mask_BW: jax.Array,
    *,
    config: ModelConfig,
    backend: AttentionBackend,
    shape: DecodeShape,
    block_size: int,
    deterministic: bool = False,
) -> tuple[KVPool, DecodeState, StepOutput]:
    """One token for each of the first ``shape.rows`` rows of ``state``.

    ``new_blocks_B`` int32 [rows]: the block of each row's token where that token opens a block,
    else NULL_BLOCK, or SIT_OUT for a row that stays as it is. ``mask_BW`` uint32: the tokens each
    row may draw. ``shape.width`` bounds the tokens a row may hold, the new one included.
    ``deterministic``: see ``product`` of model/linear.py.
    Returns the pool, the state and what was drawn, [rows]; rows that are empty or sit out draw
    nonsense and stay as they are.
    """
    lens_B = state.context_lens_B[: shape.rows]
    old_tables_BP = state.block_tables_BP[: shape.rows]
    fed_B = state.last_tokens_B[: shape.rows]
    active_B = (lens_B > 0) & (new_blocks_B != SIT_OUT)
    column_B = lens_B // block_size
    lanes_B = jnp.arange(shape.rows)
    opened_B = jnp.where(new_blocks_B > NULL_BLOCK, new_blocks_B, old_tables_BP[lanes_B, column_B])
    tables_BP = old_tables_BP.at[lanes_B, column_B].set(opened_B)
    slots_B = jnp.where(
        active_B, opened_B * block_size + lens_B % block_size, NULL_BLOCK * block_size
    )
    seen_B = jnp.where(active_B, lens_B + 1, 0)
    read_tables_BP = tables_BP[:, : -(-shape.width // block_size)]

    pool, hidden_BD = forward(
        config,
        params,
        pool,
        fed_B,
        lens_B,
        slots_B,
        lambda first_block, q, k, v: attend_decode(
            config, backend, q, k, v, read_tables_BP + first_block, seen_B
        ),
        deterministic=deterministic,
    )
    sampling, bias = jax.tree.map(lambda x: x[: shape.rows], (state.sampling, state.bias))
    sampling = idle_as_neutral(sampling, active_B)
    tokens_B, scores = next_tokens(
        logits(params, hidden_BD, deterministic=deterministic),
        sampling,
        bias,
        mask_BW,
        lambda: state.counts_BV[: shape.rows],
        seen_B,
    )
    state = state._replace(
        block_tables_BP=state.block_tables_BP.at[: shape.rows].set(tables_BP),
        context_lens_B=state.context_lens_B.at[: shape.rows].set(
            jnp.where(active_B, seen_B, lens_B)
        ),
        last_tokens_B=state.last_tokens_B.at[: shape.rows].set(
            jnp.where(active_B, tokens_B, fed_B)
        ),
        counts_BV=count_tokens(state.counts_BV, lanes_B, tokens_B, penalised(sampling)),
    )
    return pool, state, StepOutput(tokens_B, scores)


def prefill_step(
    params: Params,
    pool: KVPool,
    state: DecodeState,
    batch: PrefillBatch,
    *,
    config: ModelConfig,
    backend: AttentionBackend,
    deterministic: bool = False,
) -> tuple[KVPool, DecodeState, StepOutput]:
    """Chunks of up to S prompts; a prompt that ends moves into its decode row with a first token.

    The counts of a row with penalties must be written before. Returns the pool, the state and what
    was drawn, a token a segment; those of segments whose prompt goes on mean nothing.
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
        deterministic=deterministic,
    )
    assert batch.bias is not None
    last_S = jnp.maximum(batch.cu_query_lens_S1[1:] - 1, 0)
    tokens_S, scores = next_tokens(
        logits(params, hidden_TD[last_S], deterministic=deterministic),
        batch.sampling,
        batch.bias,
        batch.mask_SW,
        lambda: state.counts_BV.at[batch.rows_S].get(mode="clip"),
        batch.context_lens_S,
    )
    prompt = score_prompt(
        lambda hidden: logits(params, hidden, deterministic=deterministic),
        hidden_TD,
        batch.targets_T,
        config.vocab_size,
    )

    def insert(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[batch.rows_S].set(new, mode="drop")

    state = DecodeState(
        block_tables_BP=insert(state.block_tables_BP, batch.block_tables_SP),
        context_lens_B=insert(state.context_lens_B, batch.context_lens_S),
        last_tokens_B=insert(state.last_tokens_B, tokens_S),
        sampling=SamplingRows(*map(insert, state.sampling, batch.sampling)),
        bias=LogitBias(*map(insert, state.bias, batch.bias)),
        counts_BV=count_tokens(state.counts_BV, batch.rows_S, tokens_S, penalised(batch.sampling)),
    )
    return pool, state, StepOutput(tokens_S, scores, prompt)


def compiler_options(platform: str, *, deterministic: bool = False) -> dict[str, bool]:
    """What steps are compiled with on a platform ("cpu", "cuda", ...).

    ``deterministic``: no sum's order is the compiler's choice, which could differ between rows.
    """
    if platform == "cuda":
        # XLA's own products must be tuned on the device that runs them; cuBLAS needs no tuning and
        # leaves fewer kernels between products.
        return {"xla_gpu_enable_triton_gemm": False}
    return cpu_compiler_options() if platform == "cpu" and not deterministic else {}


def jit_decode(
    config: ModelConfig,
    backend: AttentionBackend,
    shape: DecodeShape,
    block_size: int,
    platform: str,
    *,
    persist_inputs: bool = True,
    deterministic: bool = False,
) -> jax.stages.Wrapped:
    """``decode_step`` of one shape, jitted with the pool donated, and the state if it persists."""
    step = partial(
        decode_step,
        config=config,
        backend=backend,
        shape=shape,
        block_size=block_size,
        deterministic=deterministic,
    )
    donated = (1, 2) if persist_inputs else (1,)
    options = compiler_options(platform, deterministic=deterministic)
    return jax.jit(step, donate_argnums=donated, compiler_options=options)


def jit_prefill(
    config: ModelConfig,
    backend: AttentionBackend,
    platform: str,
    *,
    persist_inputs: bool = True,
    deterministic: bool = False,
) -> jax.stages.Wrapped:
    """``prefill_step`` jitted with the pool donated, and the state if it persists."""
    step = partial(prefill_step, config=config, backend=backend, deterministic=deterministic)
    donated = (1, 2) if persist_inputs else (1,)
    options = compiler_options(platform, deterministic=deterministic)
    return jax.jit(step, donate_argnums=donated, compiler_options=options)


def jit_permute(*, persist_inputs: bool = True) -> jax.stages.Wrapped:
    """``permute_rows`` jitted with the state donated if it persists."""
    return jax.jit(permute_rows, donate_argnums=0 if persist_inputs else ())


def jit_write_counts(*, persist_inputs: bool = True) -> jax.stages.Wrapped:
    """``write_counts`` jitted with the state donated if it persists."""
    return jax.jit(write_counts, donate_argnums=0 if persist_inputs else ())
