"""What an LLM is made of: a checkpoint and a config out of what its caller has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxserve.checkpoint.load import Checkpoint, LoadFormat, load_checkpoint
from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.model.canonical import pure_tree


def find_checkpoint(
    model: str | Path | None,
    params: Any,
    model_config: ModelConfig | None,
    tokenizer: str | Path | None,
    load_format: LoadFormat,
    progress: Any,
) -> Checkpoint:
    """The checkpoint ``model`` names, or one without tensors for ``params``; see ``LLM``.

    Raises ConfigError, CheckpointError.
    """
    named = None if tokenizer is None else str(tokenizer)
    if params is None:
        if model_config is not None:
            raise ConfigError("model_config goes with params; a model brings its own")
        return load_checkpoint(
            None if model is None else str(model),
            load_format=load_format,
            tokenizer=named,
            progress=progress,
        )
    if model is not None:
        raise ConfigError("pass a model or params, not both")
    if model_config is None and isinstance(params, nnx.Module):
        model_config = getattr(params, "config", None)
    if not isinstance(model_config, ModelConfig):
        raise ConfigError("params need a model_config (an nnx module brings its own)")
    bundle = None if named is None else load_checkpoint(named, load_format="dummy").tokenizer
    return Checkpoint(name="params", config=model_config, tokenizer=bundle, tensors=None)


def config_for(config: EngineConfig | None, params: Any) -> EngineConfig:
    """``config``, with weights that are there keeping their dtype. Raises ConfigError."""
    config = config or EngineConfig()
    if params is None or config.dtype != "auto":
        return config
    leaves = jax.tree.leaves(pure_tree(params))
    if not leaves:
        raise ConfigError("params hold no arrays")
    return replace(config, dtype=str(leaves[0].dtype))
