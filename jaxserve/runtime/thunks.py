"""Count what a compiled GPU step launches, from the list of thunks that XLA prints."""

from __future__ import annotations

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
