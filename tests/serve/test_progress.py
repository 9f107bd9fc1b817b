"""The launcher's progress: a bar on a terminal, a few plain lines in a log."""

from __future__ import annotations

import io
import sys

import pytest

from scripts import serve


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_at_the_start_and_one_every_ten_seconds(capsys):
    now = 0.0
    progress = serve.Progress(clock=lambda: now)
    for second in range(25):
        now = float(second)
        progress("downloading x", second * 4, 100)
    progress("downloading x", 100, 100)
    written = capsys.readouterr()
    assert written.err.splitlines() == [f"downloading x: {percent}%" for percent in (0, 40, 80)]
    assert written.out == ""


def test_each_new_thing_starts_with_its_own_line(capsys):
    progress = serve.Progress(clock=lambda: 5.0)
    for what, done in (("checking", 1), ("checking", 2), ("loading", 1), ("loading", 0)):
        progress(what, done, 4)
    assert capsys.readouterr().err.splitlines() == ["checking: 25%", "loading: 25%", "loading: 0%"]


@pytest.mark.parametrize(("total", "unit"), [(5_000_000, "B/s"), (50, "it/s")])
def test_a_terminal_gets_a_bar_that_counts_bytes_or_things(monkeypatch, total, unit):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(serve, "_BAR_DELAY_S", 0.0)
    progress = serve.Progress()
    for done in (0, total // 2, total):
        progress("loading", done, total)
    assert "loading:   0%" in terminal.getvalue()
    assert f"?{unit}" in terminal.getvalue()
    assert terminal.getvalue().endswith(" \r")  # the bar is wiped


def test_what_is_over_at_once_flashes_no_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = serve.Progress()
    for what in ("checking", "loading"):
        for done in (0, 1, 2):
            progress(what, done, 2)
    assert terminal.getvalue().strip() == ""
