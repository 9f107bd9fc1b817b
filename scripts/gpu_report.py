"""What gpu_check.py tells of its parts: a line each, a JSON file and CSVs."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

AIMS = ((64, 8192, 0.85), (8, 2048, 0.70))
"""Rows, context, and the share of the copy bandwidth that decode attention should reach there."""
Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a child came to: "ok", "skipped: " or "failed: " and why, and the rows it printed."""

    status: str
    seconds: float
    rows: Rows

    @property
    def ok(self) -> bool:
        """It ran to its end."""
        return self.status == "ok"


def summary(outcomes: Mapping[str, Outcome]) -> list[tuple[str, str]]:
    """A line a child: its label, and what it found or why it found nothing."""
    lines = []
    for label, outcome in outcomes.items():
        found = "; ".join(_found(label, outcome.rows))
        lines.append((label, found if outcome.ok else f"{outcome.status}; {found}".strip("; ")))
    return lines


def _found(label: str, rows: Rows) -> Iterator[str]:
    if label == "probe" and rows:
        yield f"{rows[0]['device']}, jax {rows[0]['jax']}, Python {rows[0]['python']}"
    elif label == "correctness":
        yield from _correctness(rows)
    elif label == "bandwidth" and rows:
        yield f"copy {rows[0]['copy'] / 1e9:.0f} GB/s, read {rows[0]['read'] / 1e9:.0f} GB/s"
    elif label == "kernelbench":
        yield from _kernelbench(rows)
    elif label.startswith("steps"):
        for row in rows:
            yield (
                f"{row['rows']} rows {row['us_a_step']:.0f} us "
                f"({row['times_floor']:.2f} x floor, call {row['host_us_a_call']:.0f} us)"
            )
    elif label == "build" and rows and "build_s" in rows[0]:
        yield f"{rows[0]['executables']} executables in {rows[0]['build_s']:.1f} s"
    elif rows:
        row = rows[0]
        yield f"{row['executables']} executables in {row['executables_s']:.1f} s"
        yield f"{row['from_cache']} from the cache"
        yield f"first token after {row['first_token_s']:.2f} s"


def _correctness(rows: Rows) -> Iterator[str]:
    failed = [row for row in rows if not row["passed"]]
    absent = sum(row["passed"] and row["error"] is None for row in rows)
    yield f"{len(rows) - len(failed) - absent} passed, {absent} not implemented"
    for row in failed:
        why = row["why"] or f"error {row['error']}"
        yield f"FAILED {row['implementation']} {row['operation']} {row['case']}: {why}"


def _kernelbench(rows: Rows) -> Iterator[str]:
    for batch, context, aim in AIMS:
        at = [
            row
            for row in rows
            if (row["rows"], row["context"], row["num_kv_heads"]) == (batch, context, 8)
            and row["share_of_copy"] is not None
        ]
        for row in sorted(at, key=lambda row: -row["share_of_copy"]):
            yield (
                f"{batch} x {context}: {row['implementation']} {row['share_of_copy']:.0%} of copy "
                f"(aim {aim:.0%})"
            )


def failures(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Labels of children that failed, or whose results are wrong. What was skipped is none."""
    failed = [label for label, x in outcomes.items() if x.status.startswith("failed")]
    wrong = [
        label for label, x in outcomes.items() if any(row.get("passed") is False for row in x.rows)
    ]
    built = outcomes.get("boot of the build")
    missed = [
        "boot of the build"
        for row in (built.rows if built else [])
        if row["from_cache"] < row["executables"]
    ]
    return list(dict.fromkeys([*failed, *wrong, *missed]))


def table(check: Mapping[str, Outcome]) -> str:
    """What is printed last."""
    lines = [(label, found) for label, found in summary(check)]
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label.ljust(width)}  {found}" for label, found in lines)


def write(directory: Path, outcomes: Mapping[str, Outcome], heading: str, text: str) -> None:
    """The JSON, the table, and a CSV for each child's rows."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "gpu_check.txt").write_text(f"{heading}\n{text}\n")
    told = {label: asdict(outcome) for label, outcome in outcomes.items()}
    (directory / "gpu_check.json").write_text(
        json.dumps({"heading": heading, "parts": told}, indent=1) + "\n"
    )
    for label, outcome in outcomes.items():
        if not outcome.rows:
            continue
        name = f"gpu_check_{label.replace(' ', '_')}.csv"
        columns = list(dict.fromkeys(key for row in outcome.rows for key in row))
        with (directory / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(outcome.rows)
