"""The header of a GGUF file, read without trusting a single count in it.

The ``gguf`` package's reader builds an array per string (seconds for a vocabulary of 100,000) and
believes the counts it reads; its dequantisation is what this project uses of it. Layout:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxserve.checkpoint.values import short
from jaxserve.errors import CheckpointError, UnsupportedModel

TENSOR_TYPES = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)
_MOST_DIMS = 4  # GGML_MAX_DIMS
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies; ``shape`` is numpy's order, rows first, so matrices are [out, in]."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


class _Cursor:
    """Reads forward through the file and never past its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def need(self, count: int, size: int, what: str) -> None:
        """Raise unless ``count`` things of at least ``size`` bytes can still follow."""
        left = len(self.data) - self.at
        if count * size > left:
            raise CheckpointError(
                f"{self.path}: {what} would take {count * size} bytes, {left} are left in the file"
            )

    def scalar(self, form: str, what: str) -> Any:
        size = struct.calcsize(form)
        self.need(1, size, what)
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return value

    def string(self, what: str) -> str:
        length = self.scalar("<Q", what)
        self.need(length, 1, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: {what} has the unknown value type {kind}")
        item, count = self.scalar("<I", what), self.scalar("<Q", what)
        if item in _SCALARS:
            form = np.dtype(_SCALARS[item])
            self.need(count, form.itemsize, what)
            values = np.frombuffer(self.data, form, count, self.at).tolist()
            self.at += count * form.itemsize
            return values
        if item != _STRING:  # arrays of arrays: nothing this engine reads
            raise CheckpointError(f"{self.path}: {what} is an array of value type {item}")
        self.need(count, 8, what)
        return [self.string(what) for _ in range(count)]


class GGUFFile:
    """``metadata`` by key and ``tensors`` by the file's own names; data stays on disk."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when the file is not whole and sound."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise CheckpointError(f"{path}: {error}") from error
        cursor = _Cursor(self._data, path)
        if self._data[:4] != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file (it starts with {self._data[:4]!r})")
        cursor.at = 4
        version = cursor.scalar("<I", "version")
        if version not in (2, 3):
            raise UnsupportedModel(
                f"{path}: GGUF version {version}; little-endian versions 2 and 3 are supported"
            )
        tensor_count = cursor.scalar("<Q", "tensor count")
        entry_count = cursor.scalar("<Q", "metadata count")
        self.metadata = self._read_metadata(cursor, entry_count)
        self.tensors = self._read_tensors(cursor, tensor_count)

    def _read_metadata(self, cursor: _Cursor, count: int) -> dict[str, Any]:
        cursor.need(count, 8 + 4 + 1, f"a metadata count of {count}")
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = cursor.string("a metadata key")
            metadata[key] = cursor.value(cursor.scalar("<I", short(key)), short(key))
        return metadata

    def _read_tensors(self, cursor: _Cursor, count: int) -> dict[str, GGUFTensor]:
        cursor.need(count, 8 + 4 + 4 + 8, f"a tensor count of {count}")
        infos = []
        for _ in range(count):
            name = cursor.string("a tensor name")
            dims = cursor.scalar("<I", name)
            if not 1 <= dims <= _MOST_DIMS:
                raise CheckpointError(f"{self.path}: tensor {short(name)} has {dims} dimensions")
            shape = tuple(cursor.scalar("<Q", name) for _ in range(dims))[::-1]
            infos.append((name, shape, cursor.scalar("<I", name), cursor.scalar("<Q", name)))

        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self.path}: general.alignment={short(alignment)}, must be a power of two"
            )
        start = -(-cursor.at // alignment) * alignment
        return {
            name: self._locate(name, shape, kind, start + offset)
            for name, shape, kind, offset in infos
        }

    def _locate(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        known = {t.value for t in GGMLQuantizationType}
        label = GGMLQuantizationType(kind).name if kind in known else f"type {kind}"
        if label not in TENSOR_TYPES:
            raise UnsupportedModel(
                f"{self.path}: tensor {short(name)} is {label}; supported: "
                f"{', '.join(TENSOR_TYPES)}"
            )
        tensor_type = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[tensor_type]
        if min(shape) < 1 or shape[-1] % block:
            raise CheckpointError(
                f"{self.path}: tensor {short(name)} has shape {list(shape)}; rows of {label} are "
                f"multiples of {block}"
            )
        nbytes = math.prod(shape) // block * block_bytes
        if offset + nbytes > len(self._data):
            raise CheckpointError(
                f"{self.path}: tensor {short(name)} ends at byte {offset + nbytes}, the file has "
                f"{len(self._data)}; is it whole?"
            )
        return GGUFTensor(shape, tensor_type, offset, nbytes)

    def load(self, name: str) -> np.ndarray:
        """The tensor as float32, or as float16 or bfloat16 where it is stored so."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.offset)
        if tensor.type == GGMLQuantizationType.F16:
            return raw.view(np.float16).reshape(tensor.shape)
        if tensor.type == GGMLQuantizationType.BF16:
            return raw.view(ml_dtypes.bfloat16).reshape(tensor.shape)
        rows = raw.reshape(*tensor.shape[:-1], -1)
        return dequantize(rows, tensor.type).reshape(tensor.shape)
