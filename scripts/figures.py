"""What the load scripts make of what they saw: percentiles, and the lines of a CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from load_client import BenchError


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as vLLM's bench has it. Raises BenchError if empty."""
    if not values:
        raise BenchError(
            "no two pieces of text came from any one client: no latency to report, ask for more "
            "--max-tokens"
        )
    return float(np.percentile(values, percent))


def write_csv(path: Path, lines: Sequence[Any]) -> None:
    """One line for each of at least one record of a dataclass, whose fields are the columns."""
    with path.open("w", newline="") as file:
        names = [field.name for field in fields(lines[0])]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(line) for line in lines)
