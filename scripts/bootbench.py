"""What a boot costs: common deployments priced by arithmetic, and with --measure a real one.

python scripts/bootbench.py [--csv PATH] [--measure [--measured-csv PATH] [flags of serve.py]]

--measure boots a server twice, each time in a new process: cold, with an empty compile cache, and
warm, with the cache the cold boot left. Both find the weights' file as the system has it.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from server_process import ServerDied, serving

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
# What a boot does to have its executables. "plan" is part of it: on a GPU the workspace that the
# pool leaves room for comes from compiling the largest steps. Writing the cache ("store") is not:
# it would only make the cold boot look slower.
COMPILE_PHASES = ("plan", "trace", "compile", "load")
MEASURED_HEADER = ("phase", "cold s", "warm s", "warm / cold")


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


@dataclass(frozen=True)
class MeasuredBoots:
    """Seconds by phase of two boots of one server, from exec to ready, in the order they come."""

    cold: Mapping[str, float]
    warm: Mapping[str, float]

    @property
    def compile_seconds(self) -> tuple[float, float]:
        """What COMPILE_PHASES took, cold and warm."""
        cold, warm = (sum(b.get(p, 0.0) for p in COMPILE_PHASES) for b in (self.cold, self.warm))
        return cold, warm

    @property
    def compile_ratio(self) -> float:
        """The warm boot's compile phases as a share of the cold one's."""
        cold, warm = self.compile_seconds
        return warm / cold

    def table(self) -> list[tuple[str, ...]]:
        """Lines under MEASURED_HEADER: every phase, the compile phases together, and all of it."""
        rows = [(phase, s, self.warm.get(phase, 0.0)) for phase, s in self.cold.items()]
        rows.append(("+".join(COMPILE_PHASES), *self.compile_seconds))
        rows.append(("exec to ready", sum(self.cold.values()), sum(self.warm.values())))
        return [
            (phase, f"{cold:.2f}", f"{warm:.2f}", f"{warm / cold:.1%}" if cold else "-")
            for phase, cold, warm in rows
        ]

    def records(self) -> list[dict[str, str | float]]:
        """The CSV's lines: boot, phase, seconds."""
        return [
            {"boot": boot, "phase": phase, "seconds": seconds}
            for boot, phases in (("cold", self.cold), ("warm", self.warm))
            for phase, seconds in phases.items()
        ]


def measure(flags: Sequence[str], report: Callable[[str], None]) -> MeasuredBoots:
    """Boot `serve.py flags` twice over one compile cache that starts empty. Raises ServerDied."""
    with tempfile.TemporaryDirectory(prefix="bootbench-") as cache:
        cached = [*flags, "--compile-cache-dir", cache]
        boots = []
        for name in ("cold", "warm"):
            with serving(cached, report=lambda line, name=name: report(f"{name}: {line}")) as it:
                boots.append(it.health()["boot_seconds"])
    return MeasuredBoots(*boots)


def _write_csv(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, write the CSVs asked for; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="What a boot costs, by arithmetic; with --measure also by the clock.",
        epilog="with --measure every other flag goes to serve.py",
        allow_abbrev=False,
    )
    parser.add_argument("--csv", type=Path, metavar="PATH", help="also write the priced figures")
    parser.add_argument("--measure", action="store_true", help="boot a server, cold and warm")
    parser.add_argument("--measured-csv", type=Path, metavar="PATH", help="and write its seconds")
    args, flags = parser.parse_known_args(argv)
    if flags and not args.measure:
        parser.error(f"{flags[0]}: add --measure, whose server gets the flags unknown here")
    deployments = [price(slots, context) for slots, context in DEPLOYMENTS]
    print(
        f"what a deployment asks for, against a limit of {DEFAULT_CAPTURE_LIMIT} "
        f"({NUM_HEADS} heads, {MILLISECONDS_PER_SHAPE} ms a shape, 1 MB = 2^20 bytes):"
    )
    print(format_table(WANTED_HEADER, [wanted_row(d) for d in deployments]))
    print("\nand the other side of that trim, per request generating to the full context:")
    print(format_table(TRIM_HEADER, [trim_row(d) for d in deployments]))
    if args.csv is not None:
        _write_csv(args.csv, [asdict(d) for d in deployments])
    if not args.measure:
        return 0
    try:
        boots = measure(flags, lambda line: print(line, file=sys.stderr, flush=True))
    except ServerDied as error:
        print(f"bootbench.py: {error}", file=sys.stderr)
        return 1
    print(f"\nmeasured, serve.py {' '.join(flags) or 'without flags'}, each boot a new process:")
    print(format_table(MEASURED_HEADER, boots.table()))
    print(f"the warm boot's compile phases take {boots.compile_ratio:.3f} of the cold boot's")
    if args.measured_csv is not None:
        _write_csv(args.measured_csv, boots.records())
    return 0


if __name__ == "__main__":
    sys.exit(main())
