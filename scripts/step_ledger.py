"""What a whole decode step launches and holds on a GPU that is not here.

python scripts/step_ledger.py [--csv PATH] [--launches-csv PATH] [--check] [--workers N]

Compiles the decode step of a Llama-3.2-1B- and a Llama-3.1-8B-shaped model (specs only, bfloat16)
for an H200 at 1, 8, 64 and 256 rows, and writes a line a step and a line a launch of one layer.
--check compares with the files instead and exits 1 if a figure got worse.

Needs XLA's compiler for NVIDIA GPUs: pip install -e '.[cross]'.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from compile_child import run_child
from step_cases import MODELS, Launch, Step
from tqdm import tqdm

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LEDGER = BENCHMARKS / "step_ledger.csv"
LAUNCHES = BENCHMARKS / "step_launches.csv"
ROWS = (1, 8, 64, 256)
WORSE = 0.10  # the share by which the workspace may grow; launches may not grow at all


@dataclass(frozen=True)
class Measured:
    """A step and the launches of one of its layers."""

    step: Step
    launches: tuple[Launch, ...]


def measure(
    cases: Iterable[tuple[str, int]],
    workers: int,
    target: str = "h200",
    layers: int | None = None,
    progress: bool = False,
) -> list[Measured]:
    """Compile the steps (model, rows), ``workers`` at a time, each in a process of its own.

    ``layers`` None takes all of a model's. Raises RuntimeError.
    """
    jobs = [
        {
            "target": target,
            "name": name,
            "rows": rows,
            "layers": MODELS[name].num_layers if layers is None else layers,
        }
        for name, rows in cases
    ]
    with (
        ThreadPoolExecutor(workers) as threads,
        tqdm(total=len(jobs), unit="step", disable=None if progress else True) as bar,
    ):
        child = partial(run_child, "step_cases.py", done=bar.update)
        results = list(threads.map(lambda job: child([job])[0], jobs))
    return [
        Measured(Step(**r["step"]), tuple(Launch(**launch) for launch in r["launches"]))
        for r in results
    ]


def complaints(committed: Iterable[Step], fresh: Iterable[Step]) -> list[str]:
    """What a step does worse than it must, or than the committed ledger says.

    Workspace is compared between steps of as many layers.
    """
    before = {(s.target, s.model, s.rows): s for s in committed}
    return [
        f"{s.model} at {s.rows} rows on {s.target} (jax {s.jax}): {why}"
        for s in fresh
        for why in _worse(before.get((s.target, s.model, s.rows)), s)
    ]


def _worse(before: Step | None, now: Step) -> Iterator[str]:
    if now.copies:
        yield f"copies a weight or the pool: {now.copies}"
    if now.alias_bytes != now.donated_bytes:
        yield f"updates {now.alias_bytes} bytes in place of the {now.donated_bytes} it is given"
    if now.temp_bytes >= now.pool_array_bytes:
        yield (
            f"a workspace of {now.temp_bytes} bytes has room for a copy of a pool array of "
            f"{now.pool_array_bytes}"
        )
    if before is None:
        yield "is not in the ledger; run scripts/step_ledger.py"
        return
    if now.launches_per_layer > before.launches_per_layer:
        yield f"launches {now.launches_per_layer} a layer, was {before.launches_per_layer}"
    if before.layers != now.layers:
        return
    if now.launches > before.launches:
        yield f"launches {now.launches}, was {before.launches}"
    if now.temp_bytes > (1 + WORSE) * before.temp_bytes:
        yield f"a workspace of {now.temp_bytes} bytes, was {before.temp_bytes}"


def read_steps(path: Path) -> list[Step]:
    """The steps of a CSV that ``write_lines`` wrote."""
    strings = {f.name for f in fields(Step) if f.type == "str"}
    with path.open(newline="") as file:
        return [
            Step(**{k: v if k in strings else int(v) for k, v in row.items()})  # pyright: ignore
            for row in csv.DictReader(file)
        ]


def write_lines(path: Path, lines: Sequence[Any]) -> None:
    """Write dataclasses of one kind as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(lines[0])], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(line) for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path, default=LEDGER)
    parser.add_argument("--launches-csv", type=Path, default=LAUNCHES)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    fresh = measure(product(MODELS, ROWS), args.workers, progress=True)
    if args.check:
        worse = complaints(read_steps(args.csv), [m.step for m in fresh])
        print(*worse, f"{len(fresh)} steps, {len(worse)} complaints", sep="\n")
        return 1 if worse else 0
    write_lines(args.csv, [m.step for m in fresh])
    write_lines(args.launches_csv, [launch for m in fresh for launch in m.launches])
    for m in fresh:
        print(f"{m.step.model} at {m.step.rows} rows: {m.step.launches_per_layer} launches a layer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
