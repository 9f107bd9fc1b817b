"""What a boot says of its two sizing decisions, to operators and to /health."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import EngineError
from jaxserve.plan.buckets import DecodeShape
from jaxserve.plan.capture import CapturePlan, streamed_score_cells
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


@dataclass(frozen=True)
class PagedRead:
    """What the decode reads so far were charged and what they held, in scores of one query head.

    A call is charged its whole rectangle (rows x width) and holds ``streamed_score_cells`` a row,
    or the rectangle itself without a tile.
    """

    calls: int
    score_cells: int
    held_cells: int
    tile: int | None

    @classmethod
    def of(cls, read: DecodeRead, replays: Mapping[DecodeShape, int]) -> PagedRead:
        """The counters of a loop that ran ``replays`` decode steps at each shape."""

        def held(width: int) -> int:
            return width if read.tile is None else streamed_score_cells(read.tile, width)

        return cls(
            calls=sum(replays.values()),
            score_cells=sum(n * s.cells for s, n in replays.items()),
            held_cells=sum(n * s.rows * held(s.width) for s, n in replays.items()),
            tile=read.tile,
        )

    @property
    def saving(self) -> float:
        """``score_cells / held_cells``; 1 before the first call."""
        return self.score_cells / self.held_cells if self.held_cells else 1.0

    def as_dict(self) -> dict[str, Any]:
        """For /health, with the warning that belongs to the number."""
        note = "each call holds what it is charged"
        if self.tile is not None:
            note = (
                "a streamed list has one width, so this is that width over the tile however long "
                "the server has run; padded_cells is measured"
            )
        return {
            "calls": self.calls,
            "score_cells": self.score_cells,
            "held_cells": self.held_cells,
            "saving": self.saving,
            "note": note,
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
        "shapes": [f"{s.rows}x{s.width}" for s in capture.shapes],
        "replays": {f"{s.rows}x{s.width}": n for s, n in sorted(replays.items())},
        "late_compiles": [f"{s.rows}x{s.width}" for s in late],
        "fall_throughs": fall_throughs,
        "padded_rows": padded_rows,
        "padded_cells": padded_cells,
        "paged_read": PagedRead.of(read, replays).as_dict(),
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
