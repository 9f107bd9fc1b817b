"""Price the capture list of both attention reads, by arithmetic, and what the width axis costs.

python scripts/widthbench.py [--csv PATH]
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxserve.plan.buckets import DecodeBuckets
from jaxserve.plan.capture import shared_pool_bytes
from jaxserve.plan.report import format_table
from jaxserve.plan.units import MIB

NUM_HEADS = 32
TILE = 32
MILLISECONDS_PER_SHAPE = 50  # a stated price, not a measured one
# A capture runs its read once; nanoserve's streamed read ran in Python and took
# 19.2 ms where the rectangle took 6.6. A compiled read has another figure: measure it.
STREAMED_CAPTURE_PENALTY = 2.9
# nanoserve's table does not state its traffic. This one is plain and gives the same two figures:
# three requests side by side, from a prompt of 20 tokens to a context of 1024.
TRAFFIC_ROWS = 3
TRAFFIC_CONTEXTS = range(20, 1024 + 1)
DEPLOYMENTS = ((8, 2048), (8, 4096), (16, 8192), (32, 4096), (64, 8192), (256, 8192))

LIST_HEADER = ("slots", "context", "read", "rows x widths", "shapes", "startup", "arena", "waste")
RATIO_HEADER = ("slots", "context", "shapes", "startup", "arena")


@dataclass(frozen=True, kw_only=True)
class CaptureList:
    """The whole list of one cache under one read; seconds, bytes, and a share for ``waste``."""

    slots: int
    context: int
    read: str
    row_buckets: int
    width_buckets: int
    shapes: int
    startup_seconds: float
    arena_bytes: int
    waste: float


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """How many times the rectangle's figure is the streamed one's, each its own statement.

    ``shapes`` is about the list. ``arena`` is width / tile at the widest shape and would hold for a
    list of one. ``startup`` is ``shapes`` less what a capture of the streamed read costs more.
    """

    shapes: float
    startup: float
    arena: float


def traffic_waste(buckets: DecodeBuckets, rows: int, contexts: Iterable[int]) -> float:
    """Padded cells as a share of computed ones, over a decode step at each of ``contexts``."""
    padded = cells = 0
    for context in contexts:
        padded += buckets.padded_cells(rows, context)
        cells += buckets.cells_for(rows, context)
    return padded / cells


def price(slots: int, context: int, tile: int | None) -> CaptureList:
    """The list of ``slots`` rows of ``context`` tokens; ``tile`` None is the rectangle read."""
    streamed = tile is not None
    buckets = DecodeBuckets(max_num_seqs=slots, max_model_len=context, streamed=streamed, tile=tile)
    milliseconds = MILLISECONDS_PER_SHAPE * (STREAMED_CAPTURE_PENALTY if streamed else 1)
    return CaptureList(
        slots=slots,
        context=context,
        read="streamed" if streamed else "rectangle",
        row_buckets=len(buckets.rows),
        width_buckets=len(buckets.widths),
        shapes=buckets.count,
        startup_seconds=buckets.count * milliseconds / 1000,
        arena_bytes=shared_pool_bytes(buckets.shapes, NUM_HEADS, tile),
        waste=traffic_waste(buckets, TRAFFIC_ROWS, TRAFFIC_CONTEXTS),
    )


def ratios(rectangle: CaptureList, streamed: CaptureList) -> Ratios:
    """Divide the unrounded figures of two lists of one cache."""
    return Ratios(
        shapes=rectangle.shapes / streamed.shapes,
        startup=rectangle.startup_seconds / streamed.startup_seconds,
        arena=rectangle.arena_bytes / streamed.arena_bytes,
    )


def list_row(c: CaptureList) -> tuple[str, ...]:
    """A line under LIST_HEADER."""
    return (
        str(c.slots),
        str(c.context),
        c.read,
        f"{c.row_buckets} x {c.width_buckets}",
        str(c.shapes),
        f"{c.startup_seconds:.2f}s",
        f"{c.arena_bytes / MIB:.2f} MiB",
        f"{c.waste:.1%}",
    )


def ratio_row(slots: int, context: int, r: Ratios) -> tuple[str, ...]:
    """A line under RATIO_HEADER."""
    return (str(slots), str(context), f"{r.shapes:.0f}x", f"{r.startup:.0f}x", f"{r.arena:.0f}x")


def main(argv: Sequence[str] | None = None) -> None:
    """Print both tables; with --csv, write the figures, one line a cache and read.

    The CSV's last three columns are the rectangle's figure over the line's own.
    """
    parser = argparse.ArgumentParser(description="Price the capture list of both attention reads.")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="also write the figures here")
    args = parser.parse_args(argv)
    pairs = [(price(s, c, None), price(s, c, TILE)) for s, c in DEPLOYMENTS]
    print(
        f"the capture list for one cache, both reads, {NUM_HEADS} heads, fp32 scores, {TILE}-key "
        f"tiles;\n{MILLISECONDS_PER_SHAPE} ms a shape, {STREAMED_CAPTURE_PENALTY} times that "
        f"streamed; waste over {TRAFFIC_ROWS} rows at contexts {TRAFFIC_CONTEXTS[0]} to "
        f"{TRAFFIC_CONTEXTS[-1]}:"
    )
    print(format_table(LIST_HEADER, [list_row(c) for pair in pairs for c in pair]))
    print("\nwhat the axis was costing, per deployment:")
    rows = [ratio_row(r.slots, r.context, ratios(r, s)) for r, s in pairs]
    print(format_table(RATIO_HEADER, rows))
    if args.csv is not None:
        _write_csv(args.csv, pairs)


def _write_csv(path: Path, pairs: Sequence[tuple[CaptureList, CaptureList]]) -> None:
    records = [
        asdict(c) | {f"{name}_ratio": value for name, value in asdict(ratios(pair[0], c)).items()}
        for pair in pairs
        for c in pair
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


if __name__ == "__main__":
    main()
