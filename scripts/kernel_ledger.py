"""What the compilers say of every attention kernel on GPUs that are not here.

python scripts/kernel_ledger.py [--csv PATH] [--check] [--part] [--operation NAME] [--workers N]

Lowers and compiles each kernel, dtype and head size for each target, each target and kernel in a
process of its own (the compiler ends one over a kernel that its target cannot run), and writes a
line a kernel. The lines of other versions of jax stay. --check compares with the file instead and
exits 1 if a figure got worse; --part takes the part of the list that the tests take.

Needs XLA's compiler for NVIDIA GPUs and an assembler: pip install -e '.[cross]'.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from compile_child import run_child
from kernel_cases import Case, Line
from tqdm import tqdm

LEDGER = Path(__file__).parents[1] / "benchmarks" / "kernel_ledger.csv"
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8")
HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
TARGETS = ("h200", "a100", "l40")


@dataclass(frozen=True)
class Kernel:
    """What is compiled of one implementation of one operation."""

    operation: str
    implementation: str
    tokens: int
    targets: tuple[str, ...] = TARGETS
    dtypes: tuple[str, ...] = DTYPES
    head_sizes: tuple[int, ...] = HEAD_SIZES

    def cases(self) -> Iterator[Case]:
        """The product."""
        for target, dtype, size in product(self.targets, self.dtypes, self.head_sizes):
            yield Case(target, self.operation, self.implementation, self.tokens, dtype, size)


KERNELS = (
    Kernel("decode", "streamed_triton", 64),
    Kernel("decode", "streamed_mosaic", 64, ("h200",), ("bfloat16", "float16"), (64, 128, 256)),
    Kernel("prefill", "streamed_triton", 2048),
    Kernel("rotate_write", "fused", 512, dtypes=("bfloat16", "float16", "float32")),
    # Those that multiply refuse all but bfloat16.
    *(Kernel("norm_qkv_write", "fused", rows, dtypes=("bfloat16",)) for rows in (8, 64)),
    # It refuses head sizes that are no multiple of 64 at so many rows.
    Kernel("norm_qkv_write", "fused", 256, dtypes=("bfloat16",), head_sizes=(64, 128, 192, 256)),
    # The head size stands for the model's width here, 32 heads of it.
    *(
        Kernel(operation, "fused", rows, dtypes=("bfloat16",), head_sizes=(64, 128))
        for operation in ("norm_gate_up", "add_product")
        for rows in (8, 64, 256)
    ),
)
MAIN_SHAPES = tuple(("bfloat16", size) for size in (64, 128))
MAIN_LOAD_BITS = 128
WORSE = 0.10  # the share by which a figure may get worse


def all_cases() -> tuple[Case, ...]:
    """The whole product."""
    return tuple(case for kernel in KERNELS for case in kernel.cases())


def part_of_cases() -> tuple[Case, ...]:
    """Every kernel's main shapes on every target, and its every dtype and head size on one."""
    part: set[Case] = set()
    for kernel in KERNELS:
        longer = max(len(kernel.dtypes), len(kernel.head_sizes))
        diagonal = islice(zip(cycle(kernel.dtypes), cycle(kernel.head_sizes), strict=False), longer)
        chosen = {*product(kernel.targets, MAIN_SHAPES), *zip(cycle(kernel.targets), diagonal)}
        part |= {c for c in kernel.cases() if (c.target, (c.dtype, c.head_size)) in chosen}
    return tuple(case for case in all_cases() if case in part)


def measure(cases: Iterable[Case], workers: int, progress: bool = False) -> tuple[Line, ...]:
    """Compile ``cases`` in child processes, ``workers`` at a time; raises RuntimeError."""
    groups: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        group = (case.target, case.operation, case.implementation)
        groups.setdefault(group, []).append(case)
    total = sum(map(len, groups.values()))
    with (
        ThreadPoolExecutor(workers) as threads,
        tqdm(total=total, unit="kernel", disable=None if progress else True) as bar,
    ):
        done = [threads.submit(_in_child, group, bar) for group in groups.values()]
        lines = [line for future in as_completed(done) for line in future.result()]
    return tuple(sorted(lines, key=lambda line: line.key))


def _in_child(cases: Sequence[Case], bar: Any) -> list[Line]:
    results = run_child("kernel_cases.py", [asdict(case) for case in cases], bar.update)
    return [Line(**line) for lines in results for line in lines]


def complaints(committed: Sequence[Line], fresh: Iterable[Line]) -> list[str]:
    """What a fresh measurement does worse than it must, or than the committed ledger.

    Compares with the kernel's line of the same jax, else with that of the newest which has one.
    """
    lines = sorted(committed, key=lambda line: _version(line.jax))
    newest = {line.key: line for line in lines}
    same = {(line.key, line.jax): line for line in lines}
    return [
        f"{line.name} (jax {line.jax}): {why}"
        for line in fresh
        for why in _worse(same.get((line.key, line.jax), newest.get(line.key)), line)
    ]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(".") if n.isdigit())


def _worse(before: Line | None, now: Line) -> Iterator[str]:
    if now.spill_bytes:
        yield f"{now.spill_bytes} bytes spilled"
    if now.resident_programs == 0:
        yield f"no multiprocessor has {now.shared_bytes} bytes of shared memory for it"
    main = (now.dtype, now.head_size) in MAIN_SHAPES
    if main and now.load_bits is not None and now.load_bits < MAIN_LOAD_BITS:
        yield f"streams {now.load_bits} bits at a time, must be {MAIN_LOAD_BITS}"
    if before is None:
        yield "is not in the ledger; run scripts/kernel_ledger.py"
        return
    for figure, sign in (
        ("registers", 1),
        ("shared_bytes", 1),
        ("resident_programs", -1),
        ("load_bits", -1),
    ):
        old, new = getattr(before, figure), getattr(now, figure)
        if old is not None and (new is None or sign * (new - old) > WORSE * old):
            yield f"{figure} {new}, was {old} (jax {before.jax}, ptxas {before.ptxas})"


def read_ledger(path: Path) -> tuple[Line, ...]:
    """The lines of a CSV that ``write_ledger`` wrote."""
    kinds = {f.name: f.type for f in fields(Line)}
    with path.open(newline="") as file:
        return tuple(
            Line(**{k: _parse(v, str(kinds[k])) for k, v in row.items()})
            for row in csv.DictReader(file)
        )


def _parse(text: str, kind: str) -> Any:
    if kind == "str":
        return text
    return int(text) if text else None


def write_ledger(path: Path, lines: Iterable[Line]) -> None:
    """Write ``lines`` as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Line)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(line) for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csv", type=Path, default=LEDGER)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--part", action="store_true")
    parser.add_argument(
        "--operation",
        choices=sorted({kernel.operation for kernel in KERNELS}),
        help="measure this one only",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    cases = part_of_cases() if args.part else all_cases()
    if args.operation is not None:
        cases = tuple(case for case in cases if case.operation == args.operation)
    fresh = measure(cases, args.workers, progress=True)
    committed = read_ledger(args.csv) if args.csv.exists() else ()
    if args.check:
        worse = complaints(committed, fresh)
        print(*worse, f"{len(fresh)} kernels, {len(worse)} complaints", sep="\n")
        return 1 if worse else 0
    measured = {(line.key, line.jax) for line in fresh}
    kept = [line for line in committed if (line.key, line.jax) not in measured]
    write_ledger(args.csv, sorted([*kept, *fresh], key=lambda x: (x.key, _version(x.jax))))
    print(f"{args.csv}: {len(fresh)} kernels measured, {len(kept)} lines kept")
    return 0


if __name__ == "__main__":
    sys.exit(main())
