"""The benches' plots, from the CSV files they write: python scripts/plot.py [DIR].

Reads bootbench.csv, bootbench_measured.csv, widthbench.csv, widthbench_measured.csv and
servebench.csv from DIR (benchmarks), and writes a PNG beside each. Needs matplotlib:
pip install -e '.[bench]'.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bootbench import COMPILE_PHASES
from drawing import BLUE, GREEN, GREY, ORANGE, PALE, SOFT, save
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

from jaxserve.plan.units import format_bytes

Lines = Sequence[dict[str, str]]


def plot_bootbench(lines: Lines) -> Any:
    """Wanted and kept shapes, and what the trim saves at boot and moves to clients."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [f"{d['slots']} x {d['context']}" for d in lines]
    left.barh(names, _floats(lines, "wanted"), color=PALE, height=0.6, label="wanted")
    left.barh(names, _floats(lines, "kept"), color=BLUE, height=0.6, label="kept")
    left.set_title("Decode shapes, slots x context")
    y = range(len(names))
    saved, moved = "saved_startup_seconds", "client_latency_seconds"
    right.barh([i - 0.2 for i in y], _floats(lines, saved), 0.38, color=GREEN)
    right.barh([i + 0.2 for i in y], _floats(lines, moved), 0.38, color=ORANGE)
    for i, d in enumerate(lines):
        for column, shift in ((saved, -0.2), (moved, 0.2)):
            text = f" {float(d[column]):.2f} s"
            right.text(float(d[column]), i + shift, text, va="center", fontsize=8.5, color=SOFT)
    right.set_yticks(y, names)
    right.set_title("The trim: saved at boot (green), moved to a client (orange)")
    right.set_xlabel("seconds, modelled")
    for axes in (left, right):
        axes.invert_yaxis()
    left.legend(loc="upper right")
    return figure


def plot_boots(lines: Lines) -> Any:
    """Each phase of the cold and the warm boot, one bar a boot."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    axes = figure.subplots()
    phases = list(dict.fromkeys(line["phase"] for line in lines))
    seconds = {(line["boot"], line["phase"]): float(line["seconds"]) for line in lines}
    others = iter(("#52606D", "#7B8794", "#9AA5B1", "#B8C2CC", "#CBD2D9", "#DDE3E9", "#EBEFF3"))
    compiling = iter(("#F6C08F", "#F2A65E", "#E8833A", "#B85F1E"))
    left = {"cold": 0.0, "warm": 0.0}
    for phase in phases:
        colour = next(compiling if phase in COMPILE_PHASES else others, GREY)
        for i, boot in enumerate(left):
            part = seconds.get((boot, phase), 0.0)
            label = phase if i == 0 else None
            axes.barh(boot, part, left=left[boot], color=colour, height=0.5, label=label)
            left[boot] += part
    for y, (boot, total) in enumerate(left.items()):
        compile_s = sum(seconds.get((boot, phase), 0.0) for phase in COMPILE_PHASES)
        says = f"  {total:.1f} s, compile phases {compile_s:.1f} s"
        axes.text(total, y, says, va="center", color=SOFT)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(left.values()))
    axes.set_xlabel("seconds from exec to ready")
    axes.set_title("Two boots of one server; what a compile cache shortens is orange")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.22), ncols=6)
    return figure


def plot_width(lines: Lines) -> Any:
    """The three ratios of every cache, each on its own axes."""
    streamed = [line for line in lines if line["read"] == "streamed"]
    figure = Figure(figsize=(12, 1.6 + 0.42 * len(streamed)), layout="constrained")
    title = "What the width axis costs, modelled (slots x context)"
    figure.suptitle(title, x=0.01, ha="left")
    names = [f"{line['slots']} x {line['context']}" for line in streamed]
    columns = ("shapes", "startup", "arena")
    for axes, name, colour in zip(
        figure.subplots(1, 3), columns, (BLUE, ORANGE, GREEN), strict=True
    ):
        values = _floats(streamed, f"{name}_ratio")
        axes.barh(names, values, color=colour, height=0.6)
        for i, value in enumerate(values):
            axes.text(value, i, f" {value:.3g}x", va="center", color=SOFT)
        axes.set_xlim(0, 1.2 * max(values))
        axes.invert_yaxis()
        axes.set_title(f"{name}, rectangle over streamed", fontsize=10)
    return figure


def plot_measured_width(lines: Lines) -> Any:
    """Both reads of one measured boot: the list, its seconds, the widest shape's workspace."""
    figure = Figure(figsize=(12, 2.4), layout="constrained")
    where = f"{lines[0]['slots']} slots of {lines[0]['context']} tokens"
    figure.suptitle(f"What the width axis costs, measured: {where}", x=0.01, ha="left")
    (rectangle,) = (line for line in lines if line["read"] == "rectangle")
    (streamed,) = (line for line in lines if line["read"] == "streamed")
    columns = (
        ("shapes", "shapes", lambda value: f"{value:.0f}"),
        ("startup", "startup_seconds", lambda value: f"{value:.1f} s"),
        ("arena", "temp_bytes", lambda value: format_bytes(int(value))),
    )
    for axes, (name, column, shown), colour in zip(
        figure.subplots(1, 3), columns, (BLUE, ORANGE, GREEN), strict=True
    ):
        pair = (rectangle, streamed)
        values = _floats(pair, column)
        axes.barh([line["read"] for line in pair], values, color=colour, height=0.5)
        for i, value in enumerate(values):
            axes.text(value, i, f" {shown(value)}", va="center", color=SOFT)
        axes.set_xlim(0, 1.3 * max(values))
        axes.set_xticks([])
        axes.invert_yaxis()
        axes.set_title(f"{name} {float(streamed[f'{name}_ratio']):.3g}x", fontsize=10)
    return figure


def plot_servebench(lines: Lines) -> Any:
    """TTFT and inter-token latency of each arm, p50 and p99, on a logarithmic axis."""
    figure = Figure(figsize=(12, 1.9 + 0.62 * len(lines)), layout="constrained")
    first = lines[0]
    figure.suptitle(
        f"{first['requests']} requests, {first['concurrency']} at a time, "
        f"{first['prompt_tokens']} prompt tokens, {first['max_tokens']} generated",
        x=0.01,
        ha="left",
    )
    names = [
        line["arm"] if not line["compiles"] else f"{line['arm']}\n{line['compiles']} compiles"
        for line in lines
    ]
    y = range(len(lines))
    for axes, kind, title in zip(
        figure.subplots(1, 2), ("ttft", "itl"), ("time to first token", "inter-token"), strict=True
    ):
        for percent, shift, colour in (("p50", -0.19, PALE), ("p99", 0.19, BLUE)):
            values = _floats(lines, f"{kind}_{percent}_ms")
            axes.barh([i + shift for i in y], values, 0.36, color=colour, label=percent)
            for i, value in enumerate(values):
                text = f" {value:,.0f}" if value >= 100 else f" {value:.2g}"
                axes.text(value, i + shift, text, va="center", color=SOFT)
        axes.set_xscale("log")
        axes.margins(x=0.2)
        axes.set_yticks(y, names)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds, as a client sees them")
        axes.set_title(title, fontsize=10)
        axes.legend(loc="lower right")
    return figure


def _floats(lines: Lines, column: str) -> list[float]:
    return [float(line[column]) for line in lines]


PLOTS: dict[str, Callable[[Lines], Any]] = {
    "bootbench": plot_bootbench,
    "bootbench_measured": plot_boots,
    "widthbench": plot_width,
    "widthbench_measured": plot_measured_width,
    "servebench": plot_servebench,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Plot every CSV that is there, say which are not; returns the exit code."""
    parser = argparse.ArgumentParser(prog="plot.py", description="Plot what the benches wrote.")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("benchmarks"))
    directory = parser.parse_args(argv).directory
    for name, plot in PLOTS.items():
        path = directory / f"{name}.csv"
        if not path.is_file():
            print(f"plot.py: no {path}, not plotted", file=sys.stderr)
            continue
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
        save(partial(plot, lines), path.with_suffix(".png"))
        print(path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
