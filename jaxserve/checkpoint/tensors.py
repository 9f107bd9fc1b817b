"""What tensors a model consists of, and where they may come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from jaxserve.checkpoint.values import short
from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]


class TensorSource(Protocol):
    """A model's tensors, read one at a time under their Hugging Face names.

    ``shapes`` holds every tensor of the model, matrices [out, in], in the order of the layers;
    it is complete and checked before the first ``get``.
    """

    @property
    def shapes(self) -> Shapes: ...

    def get(self, name: str) -> np.ndarray:
        """The tensor, float32, float16 or bfloat16, possibly read-only. Raises CheckpointError."""
        ...


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and [out, in] shapes of all tensors of ``config``, in the order of the layers."""
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}

    def linear(name: str, n_out: int, n_in: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (n_out, n_in)
        if bias:
            shapes[f"{name}.bias"] = (n_out,)

    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (d,)
        linear(f"{layer}.self_attn.q_proj", config.q_size, d, config.qkv_bias)
        linear(f"{layer}.self_attn.k_proj", config.kv_size, d, config.qkv_bias)
        linear(f"{layer}.self_attn.v_proj", config.kv_size, d, config.qkv_bias)
        linear(f"{layer}.self_attn.o_proj", d, config.q_size, config.o_bias)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (d,)
        linear(f"{layer}.mlp.gate_proj", f, d, config.mlp_bias)
        linear(f"{layer}.mlp.up_proj", f, d, config.mlp_bias)
        linear(f"{layer}.mlp.down_proj", d, f, config.mlp_bias)
    shapes["model.norm.weight"] = (d,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (v, d)
    return shapes


def check_tensors(expected: Shapes, found: Shapes, files: Mapping[str, str]) -> None:
    """Raise CheckpointError unless ``found`` is ``expected``; ``files`` says where each lies.

    A tensor nobody asked for is refused too: it belongs to a feature (a norm of q and k, a scale
    of a quantised weight) whose absence would change the answers silently.
    """
    for name in expected:
        if name not in found:
            places = ", ".join(sorted(set(files.values()))) or "no file"
            raise CheckpointError(f"tensor {name} is missing (looked in {places})")
    for name, shape in found.items():
        if name not in expected:
            raise CheckpointError(
                f"{files[name]}: tensor {short(name)} {list(shape)} is not part of this "
                "architecture as jaxserve computes it"
            )
        if tuple(shape) != expected[name]:
            raise CheckpointError(
                f"{files[name]}: tensor {name} has shape {list(shape)}, the config wants "
                f"{list(expected[name])}"
            )
