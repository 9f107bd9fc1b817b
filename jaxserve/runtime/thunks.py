"""Count what a compiled GPU step launches, from the list of thunks that XLA prints."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_THUNK = re.compile(r"^( *)\d+: (k\w+)")
_LOOPS = {"kWhile"}
_BRANCHES = {"kConditional"}
# They hold other thunks or wait for them, and launch nothing themselves.
_SILENT = {
    *_LOOPS,
    *_BRANCHES,
    "kSequential",
    "kCommandBuffer",
    "kDynamicSliceFusion",
    "kAsyncStart",
    "kAsyncDone",
    "kWaitForStreams",
}
_KERNEL = re.compile(
    r"^ *\d+: kCustomKernel +\[[^\]]*\] (\S+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]"
    r"(?: +shared_memory: (\d+) bytes)?",
    re.MULTILINE,
)


@dataclass(frozen=True)
class KernelLaunch:
    """How one kernel is started; ``dynamic_shared_bytes`` is what the launch asks for a program."""

    name: str
    grid: tuple[int, ...]
    threads: int
    dynamic_shared_bytes: int


@dataclass(frozen=True)
class Launches:
    """Kernels and copies started once a step, on every turn of a loop, and in conditionals."""

    once: int
    in_loops: int
    in_branches: int


def count_launches(thunk_sequence: str) -> Launches:
    """Count ``*.thunk_sequence.txt``, one thunk a line, nested ones indented under their holder."""
    once = in_loops = in_branches = 0
    holders: list[tuple[int, str]] = []
    for line in thunk_sequence.splitlines():
        match = _THUNK.match(line)
        if match is None:
            continue
        indent, kind = len(match[1]), match[2]
        while holders and holders[-1][0] >= indent:
            holders.pop()
        held_by = {holder for _, holder in holders}
        if kind in _SILENT:
            holders.append((indent, kind))
        elif held_by & _BRANCHES:
            in_branches += 1
        elif held_by & _LOOPS:
            in_loops += 1
        else:
            once += 1
    return Launches(once, in_loops, in_branches)


def kernel_launches(thunk_sequence: str) -> tuple[KernelLaunch, ...]:
    """The kernels of a ``*.thunk_sequence.txt`` in its order, without library calls and copies."""
    return tuple(
        KernelLaunch(name, tuple(_numbers(grid)), math.prod(_numbers(threads)), int(shared or 0))
        for name, grid, threads, shared in _KERNEL.findall(thunk_sequence)
    )


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
