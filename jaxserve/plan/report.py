"""What a boot says of its two sizing decisions, to operators and to /health."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxserve.errors import EngineError
from jaxserve.plan.buckets import DecodeShape
from jaxserve.plan.capture import CapturePlan
from jaxserve.plan.gates import (
    DecodeRead,
    check_all_shapes_captured,
    check_replays_dominate,
)
from jaxserve.plan.pool import KVPoolPlan


def boot_info(
    pool: KVPoolPlan, capture: CapturePlan, ready: Collection[DecodeShape]
) -> dict[str, Any]:
    """The /health payload: the decisions nested under ``pool`` and ``capture``.

    Nested, because flattened ``max_width`` would sit beside ``max_model_len`` and look derived from
    it: one is a ceiling of memory, the other a promise to callers. ``ready`` are the shapes that
    have an executable; ``warm`` is true when that is every planned one.
    """
    warm = sum(s in ready for s in capture.shapes)
    return {
        "pool": pool.as_dict(),
        "capture": capture.as_dict() | {"ready": warm, "warm": warm == capture.count},
    }


def loop_info(
    capture: CapturePlan,
    read: DecodeRead,
    *,
    captured: Collection[DecodeShape],
    late: Collection[DecodeShape],
    replays: Mapping[DecodeShape, int],
    padded_rows: int,
    padded_cells: int,
) -> dict[str, Any]:
    """What the loop has done since the boot, for the ``capture`` section of /health.

    ``captured`` are the planned shapes with an executable, ``late`` those compiled after the boot,
    ``replays`` the decode steps run at each shape. A *fall-through* is a step outside the list that
    compiled nothing. ``checks`` asks the two questions only a running process can answer: each is
    "ok" or says what is wrong.
    """
    planned = frozenset(capture.shapes)
    inside = sum(steps for shape, steps in replays.items() if shape in planned)
    outside = sum(replays.values()) - inside
    fall_throughs = max(0, outside - len(late))
    return {
        "read": read.name,
        "replays": {f"{s.rows}x{s.width}": n for s, n in sorted(replays.items())},
        "late_compiles": [f"{s.rows}x{s.width}" for s in late],
        "fall_throughs": fall_throughs,
        "padded_rows": padded_rows,
        "padded_cells": padded_cells,
        "checks": {
            "all_shapes_captured": _answer(lambda: check_all_shapes_captured(capture, captured)),
            "replays_dominate": _answer(
                lambda: check_replays_dominate(
                    replays=inside, late_compiles=len(late), fall_throughs=fall_throughs
                )
            ),
        },
    }


def _answer(check: Callable[[], None]) -> str:
    try:
        check()
    except EngineError as error:
        return str(error)
    return "ok"


def boot_lines(pool: KVPoolPlan, capture: CapturePlan | None) -> list[str]:
    """One line for the pool and one for the list, which names who bound its width."""
    if capture is None:
        return [pool.describe(), "capture list: none, each step is compiled when it is first met"]
    return [pool.describe(), capture.describe()]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text columns, right-aligned under their heads."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = (
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in (header, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)
