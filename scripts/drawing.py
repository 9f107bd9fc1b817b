"""What every drawing and plot shares: colours, the style sheet, and how a file is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.style  # pyright: ignore[reportMissingImports]

STYLE = Path(__file__).with_name("jaxserve.mplstyle")
BLUE, ORANGE, GREEN, RED = "#2F6DB5", "#E8833A", "#3E9B6E", "#C44E52"
PALE, GREY, INK, SOFT = "#E4E7EB", "#9AA5B1", "#1F2933", "#52606D"


def save(draw: Callable[[], Any], path: Path) -> None:
    """Write the figure that ``draw`` makes, in the house style, as PNG.

    matplotlib's version stays out of the file, so that a drawing changes only when it looks
    different.
    """
    with matplotlib.style.context(STYLE):
        draw().savefig(path, metadata={"Software": None})
