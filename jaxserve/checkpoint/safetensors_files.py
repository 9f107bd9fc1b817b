"""Tensors of a Hugging Face directory: one safetensors file, or shards under an index."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy, which safetensors asks for by name)
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.checkpoint.tensors import Shapes, check_tensors, expected_shapes
from jaxserve.checkpoint.values import load_json, short
from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError, UnsupportedModel

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUPPORTED = {"F32", "F16", "BF16"}


class SafetensorsTensors:
    """The tensors under ``directory``, each read (one copy) when asked for."""

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        """Read every header and check names, shapes and types; no tensor data is touched.

        Raises CheckpointError naming the file and the tensor.
        """
        self.shapes: Shapes = expected_shapes(config)
        self._file_of: dict[str, Path] = {}
        found: dict[str, tuple[int, ...]] = {}
        for path, wanted in _shards(directory).items():
            shapes = _read_header(path, set(self.shapes))
            for name in wanted or ():
                if name in self.shapes and name not in shapes:
                    raise CheckpointError(f"{path}: tensor {name} is missing (the index has it)")
            for name, shape in shapes.items():
                if not _is_redundant(name, config):
                    found[name] = shape
                    self._file_of[name] = path
        files = {name: str(path) for name, path in self._file_of.items()}
        check_tensors(self.shapes, found, files)

    def get(self, name: str) -> np.ndarray:
        """The tensor in the file's dtype."""
        path = self._file_of[name]
        try:
            with safe_open(path, framework="numpy") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: tensor {name}: {error}") from error


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """True for what old writers added: a tied output matrix, and the rotary frequencies."""
    tied_head = config.tie_word_embeddings and name == "lm_head.weight"
    return tied_head or name.endswith("rotary_emb.inv_freq")


def _shards(directory: Path) -> dict[Path, set[str] | None]:
    """Each weight file with the tensors that the index expects in it (None: no index)."""
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: None}
    index = directory / INDEX
    if not index.is_file():
        others = sorted(p.name for p in directory.glob("*.bin")) or "no weights at all"
        raise CheckpointError(
            f"{directory}: neither {SINGLE} nor {INDEX} (found {short(others)}); weights are read "
            "from safetensors, from an Orbax checkpoint under params/, or from a GGUF file by name"
        )
    weight_map = load_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must name a file for every tensor")
    shards: dict[Path, set[str] | None] = {}
    for tensor, file in weight_map.items():
        # A plain name only: an index must not lead out of its directory.
        if (
            not isinstance(file, str)
            or file in ("", ".", "..")
            or set(file) & set("/\\")
            or not file.isprintable()
            or len(file.encode()) > 255  # what a file name may have
        ):
            raise CheckpointError(
                f"{index}: tensor {short(tensor)} is said to be in {short(file)}, "
                "which is no file name in this directory"
            )
        path = directory / file
        if not path.is_file():
            raise CheckpointError(
                f"{path}: shard is missing (the index puts {short(tensor)} there)"
            )
        shards.setdefault(path, set()).add(tensor)  # type: ignore[union-attr]
    return shards


def _read_header(path: Path, model: set[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a file; the type is checked for those of the model."""
    shapes = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                tensor = file.get_slice(name)
                shapes[name] = tuple(tensor.get_shape())
                dtype = tensor.get_dtype()
                if name in model and dtype not in SUPPORTED:
                    raise UnsupportedModel(
                        f"{path}: tensor {name} is {dtype}; supported: {', '.join(SUPPORTED)}"
                    )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error})") from error
    return shapes
