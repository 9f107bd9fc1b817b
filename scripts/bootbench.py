"""Price the capture list of common deployments, by arithmetic: what is wanted, kept and trimmed.

python scripts/bootbench.py [--csv PATH]
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxserve.plan.buckets import DecodeBuckets
from jaxserve.plan.capture import DEFAULT_CAPTURE_LIMIT, plan_capture
from jaxserve.plan.report import format_table
from jaxserve.plan.units import MIB

NUM_HEADS = 32
MILLISECONDS_PER_SHAPE = 50  # a stated price, not a measured one
DEPLOYMENTS = (
    (8, 2048),
    (8, 4096),
    (16, 2048),
    (16, 8192),
    (32, 4096),
    (64, 8192),
    (256, 8192),
)

WANTED_HEADER = (
    "slots",
    "context",
    "rows x widths",
    "wanted",
    "over",
    "ceiling",
    "kept",
    "startup",
    "arena",
)
TRIM_HEADER = (
    "slots",
    "context",
    "ceiling",
    "lazy captures",
    "in a client's latency",
    "saved at startup",
)


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One deployment's list on the rectangle read; the CSV's columns, seconds and bytes.

    ``over`` counts the shapes past the limit. ``lazy_captures`` are the widths left out: a request
    that generates to the full context meets each once and waits for it.
    """

    slots: int
    context: int
    row_buckets: int
    width_buckets: int
    wanted: int
    over: int
    ceiling: int
    kept: int
    startup_seconds: float
    arena_bytes: int
    lazy_captures: int
    client_latency_seconds: float
    saved_startup_seconds: float


def price(slots: int, context: int, limit: int = DEFAULT_CAPTURE_LIMIT) -> Deployment:
    """Plan the list of ``slots`` rows of ``context`` tokens under ``limit`` executables."""
    buckets = DecodeBuckets(max_num_seqs=slots, max_model_len=context)
    plan = plan_capture(buckets, num_heads=NUM_HEADS, limit=limit)
    lazy = sum(width > plan.max_width for width in buckets.widths)
    return Deployment(
        slots=slots,
        context=context,
        row_buckets=len(buckets.rows),
        width_buckets=len(buckets.widths),
        wanted=plan.full_count,
        over=max(0, plan.full_count - limit),
        ceiling=plan.max_width,
        kept=plan.count,
        startup_seconds=plan.count * MILLISECONDS_PER_SHAPE / 1000,
        arena_bytes=plan.pool_bytes,
        lazy_captures=lazy,
        client_latency_seconds=lazy * MILLISECONDS_PER_SHAPE / 1000,
        saved_startup_seconds=plan.trimmed * MILLISECONDS_PER_SHAPE / 1000,
    )


def wanted_row(d: Deployment) -> tuple[str, ...]:
    """A line under WANTED_HEADER; a star marks a list over the limit."""
    return (
        str(d.slots),
        str(d.context),
        f"{d.row_buckets} x {d.width_buckets}",
        str(d.wanted),
        f"{d.over}*" if d.over else "0",
        str(d.ceiling),
        str(d.kept),
        f"{d.startup_seconds:.2f}s",
        f"{d.arena_bytes / MIB:.1f} MB",
    )


def trim_row(d: Deployment) -> tuple[str, ...]:
    """A line under TRIM_HEADER."""
    return (
        str(d.slots),
        str(d.context),
        str(d.ceiling),
        str(d.lazy_captures),
        f"{d.client_latency_seconds:.2f}s",
        f"{d.saved_startup_seconds:.2f}s",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print both tables; with --csv, write their figures, one line a deployment."""
    parser = argparse.ArgumentParser(description="Price the capture list of common deployments.")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="also write the figures here")
    args = parser.parse_args(argv)
    deployments = [price(slots, context) for slots, context in DEPLOYMENTS]
    print(
        f"what a deployment asks for, against a limit of {DEFAULT_CAPTURE_LIMIT} "
        f"({NUM_HEADS} heads, {MILLISECONDS_PER_SHAPE} ms a shape, 1 MB = 2^20 bytes):"
    )
    print(format_table(WANTED_HEADER, [wanted_row(d) for d in deployments]))
    print("\nand the other side of that trim, per request generating to the full context:")
    print(format_table(TRIM_HEADER, [trim_row(d) for d in deployments]))
    if args.csv is not None:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(deployments[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(d) for d in deployments)


if __name__ == "__main__":
    main()
