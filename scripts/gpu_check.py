"""Checks and measures this checkout on a machine with one NVIDIA GPU, in under 8 minutes.

PYTHONPATH=.:kernels python scripts/gpu_check.py [--only a,c] [--out DIR] [--tiny]

(a) correctness of every attention implementation against the reference; (b) copy bandwidth;
(c) kernelbench: decode attention against that bandwidth, beside others; (d) a decode step of a
Llama-3.2-1B-shaped model beside its byte floor, with and without command buffers; (e) a first and
a second boot; (f) executables compiled for this card by a process that uses none, loaded and run.

Each part is a process of its own with a time limit, so one that crashes or hangs costs nothing but
itself. Needs jax with its CUDA plugin and what jaxserve's engine imports; a part whose packages
are absent is skipped by name. Writes gpu_check.json, gpu_check.txt and a CSV a part into DIR
($OUT, else benchmarks), prints a table last and exits 1 if a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_report import Outcome, failures, table, write

PARTS = {
    "a": "correctness",
    "b": "bandwidth",
    "c": "kernelbench",
    "d": "steps",
    "e": "boots",
    "f": "built elsewhere",
}
# Seconds a child may take; together 8 minutes.
LIMITS = {
    "probe": 20,
    "correctness": 90,
    "bandwidth": 20,
    "kernelbench": 120,
    "steps": 60,
    "boot": 25,
    "build": 30,
}
PATIENCE_ON_A_CPU = 10
SCRIPT = Path(__file__).with_name("gpu_parts.py")
NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="


def run_child(
    name: str, given: Mapping[str, Any], limit_s: float, env: Mapping[str, str] | None = None
) -> Outcome:
    """Run one part of gpu_parts.py; it and what it started are gone when this returns."""
    paths = os.pathsep.join(p for p in sys.path if p)
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(
            [sys.executable, str(SCRIPT), name, json.dumps(given)],
            stdout=out,
            stderr=said,
            env={**os.environ, "PYTHONPATH": paths, **(env or {})},
            start_new_session=True,
        )
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
        out.seek(0)
        rows = [json.loads(line) for line in out.read().splitlines() if line.endswith("}")]
        said.seek(0)
        status = _status(code, limit_s, said.read())
    return Outcome(status=status, seconds=time.monotonic() - start, rows=rows)


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _status(code: int | None, limit_s: float, said: str) -> str:
    if code == 0:
        return "ok"
    if code is None:
        return f"failed: ended after {limit_s:.0f} s"
    absent = re.findall(r"^ModuleNotFoundError: (.*)$", said, re.MULTILINE)
    if absent:
        return f"skipped: {absent[-1]}"
    lines = [line for line in said.splitlines() if line.strip()] or ["it said nothing"]
    fatal = [line for line in lines if re.match(r"F\d{4} |\w*(Error|Exception)\b", line)]
    return f"failed: exit {code}: {(fatal or lines)[-1].strip()[:300]}"


class Check:
    """The parts asked for, run in order; ``outcomes`` has those that ran, by child."""

    def __init__(self, only: Sequence[str], *, tiny: bool, scratch: Path) -> None:
        self.only = only
        self.outcomes: dict[str, Outcome] = {}
        self._tiny = tiny
        self._scratch = scratch
        self._copy: float | None = None

    def run(self) -> None:
        """Everything; the bandwidth also for those that are measured against it."""
        self._child("probe", "probe")
        if {"b", "c", "d"} & set(self.only):
            found = self._child("bandwidth", "bandwidth")
            self._copy = found.rows[0]["copy"] if found.rows else None
        for part in self.only:
            {
                "a": lambda: self._child("correctness", "correctness"),
                "b": lambda: None,
                "c": lambda: self._against_copy("kernelbench", "kernelbench"),
                "d": self._steps,
                "e": self._boots,
                "f": self._built,
            }[part]()

    def _child(
        self, label: str, name: str, env: Mapping[str, str] | None = None, **given: Any
    ) -> Outcome:
        limit_s = LIMITS[name] * (PATIENCE_ON_A_CPU if self._tiny else 1)
        outcome = run_child(name, {"tiny": self._tiny, **given}, limit_s, env)
        self.outcomes[label] = outcome
        lines = f"{len(outcome.rows)} lines in {outcome.seconds:.0f} s"
        print(f"{label}: {lines}, {outcome.status}", file=sys.stderr, flush=True)
        return outcome

    def _against_copy(
        self, label: str, name: str, env: Mapping[str, str] | None = None, **given: Any
    ) -> None:
        if self._copy is None:
            why = "skipped: no bandwidth was measured"
            self.outcomes[label] = Outcome(status=why, seconds=0.0, rows=[])
        else:
            self._child(label, name, env, copy=self._copy, **given)

    def _steps(self) -> None:
        self._against_copy("steps", "steps", command_buffers=True)
        off = {}
        if self._device("platform") == "gpu":  # no other knows the flag
            off["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_COMMAND_BUFFERS}".strip()
        self._against_copy("steps without buffers", "steps", off, command_buffers=False)

    def _boots(self) -> None:
        cache = str(self._scratch / "boots")
        self._child("first boot", "boot", cache=cache)
        self._child("second boot", "boot", cache=cache)

    def _built(self) -> None:
        cache = str(self._scratch / "built")
        if self._device("platform") == "gpu":
            here = {"JAX_PLATFORMS": "cpu"}
            self._child("build", "build", here, cache=cache, device=self._device("device"))
        else:  # no card: what one process compiled for this device, another loads
            self._child("build", "boot", cache=cache)
        self._child("boot of the build", "boot", cache=cache)

    def _device(self, field: str) -> Any:
        rows = self.outcomes["probe"].rows
        return rows[0][field] if rows else None


def _parts(text: str) -> list[str]:
    letters = text.split(",")
    for letter in letters:
        if letter not in PARTS:
            raise argparse.ArgumentTypeError(f"no part {letter!r}; there are {', '.join(PARTS)}")
    return sorted(set(letters))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_parts, default=list(PARTS), help="letters, as a,c")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT") or Path(__file__).parents[1] / "benchmarks"),
    )
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="jaxserve-check-") as scratch:
        check = Check(args.only, tiny=args.tiny, scratch=Path(scratch))
        check.run()
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    text = table(check.outcomes)
    write(args.out, check.outcomes, now, text)
    print(f"{now}\n{text}\nwritten to {args.out}")
    return 1 if failures(check.outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
