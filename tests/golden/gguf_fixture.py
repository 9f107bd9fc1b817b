"""GGUF files written for tests: a family's weights, or a tiny model around any vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Quantise = Mapping[str, gguf.GGMLQuantizationType]

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER[stem]}.{kind}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in llama.cpp's order: a head's row i and i + H/2 become neighbours."""
    out = np.empty_like(rows)
    size = rows.shape[0] // heads
    for h in range(heads):
        head = rows[h * size : (h + 1) * size]
        out[h * size : (h + 1) * size : 2] = head[: size // 2]
        out[h * size + 1 : (h + 1) * size : 2] = head[size // 2 :]
    return out


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    types: Quantise | None = None,
    metadata: Mapping[str, Any] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    extra: Mapping[str, list[float]] | None = None,
) -> Path:
    """Write float32 Hugging Face ``tensors`` as llama.cpp would store them.

    ``types`` gives the storage of some tensors by Hugging Face name; ``metadata`` adds or replaces
    keys; ``vocabulary`` is an entry of tokenizers.json; ``extra`` are float32 vectors under
    llama.cpp's own names.
    """
    arch = "qwen2" if config["model_type"] == "qwen2" else "llama"
    writer = gguf.GGUFWriter(path, arch)
    entries: dict[str, Any] = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(config.get("rope_theta", 10_000.0)),
    }
    if "head_dim" in config:
        entries[f"{arch}.attention.key_length"] = config["head_dim"]
        entries[f"{arch}.attention.value_length"] = config["head_dim"]
    entries |= dict(metadata or {})
    for key, value in entries.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    if vocabulary is not None:
        _add_vocabulary(writer, vocabulary)
    for name, tensor in tensors.items():
        if arch == "llama" and ".q_proj." in name:
            tensor = interleave(tensor, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            tensor = interleave(tensor, config["num_key_value_heads"])
        kind = (types or {}).get(name, gguf.GGMLQuantizationType.F32)
        stored = gguf.quants.quantize(tensor, kind)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, np.array(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Mapping[str, Any]) -> None:
    writer.add_tokenizer_model(vocabulary["model"])
    if "pre" in vocabulary:
        writer.add_tokenizer_pre(vocabulary["pre"])
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    if "merges" in vocabulary:
        writer.add_token_merges(vocabulary["merges"])
    if "scores" in vocabulary:
        writer.add_token_scores(vocabulary["scores"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if "add_space_prefix" in vocabulary:
        writer.add_add_space_prefix(vocabulary["add_space_prefix"])
