"""Structured log lines: their two forms, the writer that never holds a server up, the engine's."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from jaxserve.sched.outputs import EngineStats

LogFormat = Literal["text", "json"]
Log = Callable[[str, Mapping[str, Any]], None]
"""``log(event, fields)``; fields that are None are left out. May be called from any thread."""


def no_log(event: str, fields: Mapping[str, Any]) -> None:
    """For who wants no lines."""


def log_line(form: LogFormat, at: float, event: str, fields: Mapping[str, Any]) -> str:
    """One line without its end: JSON, or a time, the event and ``key=value`` pairs.

    ``at`` is seconds since the epoch. A value cannot break out of its line or its field.
    """
    moment = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    given = {name: _rounded(value) for name, value in fields.items() if value is not None}
    if form == "json":
        return json.dumps({"time": moment, "event": event, **given})
    pairs = (f"{name}={_text_value(value)}" for name, value in given.items())
    return " ".join((moment, event, *pairs))


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _text_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    plain = text.isascii() and text.isprintable() and text and not set(text) & set(' "=')
    return text if plain else json.dumps(text)


class LogWriter:
    """Writes lines from a thread of its own, so that a reader who stalls holds up no request.

    When ``capacity`` lines wait, further ones are dropped and their number is told later.
    """

    def __init__(
        self,
        stream: TextIO,
        form: LogFormat,
        *,
        capacity: int = 10_000,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._stream = stream
        self._form: LogFormat = form
        self._wall_clock = wall_clock
        self._lines: queue.Queue[str | None] = queue.Queue(capacity)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def __call__(self, event: str, fields: Mapping[str, Any]) -> None:
        try:
            self._lines.put_nowait(log_line(self._form, self._wall_clock(), event, fields))
        except queue.Full:
            self._dropped += 1

    def close(self, timeout_s: float) -> None:
        """Writes what waits, for at most ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                self._lines.put(None, timeout=timeout_s)
            except queue.Full:
                continue
            self._thread.join(max(0.0, deadline - time.monotonic()))
            return

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            if dropped:
                line += "\n" + log_line(self._form, self._wall_clock(), "log", {"dropped": dropped})
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # the pipe's reader is gone, the disk full: serve on
                self._dropped += 1


class EngineLog:
    """A line on what the engine does, every ``every_s`` seconds while it does something."""

    def __init__(
        self, log: Log, *, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._every_s = every_s
        self._clock = clock
        self._last = self._before = EngineStats()
        self._said_at = self._stepped_at = clock()

    def observe_step(self, stats: EngineStats) -> None:
        """Called after every step, on the engine thread.

        Rates are since the line before, or since the engine began again after doing nothing.
        """
        now = self._clock()
        before, stepped_at = self._before, self._stepped_at
        self._before, self._stepped_at = stats, now
        if not before.num_running + before.num_waiting and now - stepped_at >= self._every_s:
            self._last, self._said_at = before, now
            return
        seconds = now - self._said_at
        if seconds < self._every_s:
            return
        last, self._last, self._said_at = self._last, stats, now
        queries = stats.prefix_cache_queries - last.prefix_cache_queries
        hits = stats.prefix_cache_hits - last.prefix_cache_hits
        self._log(
            "engine",
            {
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "kv_cache_usage": stats.kv_cache_usage,
                "prompt_tokens_per_s": (stats.prompt_tokens - last.prompt_tokens) / seconds,
                "generation_tokens_per_s": (stats.generation_tokens - last.generation_tokens)
                / seconds,
                "preemptions": stats.num_preemptions - last.num_preemptions,
                "prefix_cache_hit_rate": hits / queries if queries else None,
            },
        )
