"""Where the seconds of a boot went, from the start of the process to ready."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from jaxserve.plan.units import format_seconds


class Laps:
    """Seconds by phase, with no second left out: each lap starts where the last one ended."""

    def __init__(self, elapsed: Mapping[str, float] | None = None) -> None:
        self.seconds: dict[str, float] = dict(elapsed or {})
        self._mark = time.perf_counter()

    def lap(self, *shares: tuple[str, float]) -> None:
        """The time since the last lap, split over phases in proportion to the numbers given."""
        now = time.perf_counter()
        whole = sum(share for _, share in shares)
        for phase, share in shares:
            part = share / whole if whole else 1 / len(shares)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + part * (now - self._mark)
        self._mark = now


def seconds_since_start() -> float:
    """How long ago this process was started, from the kernel; else its processor time.

    The start is the fork. What the process was before its exec counts too: a shell that execs the
    server as its last command adds its own seconds. The kernel keeps no time of an exec.
    """
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.process_time()


def boot_seconds_line(seconds: Mapping[str, float]) -> str:
    """Where the time from process start to ready went, one line."""
    parts = ", ".join(f"{phase} {format_seconds(s)}" for phase, s in seconds.items())
    return f"booted in {format_seconds(sum(seconds.values()))}: {parts}"
