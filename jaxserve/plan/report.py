"""What a boot says of its two sizing decisions, to operators and to /health."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jaxserve.plan.buckets import DecodeShape
from jaxserve.plan.capture import CapturePlan
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


def boot_lines(pool: KVPoolPlan, capture: CapturePlan) -> list[str]:
    """One line for the pool and one for the list, which names who bound its width."""
    return [pool.describe(), capture.describe()]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text columns, right-aligned under their heads."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = (
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in (header, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)
