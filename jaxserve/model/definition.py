"""The model as a ``flax.nnx`` module: what a trainer holds, and how random weights are made.

Attribute names are those of Hugging Face checkpoints, so a path here is a tensor name there. The
engine never runs this module: ``params_of`` turns it into the fused pytree the steps take.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.config import ModelConfig
from jaxserve.model.params import Params, build_params
from jaxserve.model.rotary import rotary_table, rotate


def _linear(n_in: int, n_out: int, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(n_in, n_out, use_bias=bias, dtype=dtype, param_dtype=dtype, rngs=rngs)


def _norm(config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.hidden_size,
        epsilon=config.rms_norm_eps,
        dtype=dtype,
        param_dtype=dtype,
        rngs=rngs,
        promote_dtype=lambda arrays, **_: arrays,
    )


class Attention(nnx.Module):
    """Grouped-query causal self-attention over whole sequences."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        width, q, kv = config.hidden_size, config.q_size, config.kv_size
        self.q_proj = _linear(width, q, config.qkv_bias, dtype, rngs)
        self.k_proj = _linear(width, kv, config.qkv_bias, dtype, rngs)
        self.v_proj = _linear(width, kv, config.qkv_bias, dtype, rngs)
        self.o_proj = _linear(q, width, config.o_bias, dtype, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        batch, length, _ = x_BTD.shape
        positions_T = jnp.arange(length, dtype=jnp.int32)
        turn = jax.vmap(rotate, in_axes=(0, None))
        table = rotary_table(c, positions_T)
        q = turn(self.q_proj(x_BTD).reshape(batch, length, c.num_heads, c.head_dim), table)
        k = turn(self.k_proj(x_BTD).reshape(batch, length, c.num_kv_heads, c.head_dim), table)
        v = self.v_proj(x_BTD).reshape(batch, length, c.num_kv_heads, c.head_dim)
        left = None if c.sliding_window is None else c.sliding_window - 1
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            local_window_size=None if left is None else (left, 0),
        )
        return self.o_proj(out.reshape(batch, length, c.q_size))


class Mlp(nnx.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        width, ffn = config.hidden_size, config.intermediate_size
        self.gate_proj = _linear(width, ffn, config.mlp_bias, dtype, rngs)
        self.up_proj = _linear(width, ffn, config.mlp_bias, dtype, rngs)
        self.down_proj = _linear(ffn, width, config.mlp_bias, dtype, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.input_layernorm = _norm(config, dtype, rngs)
        self.self_attn = Attention(config, dtype, rngs)
        self.post_attention_layernorm = _norm(config, dtype, rngs)
        self.mlp = Mlp(config, dtype, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD))
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Decoder(nnx.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.embed_tokens = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.layers = nnx.List(
            [DecoderLayer(config, dtype, rngs) for _ in range(config.num_layers)]
        )
        self.norm = _norm(config, dtype, rngs)


class LlamaForCausalLM(nnx.Module):
    """A Llama-family causal language model; called with whole sequences, without a cache."""

    def __init__(self, config: ModelConfig, *, dtype: str | None = None, rngs: nnx.Rngs) -> None:
        real = jnp.dtype(dtype or config.dtype)
        self.config = config
        self.model = Decoder(config, real, rngs)
        if not config.tie_word_embeddings:
            self.lm_head = _linear(config.hidden_size, config.vocab_size, False, real, rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Logits float32 [B, T, V] of int32 tokens [B, T]."""
        x_BTD = self.model.embed_tokens(tokens_BT)
        for layer in self.model.layers:
            x_BTD = layer(x_BTD)
        x_BTD = self.model.norm(x_BTD)
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.attend(x_BTD).astype(jnp.float32)
        return self.lm_head(x_BTD).astype(jnp.float32)


_LEAVES = {"weight": ("kernel", "scale", "embedding"), "bias": ("bias",)}


def params_of(module: LlamaForCausalLM, *, stacked: bool = False) -> Params:
    """The fused pytree of a module's weights, in their dtype; works under ``jax.jit``.

    ``stacked``: with the layers in one, see ``Params``.
    """

    def get(name: str) -> jax.Array:
        *path, leaf = name.split(".")
        node: Any = module
        for step in path:
            node = node[int(step)] if step.isdigit() else getattr(node, step)
        for attribute in _LEAVES[leaf]:
            if hasattr(node, attribute):
                value = getattr(node, attribute)[...]
                return value.T if attribute == "kernel" else value
        raise AttributeError(f"{name} has none of {_LEAVES[leaf]}")

    return build_params(module.config, get, concat=jnp.concatenate, stacked=stacked)


def init_params(config: ModelConfig, dtype: str, seed: int, *, stacked: bool = False) -> Params:
    """Random weights, made on the device by the module's initialisers."""

    @jax.jit
    def make(key: jax.Array) -> Params:
        module = LlamaForCausalLM(config, dtype=dtype, rngs=nnx.Rngs(key))
        return params_of(module, stacked=stacked)

    return make(jax.random.key(seed))
