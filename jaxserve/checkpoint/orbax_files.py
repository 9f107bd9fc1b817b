"""Tensors of an Orbax checkpoint laid out like the nnx module: read one at a time, written in turn.

The layout is that of ``nnx.state(LlamaForCausalLM(...))`` saved as a tree: kernels [in, out] under
``model/layers/0/self_attn/q_proj/kernel``, norms as ``scale``, the table as ``embedding``; a last
level ``value``, which older flax versions write, is looked through. So a checkpoint of a training
run and one converted here are read by the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoint.tensors import Shapes, check_tensors, expected_shapes
from jaxserve.checkpoint.values import short
from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError, UnsupportedModel

PARAMS = "params"
"""Where a converted model keeps its Orbax checkpoint, beside config.json."""
_ITEMS = ("", PARAMS, "state", f"{PARAMS}/state", "default", f"{PARAMS}/default")
_TREE_FILE = "_METADATA"
_DTYPES = ("float32", "float16", "bfloat16")
# What is written at once, so that a model never has to fit in memory.
_GROUP_BYTES = 1024**3

_Leaf = tuple[tuple[str, ...], tuple[int, ...], str]  # path, shape and dtype as stored


def find_orbax(directory: Path) -> Path | None:
    """The Orbax tree in ``directory`` or in one of the places where writers put it, else None."""
    for item in _ITEMS:
        if (directory / item / _TREE_FILE).is_file():
            return directory / item
    return None


class OrbaxTensors:
    """The tensors under the Orbax tree ``directory``, each read when asked for."""

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        """Read the tree and check names, shapes and types; no tensor data is touched.

        Raises CheckpointError naming the leaf.
        """
        self.directory = directory.resolve()
        self.shapes: Shapes = expected_shapes(config)
        leaves = dict(_leaves(self.directory))
        self._leaf_of: dict[str, _Leaf] = {}
        found: dict[str, tuple[int, ...]] = {}
        for name in self.shapes:
            for path in _paths(name):
                if path in leaves:
                    leaf = self._leaf_of[name] = leaves.pop(path)
                    found[name] = leaf[1][::-1] if path[-1] == "kernel" else leaf[1]
                    if leaf[2] not in _DTYPES:
                        raise UnsupportedModel(
                            f"{directory}: {'.'.join(path)} is {leaf[2]}; supported: "
                            f"{', '.join(_DTYPES)}"
                        )
        extra = {".".join(path): leaf[1] for path, leaf in leaves.items()}
        everywhere = {name: str(directory) for name in (*found, *extra)}
        check_tensors(self.shapes, found | extra, everywhere or {"": str(directory)})

    def get(self, name: str) -> np.ndarray:
        """The tensor in the checkpoint's dtype, [out, in]."""
        import orbax.checkpoint as ocp
        from etils import epath

        path, _, _ = self._leaf_of[name]
        item: Any = 0
        how: Any = ocp.RestoreArgs(restore_type=np.ndarray)
        for key in reversed(path):
            item, how = {key: item}, {key: how}
        try:
            tree = ocp.PyTreeCheckpointHandler().restore(
                epath.Path(self.directory),
                # With the tree given, nothing of the checkpoint's own says where to read.
                args=ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True),
            )
        except Exception as error:  # Orbax and tensorstore raise anything
            raise CheckpointError(f"{self.directory}: tensor {name}: {_line(error)}") from error
        for key in path:
            tree = tree[key]
        array = np.asarray(tree)
        return array.T if path[-1] == "kernel" or path[-2:] == ("kernel", "value") else array


def write_orbax(path: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Save ``tensors`` (Hugging Face names, [out, in]) as an Orbax checkpoint at ``path``.

    They are taken and written in groups of about 1 GiB. The checkpoint appears at ``path`` when
    it is whole.
    """
    from orbax.checkpoint.experimental.v1 import partial

    for group in _groups(tensors):
        partial.save(str(path), group)
    partial.finalize(str(path))


def _groups(tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[dict[str, Any]]:
    group: dict[str, Any] = {}
    size = 0
    for name, array in tensors:
        *keys, leaf = _paths(name)[0] if array.ndim == 1 else _matrix_path(name)
        node = group
        for key in keys:
            node = node.setdefault(key, {})
        node[leaf] = np.ascontiguousarray(array.T) if leaf == "kernel" else array
        size += array.nbytes
        if size >= _GROUP_BYTES:
            yield group
            group, size = {}, 0
    if group:
        yield group


def _matrix_path(name: str) -> tuple[str, ...]:
    *keys, _ = name.split(".")
    return (*keys, "embedding" if keys[-1] == "embed_tokens" else "kernel")


def _paths(name: str) -> tuple[tuple[str, ...], ...]:
    """The places of a tensor in the module's tree."""
    *keys, leaf = name.split(".")
    if leaf == "bias":
        return ((*keys, "bias"),)
    return tuple((*keys, kind) for kind in ("scale", "kernel", "embedding"))


def _leaves(directory: Path) -> Iterator[tuple[tuple[str, ...], _Leaf]]:
    """(path without a last ``value``, leaf) of the whole tree."""
    import orbax.checkpoint as ocp
    from etils import epath

    try:
        metadata = ocp.PyTreeCheckpointHandler().metadata(epath.Path(directory))
        tree = getattr(metadata, "tree", metadata)
        if not isinstance(tree, Mapping):
            raise CheckpointError("no tree in it")
        for path, array in _walk(tree, ()):
            name = path[:-1] if path[-1] == "value" else path
            yield name, (path, tuple(array.shape), str(np.dtype(array.dtype)))
    except Exception as error:  # Orbax and what parses its JSON raise anything
        raise CheckpointError(f"{directory}: not a whole Orbax tree ({_line(error)})") from error


def _walk(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        children: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    else:
        if not hasattr(tree, "shape"):
            raise CheckpointError(f"{'.'.join(path)} is {short(tree)}, no array")
        yield path, tree
        return
    for key, child in children:
        yield from _walk(child, (*path, str(key)))


def _line(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300]
