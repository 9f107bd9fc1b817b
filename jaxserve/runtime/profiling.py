"""A profile of this process, taken between two calls."""

from __future__ import annotations

import tempfile
import threading

import jax

from jaxserve.errors import InvalidRequest


class Profiler:
    """At most one profile at a time, each into a new temporary directory."""

    def __init__(self) -> None:
        self._directory: str | None = None
        self._lock = threading.Lock()

    def start(self) -> str:
        """The directory that ``stop`` will fill. Raises InvalidRequest while one is taken."""
        with self._lock:
            if self._directory is not None:
                raise InvalidRequest(f"a profile is being taken into {self._directory}")
            directory = tempfile.mkdtemp(prefix="jaxserve-profile-")
            jax.profiler.start_trace(directory)
            self._directory = directory
            return directory

    def stop(self) -> str:
        """Writes the profile; its directory, for XProf or Perfetto. Raises InvalidRequest."""
        with self._lock:
            if self._directory is None:
                raise InvalidRequest("no profile is being taken; POST /start_profile first")
            directory, self._directory = self._directory, None
            jax.profiler.stop_trace()
            return directory
