"""The default model for tests marked ``demo``: fetched once into the user's cache."""

from functools import cache
from pathlib import Path

import pytest

from jaxserve.checkpoint.demo import fetch_demo
from jaxserve.errors import CheckpointError


@cache
def _fetched() -> Path | CheckpointError:
    try:
        return fetch_demo()
    except CheckpointError as error:
        return error


def demo_path() -> Path:
    """The GGUF file; skips the calling test, saying why, where it cannot be had."""
    found = _fetched()
    if isinstance(found, CheckpointError):
        pytest.skip(f"NOT CHECKED, the default model is unreachable: {found}")
    return found
