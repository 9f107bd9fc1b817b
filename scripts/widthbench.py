"""What the width axis costs: both reads' capture lists by arithmetic, with --measure also compiled.

python scripts/widthbench.py [--csv PATH] [--measure [--measured-csv PATH]]

--measure boots a tiny model on both reads. Its seconds are of this machine; the modelled ones have
a stated price a shape. Both print three ratios, and each is a statement of its own.
"""

from __future__ import annotations

import argparse
import csv
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from jaxserve.boot import build_engine
from jaxserve.checkpoint import Checkpoint
from jaxserve.config import BootConfig, EngineConfig, ModelConfig
from jaxserve.plan.buckets import DecodeBuckets
from jaxserve.plan.capture import shared_pool_bytes
from jaxserve.plan.report import format_table
from jaxserve.plan.units import MIB, format_bytes
from jaxserve.runtime.executables import Built, Lower, record

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

# What --measure boots. Its temporaries beside the scores are small, and its rectangle list is
# exactly as long as an engine's list may be.
TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
MEASURED_SLOTS, MEASURED_CONTEXT = 8, 2048
MEASURED_HEADER = (
    "read",
    "shapes",
    "trace s",
    "compile s",
    "first run s",
    "startup s",
    "ms a shape",
    "arena modelled",
    "temp of widest",
)


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


@dataclass(frozen=True, kw_only=True)
class MeasuredList:
    """The decode shapes of one boot, compiled one at a time and run once each.

    Seconds are sums over the shapes. ``temp_bytes`` is what the compiler reserves for the widest
    shape, beside the scores also every other temporary; ``modelled_arena_bytes`` is the scores.
    """

    slots: int
    context: int
    read: str
    tile: int | None
    shapes: int
    trace_seconds: float
    compile_seconds: float
    run_seconds: float
    modelled_arena_bytes: int
    temp_bytes: int

    @property
    def startup_seconds(self) -> float:
        """What the list adds to a boot on one core."""
        return self.trace_seconds + self.compile_seconds + self.run_seconds


def measure(
    read: Literal["rectangle", "streamed"],
    slots: int,
    context: int,
    report: Callable[[str], None] = lambda line: None,
) -> MeasuredList:
    """Boot TINY with ``slots`` rows of ``context`` tokens on one read, without a compile cache."""
    one_at_a_time = threading.Lock()  # so that a shape's seconds are its own

    def recorder(name: str, lower: Lower) -> Built:
        with one_at_a_time:
            return record(name, lower)

    config = EngineConfig(
        max_num_seqs=slots,
        max_model_len=context,
        max_num_batched_tokens=max(32, slots),
        attention_backend=read,
    )
    booted = build_engine(
        Checkpoint(name="tiny", config=TINY, tokenizer=None, tensors=None),
        config,
        BootConfig(warm=False),
        capture_recorder=recorder,
        report=report,
    )
    assert booted.capture is not None
    decode = booted.executables.decode
    start = time.perf_counter()
    for shape in decode:
        booted.runner.decode(shape, np.zeros(shape.rows, np.int32)).read()
    run_seconds = time.perf_counter() - start
    return MeasuredList(
        slots=slots,
        context=context,
        read=read,
        tile=booted.capture.tile,
        shapes=len(decode),
        trace_seconds=sum(built.trace_s for built in decode.values()),
        compile_seconds=sum(built.compile_s for built in decode.values()),
        run_seconds=run_seconds,
        modelled_arena_bytes=booted.capture.pool_bytes,
        temp_bytes=decode[booted.capture.widest].temp_bytes,
    )


def measured_ratios(rectangle: MeasuredList, streamed: MeasuredList) -> Ratios:
    """The three ratios of two boots; the arena's is between the compiler's figures."""
    return Ratios(
        shapes=rectangle.shapes / streamed.shapes,
        startup=rectangle.startup_seconds / streamed.startup_seconds,
        arena=rectangle.temp_bytes / streamed.temp_bytes,
    )


def measured_row(m: MeasuredList) -> tuple[str, ...]:
    """A line under MEASURED_HEADER."""
    return (
        m.read if m.tile is None else f"{m.read}, {m.tile}-key tiles",
        str(m.shapes),
        f"{m.trace_seconds:.2f}",
        f"{m.compile_seconds:.2f}",
        f"{m.run_seconds:.2f}",
        f"{m.startup_seconds:.2f}",
        f"{1e3 * m.startup_seconds / m.shapes:.0f}",
        format_bytes(m.modelled_arena_bytes),
        format_bytes(m.temp_bytes),
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


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, write the CSVs asked for; returns the exit code.

    A CSV has one line a cache and read; its last three columns are the rectangle's figure over the
    line's own.
    """
    parser = argparse.ArgumentParser(description="Price the capture list of both attention reads.")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="also write the priced figures")
    parser.add_argument("--measure", action="store_true", help="boot a tiny model on both reads")
    parser.add_argument("--measured-csv", type=Path, metavar="PATH", help="and write its figures")
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
        _write_csv(
            args.csv, [asdict(c) | _ratio_columns(ratios(p[0], c)) for p in pairs for c in p]
        )
    if args.measure:
        _measure_both(args.measured_csv)
    return 0


def _measure_both(path: Path | None) -> None:
    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    rectangle = measure("rectangle", MEASURED_SLOTS, MEASURED_CONTEXT, report)
    streamed = measure("streamed", MEASURED_SLOTS, MEASURED_CONTEXT, report)
    measured = (rectangle, streamed)
    print(
        f"\nmeasured, {TINY.num_layers} layers of {TINY.num_heads} heads, {MEASURED_SLOTS} slots "
        f"of {MEASURED_CONTEXT} tokens, one shape at a time:"
    )
    print(format_table(MEASURED_HEADER, [measured_row(m) for m in measured]))
    print("\nwhat the axis was costing, measured:")
    r = measured_ratios(rectangle, streamed)
    shown = (f"{r.shapes:.1f}x", f"{r.startup:.1f}x", f"{r.arena:.0f}x")
    print(format_table(RATIO_HEADER, [(str(MEASURED_SLOTS), str(MEASURED_CONTEXT), *shown)]))
    if path is not None:
        records = [
            asdict(m)
            | {"startup_seconds": m.startup_seconds}
            | _ratio_columns(measured_ratios(rectangle, m))
            for m in measured
        ]
        _write_csv(path, records)


def _ratio_columns(r: Ratios) -> dict[str, float]:
    return {f"{name}_ratio": value for name, value in asdict(r).items()}


def _write_csv(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


if __name__ == "__main__":
    sys.exit(main())
