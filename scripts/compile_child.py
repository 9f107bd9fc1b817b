"""Runs one of the compile scripts as a child process and reads what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def run_child(
    script: str, jobs: Sequence[dict[str, Any]], done: Callable[[], object] = lambda: None
) -> list[Any]:
    """What ``script``, beside this file, makes of each job: a line of JSON each.

    It finds the jobs as JSON on standard input, and sees no GPU. ``done`` is told of each. Raises
    RuntimeError with its last words when it ends early, as the compiler does over a kernel that its
    target cannot run.
    """
    results: list[Any] = []
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as jobs_file:
        json.dump(jobs, jobs_file)
        jobs_file.seek(0)
        with subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script))],
            stdin=jobs_file,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"},
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                results.append(json.loads(line))
                done()
        if child.returncode or len(results) < len(jobs):
            said.seek(0)
            raise RuntimeError(
                f"{script} ended with {child.returncode} at {jobs[len(results) :][:1]}: "
                f"{said.read().strip()[-2000:]}"
            )
    return results


def read_jobs() -> list[dict[str, Any]]:
    """In the child: the jobs."""
    return json.load(sys.stdin)


def print_result(result: Any) -> None:
    """In the child: the result of the next job."""
    print(json.dumps(result), flush=True)
