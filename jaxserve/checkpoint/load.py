"""load_checkpoint: the one way from a name or a path to a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxserve.checkpoint.demo import DEMO_NAME, Progress, fetch_demo, no_progress
from jaxserve.checkpoint.gguf_file import GGUFFile
from jaxserve.checkpoint.gguf_model import GGUFTensors, parse_gguf_config
from jaxserve.checkpoint.gguf_tokenizer import load_gguf_tokenizer
from jaxserve.checkpoint.hf_config import parse_hf_config
from jaxserve.checkpoint.hub import fetch_from_hub, is_hub_id
from jaxserve.checkpoint.orbax_files import OrbaxTensors, find_orbax
from jaxserve.checkpoint.safetensors_files import INDEX, SINGLE, SafetensorsTensors
from jaxserve.checkpoint.tensors import TensorSource
from jaxserve.checkpoint.tokenizer import TokenizerBundle, load_hf_tokenizer
from jaxserve.checkpoint.values import load_json
from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError, ConfigError

LoadFormat = Literal["auto", "safetensors", "gguf", "orbax", "dummy"]
CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on disk. ``name`` is what it is served as.

    ``tokenizer`` None: there is none. ``tensors`` None: only the config is wanted, and the weights
    are drawn on the device by the model's initialisers.
    """

    name: str
    config: ModelConfig
    tokenizer: TokenizerBundle | None
    tensors: TensorSource | None

    def fitting_tokenizer(self) -> TokenizerBundle:
        """The tokenizer, whose every id the model knows.

        A vocabulary larger than the tokenizer is padding and fits. Raises ConfigError when there is
        no tokenizer or one of another model.
        """
        if self.tokenizer is None:
            raise ConfigError(
                f"{self.name} has no tokenizer; name one with --tokenizer (a directory, a GGUF "
                "file or a hub id)"
            )
        ids = self.tokenizer.tokenizer.get_vocab(with_added_tokens=True).values()
        largest = max(ids, default=-1)
        if largest >= self.config.vocab_size:
            raise ConfigError(
                f"{self.name}: the tokenizer has ids up to {largest}, and the model's vocabulary "
                f"ends at {self.config.vocab_size - 1} (vocab_size {self.config.vocab_size}): it "
                "belongs to another model; name the one that fits with --tokenizer"
            )
        return self.tokenizer


def load_checkpoint(
    name_or_path: str | None = None,
    *,
    load_format: LoadFormat = "auto",
    tokenizer: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress = no_progress,
) -> Checkpoint:
    """Open a model; tensors are checked here and read when asked for.

    ``name_or_path``: a Hugging Face directory, one with an Orbax checkpoint beside its config
    (see checkpoint/orbax_files.py), a GGUF file, a hub id, or None for the demo model,
    which is fetched once into ``cache_dir`` (None: the user's cache) while ``progress`` is told.
    ``load_format`` "dummy" needs a config only and gives no tensors.
    ``tokenizer`` names another directory, GGUF file or hub id to take the tokenizer from.
    Raises CheckpointError or ConfigError, one line each.
    """
    dummy = load_format == "dummy"
    if name_or_path is None:
        name, path = DEMO_NAME, fetch_demo(cache_dir, progress)
    else:
        name, path = name_or_path, _locate(name_or_path, weights=not dummy)
    if path.name == CONFIG and path.is_file() and dummy:
        path = path.parent
    _check_format(path, name, load_format)

    tensors: TensorSource | None
    if path.is_file():
        file = GGUFFile(path)
        config = parse_gguf_config(file)
        tensors = None if dummy else GGUFTensors(file, config)
    else:
        config = _directory_config(path)
        tensors = None if dummy else _directory_tensors(path, config)
    if tokenizer is None:
        bundle = load_gguf_tokenizer(file) if path.is_file() else load_hf_tokenizer(path)
    else:
        bundle = _other_tokenizer(tokenizer)
    return Checkpoint(name=name, config=config, tokenizer=bundle, tensors=tensors)


def _locate(name: str, *, weights: bool) -> Path:
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:  # no permission, too long, an unknown ~user
        raise CheckpointError(f"{name}: {error}") from error
    if is_hub_id(name):
        return fetch_from_hub(name, weights=weights)
    raise CheckpointError(
        f"{name}: no such file or directory, nor a hub id (owner/name); pass a Hugging Face "
        "directory, a GGUF file or a hub id"
    )


def _check_format(path: Path, name: str, load_format: LoadFormat) -> None:
    if path.is_file():
        kind, what = "gguf", "a file"
    elif _is_orbax(path):
        kind, what = "orbax", "a directory with an Orbax checkpoint"
    else:
        kind, what = "safetensors", "a directory without an Orbax checkpoint"
    if load_format not in ("auto", "dummy", kind):
        raise CheckpointError(
            f"{name} is {what}, which --load-format {load_format} does not read; use "
            f"--load-format {kind}"
        )


def _is_orbax(directory: Path) -> bool:
    """True without safetensors: a directory that holds both is a Hugging Face one."""
    has_safetensors = any((directory / name).is_file() for name in (SINGLE, INDEX))
    return not has_safetensors and find_orbax(directory) is not None


def _directory_tensors(directory: Path, config: ModelConfig) -> TensorSource:
    if _is_orbax(directory):
        tree = find_orbax(directory)
        assert tree is not None
        return OrbaxTensors(tree, config)
    return SafetensorsTensors(directory, config)


def _directory_config(directory: Path) -> ModelConfig:
    path = directory / CONFIG
    if not path.is_file():
        gguf = sorted(p.name for p in directory.glob("*.gguf"))
        hint = f"; for a GGUF model name the file, e.g. {directory / gguf[0]}" if gguf else ""
        raise CheckpointError(f"{directory}: no {CONFIG} in it{hint}")
    generation = directory / "generation_config.json"
    return parse_hf_config(
        load_json(path), load_json(generation) if generation.is_file() else None, file=str(path)
    )


def _other_tokenizer(name: str) -> TokenizerBundle:
    path = _locate(name, weights=False)
    bundle = load_gguf_tokenizer(GGUFFile(path)) if path.is_file() else load_hf_tokenizer(path)
    if bundle is None:
        raise CheckpointError(f"--tokenizer {name}: holds no tokenizer.json or GGUF tokenizer")
    return bundle
