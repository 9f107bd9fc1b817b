"""A measured boot: real server processes, the arithmetic over their reports, and the CSV."""

import contextlib
import csv
import sys
from pathlib import Path

import httpx
import pytest
from server_process import ServerDied, serving

from scripts import bootbench
from scripts.bootbench import MeasuredBoots

LAUNCH = (sys.executable, str(Path(__file__).parents[1] / "serve_launch_main.py"))
COLD = {"import": 2.0, "weights": 1.0, "plan": 0.5, "trace": 4.0, "compile": 15.0, "load": 0.5}
WARM = {"import": 2.0, "weights": 1.0, "plan": 0.0, "trace": 0.0, "compile": 0.0, "load": 1.0}


def test_a_server_is_ready_while_it_is_used_and_gone_after():
    said = []
    with serving([], report=said.append, command=(*LAUNCH, "fine", "0")) as server:
        assert httpx.get(f"{server.url}/ready").status_code == 200
        assert server.health()["capture"] == {"count": 3}
        assert server.ready_s > 0
    assert said[-1] == f"ready: {server.url}/v1"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/ready")


def test_a_server_that_does_not_boot_says_its_own_words():
    with (
        pytest.raises(ServerDied, match=r"ended with 1 .*(\n.*)+no such model: nothing"),
        serving([], command=(*LAUNCH, "no-boot", "0")),
    ):
        pytest.fail("it is not there")


def test_the_compile_phases_are_summed_before_they_are_divided():
    boots = MeasuredBoots(COLD, WARM)
    assert boots.compile_seconds == (20.0, 1.0)
    assert boots.compile_ratio == 0.05


def test_the_table_has_every_phase_then_both_sums():
    table = MeasuredBoots(COLD, WARM).table()
    assert [row[0] for row in table] == [*COLD, "plan+trace+compile+load", "exec to ready"]
    assert table[0] == ("import", "2.00", "2.00", "100.0%")
    assert table[-2] == ("plan+trace+compile+load", "20.00", "1.00", "5.0%")
    assert table[-1] == ("exec to ready", "23.00", "4.00", "17.4%")


def test_both_boots_get_the_same_flags_and_one_cache_that_starts_empty(
    monkeypatch, tmp_path, capsys
):
    boots = iter((COLD, WARM))
    started = []

    class Server:
        def health(self):
            return {"boot_seconds": next(boots)}

    @contextlib.contextmanager
    def fake(flags, *, report):
        *given, name, cache = flags
        started.append((given, name, cache, list(Path(cache).iterdir())))
        (Path(cache) / f"step{len(started)}").touch()
        yield Server()

    monkeypatch.setattr(bootbench, "serving", fake)
    path = tmp_path / "measured.csv"
    argv = ["--measure", "--measured-csv", str(path), "--model", "m", "--max-num-seqs", "2"]
    assert bootbench.main(argv) == 0
    cold, warm = started
    assert cold[0] == warm[0] == ["--model", "m", "--max-num-seqs", "2"]
    assert cold[1:3] == warm[1:3] == ("--compile-cache-dir", cold[2])
    assert cold[3] == []
    assert [entry.name for entry in warm[3]] == ["step1"]
    assert not Path(cold[2]).exists()
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == ["boot", "phase", "seconds"]
    assert len(lines) == len(COLD) + len(WARM)
    assert {"boot": "warm", "phase": "load", "seconds": "1.0"} in lines
    assert "take 0.050 of the cold boot's" in capsys.readouterr().out


def test_a_server_flag_without_measure_is_refused(capsys):
    with pytest.raises(SystemExit):
        bootbench.main(["--max-num-seqs", "2"])
    assert "--max-num-seqs: add --measure" in capsys.readouterr().err
