"""Typed reading of a table somebody else wrote: every wrong value is one line naming its key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError

MOST = 2**31 - 1  # sizes are int32 on the device


class Values:
    """``raw`` with getters that check; null counts as absent. ``file`` is what errors name."""

    def __init__(self, raw: Mapping[str, Any], file: str) -> None:
        self.raw = raw
        self.file = file

    def _wrong(self, key: str, wanted: str) -> CheckpointError:
        if self.raw.get(key) is None:
            return CheckpointError(f"{self.file}: {key} is missing; it must be {wanted}")
        return CheckpointError(f"{self.file}: {key}={short(self.raw[key])}, must be {wanted}")

    def count(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST
    ) -> int:
        """An integer in [least, most]; required without a default."""
        value = self.raw.get(key)
        if value is None:
            value = default
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # some writers print 32768.0
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._wrong(key, f"an integer from {least} to {most}")
        return value

    def optional_count(self, key: str) -> int | None:
        """A positive integer, or None where the key is absent."""
        return None if self.raw.get(key) is None else self.count(key)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; required without a default."""
        value = self.raw.get(key)
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise self._wrong(key, "a number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number of at least 0, or None where the key is absent."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e30:
            raise self._wrong(key, "a number of at least 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """A string, or None where the key is absent."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as nothing, one integer or a list of them."""
        value = self.raw.get(key)
        value = [] if value is None else value if isinstance(value, list) else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i <= MOST for i in value):
            raise self._wrong(key, "a token id or a list of token ids")
        return tuple(value)


def load_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def short(value: Any) -> str:
    """The value as errors quote it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
