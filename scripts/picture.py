"""The README's picture: a request's way through the process, and the loop around the device."""

from __future__ import annotations

from typing import Any

from drawing import BLUE, GREEN, ORANGE, PALE, SOFT
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
from matplotlib.patches import FancyBboxPatch  # pyright: ignore[reportMissingImports]

Point = tuple[float, float]

ROOMS = (
    (1, 38, "event loop  ·  serve/"),
    (48, 44, "engine thread  ·  sched/, runtime/"),
    (101, 38, "device  ·  model/, kernels/"),
)
# Left, bottom, width, height, title, text, colour; 140 x 72 is the picture.
NODES = (
    (4, 53, 32, 10.5, "POST /v1/chat/completions", "validated, or refused by field", BLUE),
    (4, 37.5, 32, 10.5, "text", "chat template, tokenizer: token ids", BLUE),
    (4, 22, 32, 10.5, "AsyncEngine", "one inbox in, a queue a request out", BLUE),
    (4, 5.5, 32, 11.5, "SSE", "detokenised as tokens come,\nwhole characters only", BLUE),
    (51, 53, 33, 10.5, "schedule", "rows that decode, prompt chunks, blocks", GREEN),
    (51, 37.5, 33, 10.5, "pack", "one numpy array for each input", GREEN),
    (51, 22, 33, 10.5, "dispatch step i + 1", "counts pick the bucket, a call returns", GREEN),
    (51, 5.5, 33, 11.5, "commit step i", "read its tokens, end requests,\nfree blocks", GREEN),
    (
        *(104, 47.5, 32, 16, "executables, one a shape"),
        "permute_rows\ndecode  [rows x width]\nprefill  [tokens]\ncompiled before a request comes",
        ORANGE,
    ),
    (
        *(104, 23, 32, 16.5, "KV pool, decode state"),
        "K and V of every layer  [C, K, Z, H]\nthe state of every row\n"
        "donated to each call and given back:\nupdated where they lie, in order",
        ORANGE,
    ),
    (
        104,
        5.5,
        32,
        11.5,
        "sampled tokens",
        "on their way to the host\nwhile step i + 1 runs",
        ORANGE,
    ),
)
# Points of a line that ends in an arrow, colour, label, where it stands.
LINES = (
    (((20, 53), (20, 48)), SOFT, "", (0, 0)),
    (((20, 37.5), (20, 32.5)), SOFT, "", (0, 0)),
    (((20, 22), (20, 17)), SOFT, "", (0, 0)),
    (((36, 29), (41.2, 29), (41.2, 58.5), (51, 58.5)), BLUE, "add\nabort", (44, 44)),
    (((51, 11), (41.2, 11), (41.2, 25.5), (36, 25.5)), GREEN, "updates", (44.5, 19)),
    (((67.5, 53), (67.5, 48)), SOFT, "", (0, 0)),
    (((67.5, 37.5), (67.5, 32.5)), SOFT, "", (0, 0)),
    (((67.5, 22), (67.5, 17)), SOFT, "without waiting for it", (75.5, 19.5)),
    (((84, 14), (88, 14), (88, 58.5), (84, 58.5)), GREEN, "", (0, 0)),
    (((84, 27), (96.5, 27), (96.5, 55.5), (104, 55.5)), ORANGE, "call", (98.9, 41)),
    (((115, 47.5), (115, 39.5)), ORANGE, "", (0, 0)),
    (((125, 39.5), (125, 47.5)), ORANGE, "", (0, 0)),
    (((120, 23), (120, 17)), ORANGE, "", (0, 0)),
    (((104, 9), (84, 9)), ORANGE, "step i", (96.5, 10.5)),
)


def draw_picture() -> Any:
    """HTTP to AsyncEngine, the engine's four moves, and what lies on the device."""
    figure = Figure(figsize=(14, 7))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 140)
    axes.set_ylim(0, 72)
    axes.axis("off")
    for x, width, name in ROOMS:
        axes.add_patch(_box(x, 2, width, 68, "#F7F9FB", PALE, 1.2))
        axes.text(x + 3, 66.5, name, fontsize=11, fontweight="bold", color=SOFT, va="center")
    for x, y, width, height, title, text, colour in NODES:
        axes.add_patch(_box(x, y, width, height, "white", colour, 1.8))
        middle, top = x + width / 2, y + height
        axes.text(middle, top - 2.7, title, ha="center", va="center", fontweight="bold")
        axes.text(
            *(middle, top - 5),
            text,
            ha="center",
            va="top",
            fontsize=9,
            color=SOFT,
            linespacing=1.4,
        )
    for points, colour, label, at in LINES:
        _line(axes, points, colour)
        if label:
            axes.text(*at, label, fontsize=9, color=colour, ha="center", va="center")
    return figure


def _line(axes: Any, points: tuple[Point, ...], colour: str) -> None:
    *_, before, end = points
    axes.plot(*zip(*points[:-1], strict=True), color=colour, linewidth=1.7)
    look = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.7, "shrinkA": 0, "shrinkB": 1}
    axes.annotate("", xy=end, xytext=before, arrowprops=look | {"mutation_scale": 14})


def _box(x: float, y: float, w: float, h: float, face: str, edge: str, line: float) -> Any:
    style = "round,pad=0,rounding_size=1.2"
    return FancyBboxPatch((x, y), w, h, style, facecolor=face, edgecolor=edge, linewidth=line)
