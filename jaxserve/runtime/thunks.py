"""List and count what a compiled GPU step launches, from the thunks that XLA prints."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_THUNK = re.compile(r"^( *)(\d+): (k\w+) *(?:\[[^\]]*\])? *(\S*)(.*)$")
_SHAPE = re.compile(
    r"^ grid: \[([\d, ]+)\] threads: \[([\d, ]+)\](?: +shared_memory: (\d+) bytes)?"
)
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


@dataclass(frozen=True)
class Launch:
    """A kernel, a library call or a copy, started once a step, on turns of a loop or in a branch.

    ``number`` is the thunk's. ``grid``, ``threads`` and ``dynamic_shared_bytes``, which the launch
    asks for each program, are a kernel's; empty and 0 for the others.
    """

    number: int
    kind: str
    name: str
    where: Literal["once", "loop", "branch"]
    grid: tuple[int, ...] = ()
    threads: int = 0
    dynamic_shared_bytes: int = 0


@dataclass(frozen=True)
class Launches:
    """Kernels and copies started once a step, on every turn of a loop, and in conditionals."""

    once: int
    in_loops: int
    in_branches: int


def list_launches(thunk_sequence: str) -> Iterator[Launch]:
    """Read ``*.thunk_sequence.txt``, one thunk a line, nested ones indented under their holder."""
    holders: list[tuple[int, str]] = []
    for line in thunk_sequence.splitlines():
        match = _THUNK.match(line)
        if match is None:
            continue
        indent, kind = len(match[1]), match[3]
        while holders and holders[-1][0] >= indent:
            holders.pop()
        if kind in _SILENT:
            holders.append((indent, kind))
            continue
        held_by = {holder for _, holder in holders}
        where = "branch" if held_by & _BRANCHES else "loop" if held_by & _LOOPS else "once"
        shape = _SHAPE.match(match[5])
        if shape is None:
            yield Launch(int(match[2]), kind, match[4], where)
            continue
        grid, threads = (tuple(int(n) for n in side.split(",")) for side in shape.group(1, 2))
        shared = int(shape[3] or 0)
        yield Launch(int(match[2]), kind, match[4], where, grid, math.prod(threads), shared)


def count_launches(thunk_sequence: str) -> Launches:
    """Count ``*.thunk_sequence.txt``."""
    count = Counter(launch.where for launch in list_launches(thunk_sequence))
    return Launches(count["once"], count["loop"], count["branch"])
