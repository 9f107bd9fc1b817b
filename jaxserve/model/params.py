"""The weights the steps take: one fused, plain pytree, and how a checkpoint becomes it.

Every matrix is stored [out, in] and contracted over its last axis, which is how checkpoints store
them and what both XLA:CPU and cuBLAS read fastest at few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import ModelConfig


class LayerParams(NamedTuple):
    """One decoder layer. E = (N + 2K) * H: the query, key and value projections stacked."""

    attn_norm_D: Any
    qkv_ED: Any
    qkv_bias_E: Any | None
    out_DQ: Any
    out_bias_D: Any | None
    ffn_norm_D: Any
    gate_up_JD: Any  # J = 2F: gate above up
    gate_up_bias_J: Any | None
    down_DF: Any
    down_bias_D: Any | None


class Params(NamedTuple):
    """A whole model; ``head_VD`` is None when the embedding is the output matrix (tied).

    ``layers`` is a tuple of layers, or one LayerParams whose arrays have a leading axis L: the
    *stacked* layout, whose layers a step walks in a loop (see ``stacks_layers``).
    """

    embed_VD: Any
    layers: tuple[LayerParams, ...] | LayerParams
    final_norm_D: Any
    head_VD: Any | None


def stacks_layers(platform: str) -> bool:
    """Whether steps on ``platform`` walk stacked layers in a loop.

    A loop's program does not grow with the layers, so it compiles, loads and is called several
    times faster. On CPUs it reads the stacked weights where they lie; on GPUs library products
    take no slice, so every layer's weights would be copied at every step.
    """
    return platform == "cpu"


@partial(jax.jit, donate_argnums=0)
def insert_layer(stacked: LayerParams, layer: LayerParams, index: jax.Array) -> LayerParams:
    """``stacked``, donated, with ``layer`` as its layer ``index``."""
    return jax.tree.map(lambda all_L, one: all_L.at[index].set(one), stacked, layer)


def stack_layers(layers: Iterable[LayerParams], num_layers: int) -> LayerParams:
    """``num_layers`` layers as one with a leading axis L; holds one layer more than the result."""
    stacked = None
    for i, layer in enumerate(layers):
        if stacked is None:
            stacked = jax.tree.map(lambda a: jnp.zeros((num_layers, *a.shape), a.dtype), layer)
        stacked = insert_layer(stacked, layer, jnp.int32(i))
    assert stacked is not None  # a model has a layer
    return stacked


def param_specs(config: ModelConfig, dtype: str, *, stacked: bool = False) -> Params:
    """``Params`` of ShapeDtypeStruct, what executables are lowered from."""

    def spec(*shape: int, lead: tuple[int, ...] = ()) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, *shape), jnp.dtype(dtype))

    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    e = config.q_size + 2 * config.kv_size
    each = partial(spec, lead=(config.num_layers,) if stacked else ())
    layer = LayerParams(
        attn_norm_D=each(d),
        qkv_ED=each(e, d),
        qkv_bias_E=each(e) if config.qkv_bias else None,
        out_DQ=each(d, config.q_size),
        out_bias_D=each(d) if config.o_bias else None,
        ffn_norm_D=each(d),
        gate_up_JD=each(2 * f, d),
        gate_up_bias_J=each(2 * f) if config.mlp_bias else None,
        down_DF=each(d, f),
        down_bias_D=each(d) if config.mlp_bias else None,
    )
    return Params(
        embed_VD=spec(v, d),
        layers=layer if stacked else (layer,) * config.num_layers,
        final_norm_D=spec(d),
        head_VD=None if config.tie_word_embeddings else spec(v, d),
    )


def build_params(
    config: ModelConfig,
    get: Callable[[str], Any],
    concat: Callable[[list[Any]], Any] = np.concatenate,
    put: Callable[[Any], Any] = lambda a: a,
    *,
    stacked: bool = False,
) -> Params:
    """Fuse a checkpoint's tensors, one layer at a time.

    ``get`` maps a Hugging Face tensor name to an array [out, in]; ``concat`` joins arrays on
    axis 0; ``put`` places a finished array (casts it and moves it to the device), so host memory
    holds one layer at most. With jax.numpy's concatenate it also runs under jit, on the device.
    ``stacked`` layers are joined on the device.
    """

    def fused(prefix: str, names: tuple[str, ...], leaf: str, present: bool = True) -> Any | None:
        if not present:
            return None
        parts = [get(f"{prefix}{name}.{leaf}") for name in names]
        return put(parts[0] if len(parts) == 1 else concat(parts))

    def layers() -> Iterator[LayerParams]:
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        gate_up = ("mlp.gate_proj", "mlp.up_proj")
        for i in range(config.num_layers):
            p = f"model.layers.{i}."
            yield LayerParams(
                attn_norm_D=fused(p, ("input_layernorm",), "weight"),
                qkv_ED=fused(p, qkv, "weight"),
                qkv_bias_E=fused(p, qkv, "bias", config.qkv_bias),
                out_DQ=fused(p, ("self_attn.o_proj",), "weight"),
                out_bias_D=fused(p, ("self_attn.o_proj",), "bias", config.o_bias),
                ffn_norm_D=fused(p, ("post_attention_layernorm",), "weight"),
                gate_up_JD=fused(p, gate_up, "weight"),
                gate_up_bias_J=fused(p, gate_up, "bias", config.mlp_bias),
                down_DF=fused(p, ("mlp.down_proj",), "weight"),
                down_bias_D=fused(p, ("mlp.down_proj",), "bias", config.mlp_bias),
            )

    return Params(
        embed_VD=put(get("model.embed_tokens.weight")),
        layers=stack_layers(layers(), config.num_layers) if stacked else tuple(layers()),
        final_norm_D=put(get("model.norm.weight")),
        head_VD=None if config.tie_word_embeddings else put(get("lm_head.weight")),
    )
