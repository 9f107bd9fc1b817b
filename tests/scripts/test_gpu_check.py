"""The check for a machine with a GPU: all its parts on a CPU, with tiny sizes."""

import json
import math
import os
import select
import subprocess

import jax
import numpy as np
import pytest

from scripts import gpu_check, gpu_parts, gpu_report
from scripts.gpu_check import Check, run_child
from scripts.gpu_correctness import Case, make_world
from scripts.gpu_report import Outcome
from scripts.gpu_timing import host_seconds_a_call, noise, seconds_a_step
from scripts.kernelbench import Pools, Shape, shapes

COPY = 1e10


def rows_of(name: str, **given) -> list[dict]:
    rows = list(gpu_parts.part(name, {"tiny": True, **given}))
    json.dumps(rows)  # that is how they leave the child
    return rows


# ---- the parts ---------------------------------------------------------------------------------


def test_every_implementation_agrees_with_the_reference():
    rows = rows_of("correctness")
    assert {row["operation"] for row in rows} == {"decode", "prefill"}
    assert {"rectangle", "streamed_xla", "streamed_triton"} <= {r["implementation"] for r in rows}
    assert [row for row in rows if not row["passed"]] == []
    assert sum(row["error"] is not None for row in rows) >= 5


def test_an_implementation_that_is_wrong_or_raises_fails_its_own_rows_only(monkeypatch):
    import gpu_correctness

    real = gpu_correctness.paged_attention

    def broken(*args, implementation, **options):
        if implementation == "streamed_triton":
            raise RuntimeError("no such instruction\nand more")
        out = real(*args, implementation=implementation, **options)
        return out.at[1].add(1) if implementation == "streamed_xla" else out

    def absent(*args, **options):
        raise NotImplementedError("not here")

    monkeypatch.setattr(gpu_correctness, "paged_attention", broken)
    monkeypatch.setattr(gpu_correctness, "paged_prefill", absent)
    rows = rows_of("correctness")
    found = {row["implementation"]: row for row in rows if row["operation"] == "decode"}
    assert all(r["passed"] and r["why"] == "not here" for r in rows if r["operation"] == "prefill")
    assert found["rectangle"]["passed"]
    assert not found["streamed_xla"]["passed"]
    assert found["streamed_xla"]["error"] > 0.5
    assert not found["streamed_triton"]["passed"]
    assert found["streamed_triton"]["why"] == "RuntimeError: no such instruction"


def test_memory_that_no_row_owns_is_poison_and_unused_entries_are_wild():
    world = make_world(Case(dtype="float32", head_size=64, lengths=(0, 17)))
    assert np.isnan(world.k).mean() > 0.5
    own = world.k[world.tables[1, :2]].swapaxes(1, 2).reshape(32, -1)
    assert np.isfinite(own[:17]).all()
    assert np.isnan(own[17:]).all()
    wild = world.tables[0]
    assert ((wild < 0) | (wild >= len(world.k))).all()


def test_kernelbench_measures_ours_and_says_what_of_the_copy_bandwidth_that_is():
    points = rows_of("kernelbench", copy=COPY)
    assert [point["why"] for point in points] == [""] * len(points)
    for point in points:
        (shape,) = shapes(tiny=True)
        seconds = point["microseconds"] / 1e6
        assert point["gb_per_s"] == pytest.approx(shape.kv_bytes / seconds / 1e9)
        assert point["share_of_copy"] == pytest.approx(shape.kv_bytes / seconds / COPY)


def test_the_points_are_those_that_were_asked_for_and_the_aims_come_first():
    points = shapes(tiny=False)
    asked = {(r, c) for r in (1, 8, 64, 256) for c in (512, 2048, 8192, 32768)}
    for heads in ((32, 8), (8, 1)):
        own = [(s.rows, s.context) for s in points if (s.num_heads, s.num_kv_heads) == heads]
        assert len(own) == 16
        assert set(own) == asked
        assert set(own[:2]) == {(64, 8192), (8, 2048)}
    assert Shape(rows=8, context=2048).kv_bytes == 8 * 2048 * 8 * 128 * 2 * 2


def test_reads_of_a_chain_use_blocks_of_their_own():
    (shape,) = shapes(tiny=True)
    first, second = (np.asarray(t) for t in Pools(shape, tiny=True).tables(shape, 2))
    assert first.shape == (shape.rows, shape.blocks_a_row)
    assert len({*first.flat, *second.flat}) == first.size + second.size
    assert min(first.min(), second.min()) > 0


def test_a_decode_step_is_timed_beside_its_byte_floor():
    (row,) = rows_of("steps", copy=COPY, command_buffers=True)
    assert row["rows"] == 2
    assert row["us_a_step"] > 0
    assert row["host_us_a_call"] > 0
    assert row["times_floor"] == pytest.approx(row["us_a_step"] / row["floor_us"])


def test_a_second_boot_compiles_nothing_and_gives_the_same_tokens(tmp_path):
    (first,) = rows_of("boot", cache=str(tmp_path / "cache"))
    (second,) = rows_of("boot", cache=str(tmp_path / "cache"))
    assert first["from_cache"] == 0
    assert second["from_cache"] == second["executables"] == first["executables"] > 3
    assert second["tokens"] == first["tokens"]
    assert len(first["tokens"].split()) == 16


def test_the_probe_names_the_device():
    (row,) = rows_of("probe")
    assert row["platform"] == "cpu"
    assert row["jax"] == jax.__version__


def test_a_card_without_a_target_and_a_part_that_is_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no target describes NVIDIA X1; there are NVIDIA H200"):
        rows_of("build", device="NVIDIA X1", cache=str(tmp_path))
    with pytest.raises(ValueError, match="no part z"):
        rows_of("z")


# ---- timing ------------------------------------------------------------------------------------


def test_a_step_is_timed_by_the_difference_of_many_calls_and_few(monkeypatch):
    import gpu_timing

    now = 0.0

    def step(n: int) -> int:
        nonlocal now
        now += 0.25
        return n + 1

    def wait(state):  # each wait for the device costs as much as four steps
        nonlocal now
        now += 1.0

    monkeypatch.setattr(gpu_timing.time, "perf_counter", lambda: now)
    monkeypatch.setattr(gpu_timing.jax, "block_until_ready", wait)
    seconds, calls = seconds_a_step(step, 0, at_least=1.0)
    assert seconds == pytest.approx(0.25)
    assert calls == 1 + 2 + 5 * (2 + 2 + 4)
    assert host_seconds_a_call(step, 0, calls=3) == (pytest.approx(0.25), 3)


def test_noise_is_spread_over_its_range_and_differs_by_seed():
    values = np.asarray(noise((64, 3, 64), "float32", 1))
    assert -1 <= values.min() < -0.99
    assert 0.99 < values.max() < 1
    assert abs(values.mean()) < 0.05
    assert values.std() == pytest.approx(math.sqrt(1 / 3), rel=0.05)
    assert (values != np.asarray(noise((64, 3, 64), "float32", 2))).mean() > 0.99


# ---- the processes -----------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Puts another program in the place of the parts."""

    def install(body: str) -> None:
        file = tmp_path / "parts.py"
        file.write_text(
            f"import json, os, sys\nprint(json.dumps({{'a': 1}}), flush=True)\n{body}\n"
        )
        monkeypatch.setattr(gpu_check, "SCRIPT", file)

    return install


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("", "ok"),
        ("import no_such_package.x", "skipped: No module named 'no_such_package'"),
        ("raise RuntimeError('an illegal access')", "failed: exit 1: RuntimeError: an illegal"),
        ("os.abort()", "failed: exit -6: it said nothing"),
    ],
)
def test_what_a_part_printed_is_kept_however_it_ends(script, body, status):
    script(body)
    outcome = run_child("any", {}, limit_s=60.0)
    assert outcome.rows == [{"a": 1}]
    assert outcome.status.startswith(status)


def test_a_part_that_hangs_is_ended_with_what_it_started_and_what_it_printed_is_kept(
    script, tmp_path, monkeypatch
):
    fifo = tmp_path / "hangs"
    os.mkfifo(fifo)
    script(
        "import signal, subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(fifo)!r}, 'w').write(str(child.pid))\n"
        "signal.pause()"
    )
    real_wait, started = subprocess.Popen.wait, []

    def wait(self, timeout=None):
        if timeout is None:
            return real_wait(self)
        pid = int(fifo.read_text())  # blocks until the part hangs
        started.append(os.pidfd_open(pid))
        raise subprocess.TimeoutExpired("parts.py", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    outcome = run_child("any", {}, limit_s=60.0)
    assert outcome.status == "failed: ended after 60 s"
    assert outcome.rows == [{"a": 1}]
    (grandchild,) = started
    assert select.select([grandchild], [], [], 60.0)[0] == [grandchild]  # readable: it ended
    os.close(grandchild)


@pytest.fixture
def told(monkeypatch):
    """Children that answer from a table; what they were asked is kept."""
    asked = []
    answers = {
        "probe": {"platform": "gpu", "device": "NVIDIA H200", "jax": "1", "python": "3"},
        "bandwidth": {"copy": 4e12, "read": 4e12},
    }

    def answer(name, given, limit_s, env=None):
        asked.append((name, given, env))
        rows = [answers[name]] if name in answers else []
        return Outcome(status="ok", seconds=1.0, rows=rows)

    monkeypatch.setattr(gpu_check, "run_child", answer)
    return asked


def test_the_whole_check_runs_every_part_once_and_boots_twice(told, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--one")
    check = Check("abcdef", tiny=False, scratch=tmp_path)
    check.run()
    names = [name for name, _, _ in told]
    assert names == [
        *("probe", "bandwidth", "correctness", "kernelbench", "steps", "steps"),
        *("boot", "boot", "build", "boot"),
    ]
    assert sum(gpu_check.LIMITS[name] for name in names) <= 8 * 60
    flags = [env for name, _, env in told if name == "steps"]
    assert flags == [None, {"XLA_FLAGS": "--one --xla_gpu_enable_command_buffer="}]
    assert all(g["copy"] == 4e12 for n, g, _ in told if n in ("kernelbench", "steps"))
    cold, second, loaded = (given["cache"] for name, given, _ in told if name == "boot")
    (build,) = ((given, env) for name, given, env in told if name == "build")
    assert cold == second != loaded == build[0]["cache"]
    assert build[0]["device"] == "NVIDIA H200"
    assert build[1] == {"JAX_PLATFORMS": "cpu"}


def test_parts_run_alone_and_bring_the_bandwidth_they_need(told, tmp_path):
    Check(["c"], tiny=False, scratch=tmp_path).run()
    assert [name for name, _, _ in told] == ["probe", "bandwidth", "kernelbench"]
    told.clear()
    Check(["a"], tiny=False, scratch=tmp_path).run()
    assert [name for name, _, _ in told] == ["probe", "correctness"]


def test_one_part_on_this_machine_is_written_and_printed_last(tmp_path, capsys):
    assert gpu_check.main(["--only", "b", "--tiny", "--out", str(tmp_path)]) == 0
    last = capsys.readouterr().out.splitlines()
    assert last[1].startswith("probe      cpu, jax ")
    assert last[2].startswith("bandwidth  copy ")
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert written["parts"]["bandwidth"]["rows"][0]["copy"] > 0
    assert (tmp_path / "gpu_check_bandwidth.csv").read_text().startswith("copy,read\n")
    assert (tmp_path / "gpu_check.txt").read_text().splitlines()[1] == last[1]


def test_a_part_that_is_none_is_a_usage_error(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--only", "a,x"])
    assert "no part 'x'; there are a, b, c, d, e, f" in capsys.readouterr().err


# ---- what is told ------------------------------------------------------------------------------


def outcome(*rows: dict, status: str = "ok") -> Outcome:
    return Outcome(status=status, seconds=1.0, rows=list(rows))


def test_the_summary_sets_the_aims_beside_what_was_reached():
    point = {"implementation": "ours", "num_kv_heads": 8, "rows": 64, "context": 8192}
    bench = outcome(
        point | {"share_of_copy": 0.9},
        point | {"share_of_copy": None, "implementation": "theirs"},
        point | {"share_of_copy": 0.5, "rows": 8, "context": 2048},
        status="failed: ended after 120 s",
    )
    assert dict(gpu_report.summary({"kernelbench": bench})) == {
        "kernelbench": "failed: ended after 120 s; 64 x 8192: ours 90% of copy (aim 85%); "
        "8 x 2048: ours 50% of copy (aim 70%)"
    }


def test_a_wrong_result_a_failed_part_and_a_build_that_does_not_load_are_failures():
    wrong = {"implementation": "x", "operation": "decode", "case": "c", "passed": False}
    outcomes = {
        "probe": outcome(),
        "correctness": outcome(wrong | {"error": 0.5, "why": ""}),
        "bandwidth": outcome(status="failed: exit 1: boom"),
        "steps": outcome(status="skipped: No module named 'flax'"),
        "boot of the build": outcome(
            {"executables": 4, "from_cache": 3, "executables_s": 1.0, "first_token_s": 0.1}
        ),
    }
    assert gpu_report.failures(outcomes) == ["bandwidth", "correctness", "boot of the build"]
    said = dict(gpu_report.summary(outcomes))
    assert "FAILED x decode c: error 0.5" in said["correctness"]
    assert said["steps"] == "skipped: No module named 'flax'"
