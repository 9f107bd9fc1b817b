"""Tiny checkpoints of every supported model family, drawn from a seed without torch.

A family is a directory ``families/<name>/`` holding

* ``config.json``: a Hugging Face config, as ``transformers`` reads it;
* ``golden.npz``: what ``transformers`` computes from it in float32 (written by regenerate.py). For
  prompt i: ``prompt_i`` int32 [T]; ``positions_i`` int32 [M], the positions whose logits are kept;
  ``logits_i`` float32 [M, V]; ``greedy_i`` int32 [16], the greedy continuation.
  ``weights_sha256`` is the digest of the weights that gave them.

The weights are not kept: they follow from the names and shapes of the tensors. They come from the
raw PCG64 stream, which numpy promises never to change, and not from its distributions, which may.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).parent
FAMILIES = tuple(sorted(p.name for p in (HERE / "families").iterdir() if p.is_dir()))


def family_config(family: str) -> dict[str, Any]:
    """The family's config.json."""
    return json.loads((HERE / "families" / family / "config.json").read_text())


def family_golden(family: str) -> dict[str, np.ndarray]:
    """The family's golden arrays, by the names given at the top."""
    with np.load(HERE / "families" / family / "golden.npz") as arrays:
        return dict(arrays)


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor names and [out, in] shapes of a Llama, Mistral or Qwen2 config."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or d // config["num_attention_heads"]
    q = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    qwen2 = config["architectures"] == ["Qwen2ForCausalLM"]
    qkv_bias = qwen2 or config.get("attention_bias", False)

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}

    def linear(name: str, n_out: int, n_in: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (n_out, n_in)
        if bias:
            shapes[f"{name}.bias"] = (n_out,)

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (d,)
        linear(f"{layer}.self_attn.q_proj", q, d, qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv, d, qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv, d, qkv_bias)
        linear(f"{layer}.self_attn.o_proj", d, q, config.get("attention_bias", False))
        shapes[f"{layer}.post_attention_layernorm.weight"] = (d,)
        linear(f"{layer}.mlp.gate_proj", f, d, config.get("mlp_bias", False))
        linear(f"{layer}.mlp.up_proj", f, d, config.get("mlp_bias", False))
        linear(f"{layer}.mlp.down_proj", d, f, config.get("mlp_bias", False))
    shapes["model.norm.weight"] = (d,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (v, d)
    return shapes


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 in [-1, 1), 24 random bits each, a pure function of the name and the shape."""
    stream = np.random.PCG64(np.random.SeedSequence(zlib.crc32(name.encode())))
    bits = stream.random_raw(int(np.prod(shape))) >> np.uint64(40)
    return (bits.astype(np.float32) / np.float32(2**23) - np.float32(1)).reshape(shape)


def draw_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Weights in float32, scaled so that attention is peaked and logits are of order one."""
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        u = uniform(name, shape)
        if name.endswith("norm.weight"):
            tensors[name] = np.float32(1) + np.float32(0.25) * u
        elif name.endswith(".bias") or name == "model.embed_tokens.weight":
            tensors[name] = np.float32(0.5) * u
        else:
            gain = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
            tensors[name] = np.float32(gain * (3.0 / shape[1]) ** 0.5) * u
    return tensors


def weights_sha256(tensors: dict[str, np.ndarray]) -> str:
    """Digest of names and little-endian float32 bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].astype("<f4").tobytes())
    return digest.hexdigest()


def write_checkpoint(directory: Path, family: str) -> Path:
    """Write the family as a Hugging Face directory of one safetensors file; returns it."""
    config = family_config(family)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(draw_tensors(config), directory / "model.safetensors")
    return directory
