"""A profile is taken between two calls, one at a time, into a directory of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.runtime.profiling import Profiler


def test_a_profile_is_written_where_its_start_said_and_only_one_is_taken_at_a_time():
    profiler = Profiler()
    with pytest.raises(InvalidRequest, match="no profile"):
        profiler.stop()
    directory = profiler.start()
    try:
        with pytest.raises(InvalidRequest, match=directory):
            profiler.start()
        jnp.ones(8).sum().block_until_ready()
        assert profiler.stop() == directory
        assert [path for path in Path(directory).rglob("*") if path.is_file()]
        with pytest.raises(InvalidRequest, match="no profile"):
            profiler.stop()
    finally:
        shutil.rmtree(directory)
