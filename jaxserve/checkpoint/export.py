"""A model written as a Hugging Face directory: config, tokenizer and safetensors shards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxserve.checkpoint.hf_config import ARCHITECTURES
from jaxserve.checkpoint.safetensors_files import INDEX, SINGLE
from jaxserve.checkpoint.tokenizer import TOKENIZER, TOKENIZER_CONFIG, TokenizerBundle
from jaxserve.config import ModelConfig, RopeScaling

CONFIG = "config.json"
# What a directory says of a model besides its weights.
_ABOUT = (
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "chat_template.jinja",
)


def hf_config(model: ModelConfig) -> dict[str, Any]:
    """The config.json that ``parse_hf_config`` reads back as ``model``."""
    config: dict[str, Any] = {
        "architectures": [model.architecture],
        "model_type": ARCHITECTURES[model.architecture],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_word_embeddings,
        "torch_dtype": model.dtype,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": list(model.eos_token_ids) or None,
        "sliding_window": model.sliding_window,
    }
    if model.rope_scaling is not None:
        config["rope_scaling"] = _rope(model.rope_scaling)
    if model.architecture == "LlamaForCausalLM":
        config |= {"attention_bias": model.o_bias, "mlp_bias": model.mlp_bias}
    if model.architecture == "Qwen2ForCausalLM":
        windowed = model.sliding_window is not None
        config |= {"use_sliding_window": windowed, "max_window_layers": 0}
    return config


def _rope(scaling: RopeScaling) -> dict[str, Any]:
    config: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        fields = ("low_freq_factor", "high_freq_factor")
    elif scaling.kind == "yarn":
        fields = (
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        )
    else:
        fields = ()
    config |= {f: getattr(scaling, f) for f in fields if getattr(scaling, f) is not None}
    if scaling.original_max is not None:
        config["original_max_position_embeddings"] = scaling.original_max
    return config


def write_about(
    directory: Path, source: Path | None, model: ModelConfig, tokenizer: TokenizerBundle | None
) -> None:
    """Config and tokenizer into ``directory``: copied where ``source`` is a directory with them."""
    if source is not None and source.is_dir():
        for name in _ABOUT:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
        return
    _write_json(directory / CONFIG, hf_config(model))
    if tokenizer is not None:
        tokenizer.tokenizer.save(str(directory / TOKENIZER))
        about: dict[str, Any] = {**tokenizer.special_tokens, "add_bos_token": tokenizer.add_bos}
        if tokenizer.chat_template is not None:
            about["chat_template"] = tokenizer.chat_template
        _write_json(directory / TOKENIZER_CONFIG, about)


def write_safetensors(
    directory: Path, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int
) -> None:
    """``tensors`` in their order as shards of at most ``shard_bytes`` (or one tensor) each.

    No more than a shard is in memory.
    """
    shards: list[tuple[Path, list[str]]] = []
    shard: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        path = directory / f"{len(shards)}.part"
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(0o644)  # the library makes it private
        shards.append((path, list(shard)))
        shard.clear()

    for name, array in tensors:
        if shard and sum(a.nbytes for a in shard.values()) + array.nbytes > shard_bytes:
            flush()
        shard[name] = np.ascontiguousarray(array)
        total += array.nbytes
    flush()
    if len(shards) == 1:
        shards[0][0].rename(directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, (path, names) in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        path.rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
