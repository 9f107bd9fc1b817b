"""Tiny models and hand-packed batches shared by the tests that run the real steps."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.config import ModelConfig
from jaxserve.model.definition import LlamaForCausalLM
from jaxserve.plan.batch import NEUTRAL_SAMPLING, PrefillBatch, SamplingRows, sampling_specs

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=131,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
FULL = replace(  # every optional leaf at once
    TINY,
    num_heads=3,
    num_kv_heads=3,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    tie_word_embeddings=False,
    sliding_window=19,
)


def module_of(config: ModelConfig, seed: int = 0) -> LlamaForCausalLM:
    """A float32 module whose biases and norms are random too, so that dropping one shows."""
    module = LlamaForCausalLM(config, rngs=nnx.Rngs(seed))
    state = nnx.state(module, nnx.Param)
    leaves, tree = jax.tree.flatten(state)
    rng = np.random.default_rng(seed)
    leaves = [
        leaf + 0.1 * jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
        if leaf.ndim == 1
        else leaf
        for leaf in leaves
    ]
    nnx.update(module, jax.tree.unflatten(tree, leaves))
    return module


def greedy_by_full_forward(module: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation, each token from a whole forward pass without any cache.

    The sequence is padded to its final length so that one program serves every step; causality
    keeps the padding out of the result.
    """
    length = len(prompt) + count
    forward = nnx.jit(lambda m, tokens: m(tokens))
    tokens = list(prompt)
    while len(tokens) < length:
        padded = jnp.asarray([tokens + [0] * (length - len(tokens))], jnp.int32)
        tokens.append(int(forward(module, padded)[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


def rows_of(settings: list[dict]) -> SamplingRows:
    """SamplingRows from one dict a row of field names without their shape; the rest is neutral."""

    def column(name, neutral, spec):
        field = name.rsplit("_", 1)[0]
        values = [s.get(field, neutral) for s in settings]
        if field == "keys":
            values = [[0, s.get("seed", 0)] for s in settings]
        return jnp.asarray(values, spec.dtype)

    specs = sampling_specs(len(settings))
    return SamplingRows(*map(column, SamplingRows._fields, NEUTRAL_SAMPLING, specs))


def pack_mask(allowed: set[int] | None, vocab: int) -> np.ndarray:
    """uint32 [W] with the bits of ``allowed``, all of them for None."""
    words = np.zeros(-(-vocab // 32), np.uint32)
    if allowed is None:
        return ~words
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words


def pack_prefill(
    chunks: list[tuple[list[int], int, list[int], int]],
    *,
    tokens: int,
    segments: int,
    blocks_per_row: int,
    block_size: int,
) -> PrefillBatch:
    """A batch from chunks of (token ids, first position, blocks, destination row)."""
    flat: list[tuple[int, int, int]] = []
    cu = [0]
    tables = np.full((segments, blocks_per_row), 2**30, np.int32)  # garbage past the length
    lens = np.zeros(segments, np.int32)
    rows = np.full(segments, 10**6, np.int32)
    for s, (ids, start, blocks, row) in enumerate(chunks):
        for i, token in enumerate(ids, start):
            flat.append((token, i, blocks[i // block_size] * block_size + i % block_size))
        cu.append(len(flat))
        tables[s, : len(blocks)] = blocks
        lens[s] = start + len(ids)
        rows[s] = row
    cu += [len(flat)] * (segments - len(chunks))
    flat += [(0, 0, 0)] * (tokens - len(flat))
    token, position, slot = (np.asarray(column, np.int32) for column in zip(*flat, strict=True))
    return PrefillBatch(
        tokens_T=token,
        positions_T=position,
        slots_T=slot,
        cu_query_lens_S1=np.asarray(cu, np.int32),
        block_tables_SP=tables,
        context_lens_S=lens,
        rows_S=rows,
        sampling=rows_of([{}] * segments),
        bias=None,
        mask_SW=None,
        targets_T=None,
    )
