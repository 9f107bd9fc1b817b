"""A server in a process of its own, started as an operator starts it: `scripts/serve.py`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVE = Path(__file__).with_name("serve.py")
READY = "ready: "
_LAST_LINES = 12
_STOP_S = 60.0


class ServerDied(Exception):
    """The server ended before it was ready; the message holds its last lines."""


@dataclass(frozen=True)
class Server:
    """A server that takes requests. ``url`` has no path; ``ready_s`` is seconds from its start."""

    url: str
    ready_s: float
    pid: int

    def health(self) -> dict[str, Any]:
        """What /health says."""
        with urllib.request.urlopen(f"{self.url}/health", timeout=60) as reply:
            return json.load(reply)


@contextlib.contextmanager
def serving(
    flags: Sequence[str],
    *,
    report: Callable[[str], None] = lambda line: None,
    log: Callable[[str], None] = lambda line: None,
    command: Sequence[str] = (sys.executable, str(SERVE)),
) -> Iterator[Server]:
    """A ready server of ``flags`` on a free port of this machine; it is stopped at the end.

    ``report`` gets every line it prints while it boots, ``log`` those after, on another thread.
    Raises ServerDied.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, *flags, "--host", "127.0.0.1", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.rstrip())
            report(lines[-1])
            if line.startswith(READY):
                break
        else:
            said = "\n".join(lines[-_LAST_LINES:])
            raise ServerDied(f"the server ended with {process.wait()} before it was ready:\n{said}")
        url = lines[-1].removeprefix(READY).removesuffix("/v1")
        with _drained(process, log):
            yield Server(url, time.perf_counter() - start, process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def _drained(process: subprocess.Popen[str], log: Callable[[str], None]) -> Iterator[None]:
    """Reads what the process prints, which must not fill the pipe; at the end asks it to stop."""

    def read() -> None:
        for line in process.stdout or ():
            log(line.rstrip())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        process.kill()
        reader.join()
