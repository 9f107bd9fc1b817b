"""A trainer's weights, in whatever tree it keeps them, as the parameters the steps take.

*Canonical* weights are unfused: one matrix a projection. They come as the nnx module, its
``nnx.State``, that state's pure dict, or a flat mapping of Hugging Face names; kernels of flax are
[in, out], the weights of Hugging Face [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.config import ModelConfig
from jaxserve.errors import InvalidWeights
from jaxserve.model.definition import LlamaForCausalLM
from jaxserve.model.params import LayerParams, Params, build_params, param_specs

_FLAX_LEAVES = ("kernel", "scale", "embedding")


@cache
def canonical_specs(config: ModelConfig, dtype: str) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Hugging Face name -> ShapeDtypeStruct [out, in] of every canonical tensor."""
    names: list[str] = []
    build_params(config, names.append, concat=lambda parts: None)
    module = nnx.eval_shape(lambda: LlamaForCausalLM(config, dtype=dtype, rngs=nnx.Rngs(0)))
    tensors = canonical_tensors(module)
    return {
        name: jax.ShapeDtypeStruct(_shape(leaf, turned), leaf.dtype)
        for name, (leaf, turned) in ((name, tensors[name]) for name in names)
    }


def _shape(leaf: Any, turned: bool) -> tuple[int, ...]:
    return tuple(leaf.shape[::-1] if turned else leaf.shape)


def pure_tree(tree: Any) -> Any:
    """A canonical tree as plain containers of arrays."""
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree)
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree


def canonical_tensors(tree: Any) -> dict[str, tuple[Any, bool]]:
    """Hugging Face name -> (array, whether it is [in, out]) of a canonical tree."""
    tree = pure_tree(tree)
    tensors: dict[str, tuple[Any, bool]] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        keys = ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path).split(".")
        if keys[-1] == "value":
            keys.pop()
        turned = keys[-1] == "kernel"
        if keys[-1] in _FLAX_LEAVES:
            keys[-1] = "weight"
        tensors[".".join(keys)] = (leaf, turned)
    return tensors


def check_canonical(tree: Any, config: ModelConfig, dtype: str) -> None:
    """Raise InvalidWeights, naming the first tensor, unless ``tree`` is a whole model."""
    found, wanted = canonical_tensors(tree), canonical_specs(config, dtype)
    for name, spec in wanted.items():
        if name not in found:
            raise InvalidWeights(f"{name} is missing; the model has {len(wanted)} tensors")
        leaf, turned = found[name]
        check_leaf(name, _shape(leaf, turned), leaf.dtype, spec)
    extra = sorted(found.keys() - wanted.keys())
    if extra:
        raise InvalidWeights(f"{extra[0]} is no tensor of this model")


def check_params(params: Params, config: ModelConfig, dtype: str, *, stacked: bool) -> None:
    """Raise InvalidWeights, naming the first leaf, unless ``params`` are what the steps take."""
    wanted = param_specs(config, dtype, stacked=stacked)
    if jax.tree.structure(params) != jax.tree.structure(wanted):
        raise InvalidWeights(
            f"these Params have {len(jax.tree.leaves(params))} arrays in another structure than "
            f"the {len(jax.tree.leaves(wanted))} of this engine; pass canonical weights, or build "
            f"Params with stacked={stacked}"
        )
    for (path, leaf), spec in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(wanted), strict=True
    ):
        check_leaf(jax.tree_util.keystr(path), tuple(leaf.shape), leaf.dtype, spec)


def check_leaf(name: str, shape: tuple[int, ...], dtype: Any, spec: jax.ShapeDtypeStruct) -> None:
    """Raise InvalidWeights unless a leaf has the shape and dtype of ``spec``."""
    if shape != spec.shape:
        raise InvalidWeights(f"{name} has shape {list(shape)}, the engine's is {list(spec.shape)}")
    if jnp.dtype(dtype) != spec.dtype:
        raise InvalidWeights(
            f"{name} is {jnp.dtype(dtype)}, the engine's weights are {spec.dtype}; cast the tree "
            f"first, e.g. jax.tree.map(lambda a: a.astype({str(spec.dtype)!r}), tree)"
        )


def engine_params(tree: Any, config: ModelConfig, *, stacked: bool) -> Params:
    """The fused parameters of a canonical tree; pure, for use under ``jax.jit``."""
    tensors = canonical_tensors(tree)

    def get(name: str) -> jax.Array:
        leaf, turned = tensors[name]
        return leaf.T if turned else leaf

    return build_params(config, get, concat=jnp.concatenate, stacked=stacked)


def canonical_tree(params: Params, config: ModelConfig) -> dict[str, Any]:
    """The pure dict of the nnx module's state that ``params`` hold; pure, for use under jit.

    The inverse of ``engine_params``: what a training run of the module saves and restores.
    """
    q, kv = config.q_size, config.kv_size

    def kernel(weight: jax.Array, bias: jax.Array | None) -> dict[str, jax.Array]:
        return {"kernel": weight.T} | ({} if bias is None else {"bias": bias})

    def split(weight: jax.Array, bias: jax.Array | None, sizes: tuple[int, ...]) -> list[Any]:
        ends = [sum(sizes[:i]) for i in range(1, len(sizes))]
        biases = [None] * len(sizes) if bias is None else jnp.split(bias, ends)
        return [kernel(w, b) for w, b in zip(jnp.split(weight, ends), biases, strict=True)]

    def unfused(layer: LayerParams) -> dict[str, Any]:
        q_proj, k_proj, v_proj = split(layer.qkv_ED, layer.qkv_bias_E, (q, kv, kv))
        gate, up = split(layer.gate_up_JD, layer.gate_up_bias_J, (config.intermediate_size,) * 2)
        return {
            "input_layernorm": {"scale": layer.attn_norm_D},
            "self_attn": {
                "q_proj": q_proj,
                "k_proj": k_proj,
                "v_proj": v_proj,
                "o_proj": kernel(layer.out_DQ, layer.out_bias_D),
            },
            "post_attention_layernorm": {"scale": layer.ffn_norm_D},
            "mlp": {
                "gate_proj": gate,
                "up_proj": up,
                "down_proj": kernel(layer.down_DF, layer.down_bias_D),
            },
        }

    layers = params.layers
    if isinstance(layers, LayerParams):
        stacked = layers
        layers = tuple(jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(config.num_layers))
    tree: dict[str, Any] = {
        "model": {
            "embed_tokens": {"embedding": params.embed_VD},
            "layers": {str(i): unfused(layer) for i, layer in enumerate(layers)},
            "norm": {"scale": params.final_norm_D},
        }
    }
    if params.head_VD is not None:
        tree["lm_head"] = kernel(params.head_VD, None)
    return tree


@partial(jax.jit, static_argnums=(1, 2))
def fuse_params(tree: Any, config: ModelConfig, stacked: bool) -> Params:
    """``engine_params`` in one jitted call, beside ``tree``."""
    return engine_params(tree, config, stacked=stacked)


@partial(jax.jit, donate_argnums=0, static_argnums=(2, 3), keep_unused=True)
def replace_params(old: Params, tree: Any, config: ModelConfig, stacked: bool) -> Params:
    """``engine_params(tree)`` in the memory of ``old``, which is gone afterwards.

    One call; what it needs besides the two trees is workspace for a layer. Compiled at the first
    use for a structure of ``tree``, apart from the steps.
    """
    del old  # its buffers become the result's: same shapes, same dtypes
    return engine_params(tree, config, stacked=stacked)
