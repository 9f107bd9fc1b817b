"""The drawings and plots: they follow the records and the benches' files, and can be written."""

import csv
import struct
from dataclasses import asdict

import load_client
import pytest

pytest.importorskip(
    "matplotlib", reason="NOT CHECKED, drawings and plots: pip install -e '.[bench]' brings them"
)

from jaxserve.boot import build_engine
from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig
from jaxserve.plan.capture import plan_capture
from jaxserve.plan.pool import kv_bytes_per_block, plan_kv_pool
from jaxserve.runtime.sizing import decode_buckets
from scripts import bootbench, draw, drawing, picture, plot, servebench, widthbench
from tests.scripts.test_bootbench_measure import COLD, WARM
from tests.scripts.test_widthbench_measure import RECTANGLE, STREAMED


def png_size(path):
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    return struct.unpack(">II", header[16:24])


def drawn_boot():
    per_block = kv_bytes_per_block(draw.MODEL, draw.CONFIG.block_size, draw.CONFIG.dtype)
    pool = plan_kv_pool(draw.CONFIG, per_block, device=draw.DEVICE)
    capture = plan_capture(decode_buckets(draw.CONFIG), num_heads=draw.MODEL.num_heads)
    return pool, draw.boot_steps(pool, capture, draw.DEVICE)


def test_no_step_of_the_drawn_boot_passes_the_share_it_may_take():
    _, steps = drawn_boot()
    share = draw.CONFIG.gpu_memory_utilization * draw.DEVICE.total_bytes
    for step in steps:
        taken = step.weight_bytes + step.pool_bytes + step.workspace_bytes + step.decided_bytes
        assert taken + draw.DEVICE.reserve_bytes <= share, step.phase


def test_the_drawn_steps_are_the_phases_of_a_boot_report():
    config = EngineConfig(
        max_model_len=256,
        max_num_seqs=1,
        max_num_batched_tokens=32,
        **dict.fromkeys(("bucket_decode", "persist_inputs", "capture_decode"), False),
    )
    tiny = Checkpoint(name="tiny", config=widthbench.TINY, tokenizer=None, tensors=None)
    engine_phases = build_engine(tiny, config).seconds
    _, steps = drawn_boot()
    assert [step.phase for step in steps] == ["import", "checkpoint", *engine_phases, "app"]


def test_the_drawn_pool_is_decided_before_it_is_spent_and_spent_once():
    pool, steps = drawn_boot()
    by_phase = {step.phase: step for step in steps}
    assert by_phase["plan"].decided_bytes == pool.pool_bytes + draw.DEVICE.workspace_bytes
    assert by_phase["compile"].pool_bytes == 0
    assert by_phase["pool"].pool_bytes == by_phase["app"].pool_bytes == pool.pool_bytes
    assert by_phase["app"].decided_bytes == 0


def test_the_four_ceilings_are_the_posts_and_the_least_of_them_binds():
    plans = dict(draw.ceilings())
    *alone, together = plans.values()
    assert [plan.max_width for plan in alone] == [8192, 4096, 2560, 896]
    assert [plan.width_bound_by for plan in alone] == ["context", "flag", "budget", "limit"]
    assert (together.max_width, together.width_bound_by) == (896, "limit")


def test_three_drawings_are_written(tmp_path, capsys):
    assert draw.main([str(tmp_path)]) == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["boot_order.png", "picture.png", "width_axis.png"]
    for name in names:
        assert min(png_size(tmp_path / name)) > 900
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_same_drawing_is_the_same_file(tmp_path):
    paths = (tmp_path / "a.png", tmp_path / "b.png")
    for path in paths:
        drawing.save(picture.draw_picture, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_every_csv_of_the_benches_is_plotted(tmp_path, capsys, monkeypatch):
    assert bootbench.main(["--csv", str(tmp_path / "bootbench.csv")]) == 0
    made = {"rectangle": RECTANGLE, "streamed": STREAMED}
    monkeypatch.setattr(widthbench, "measure", lambda read, *args: made[read])
    paths = [str(tmp_path / name) for name in ("widthbench.csv", "widthbench_measured.csv")]
    assert widthbench.main(["--csv", paths[0], "--measure", "--measured-csv", paths[1]]) == 0
    write(tmp_path / "bootbench_measured.csv", bootbench.MeasuredBoots(COLD, WARM).records())
    load = load_client.Load(requests=2, concurrency=1, prompt_tokens=3, max_tokens=4, seed=0)
    result = servebench.Result(
        arm="aot",
        **asdict(load),
        **dict.fromkeys(("ready_s", "tokens_per_s", "ttft_p50_ms", "ttft_p99_ms"), 1.5),
        **dict.fromkeys(("itl_p50_ms", "itl_p99_ms"), 0.5),
        **dict.fromkeys(("compiles", "clients_that_met_one", "most_for_one"), None),
    )
    write(tmp_path / "servebench.csv", [asdict(result)])
    assert plot.main([str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    for name in plot.PLOTS:
        assert min(png_size(tmp_path / f"{name}.png")) > 200


def write(path, records):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def test_a_bench_that_has_not_run_is_named_and_not_plotted(tmp_path, capsys):
    assert plot.main([str(tmp_path)]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line.split("no ")[1].split(",")[0] for line in said] == [
        str(tmp_path / f"{name}.csv") for name in plot.PLOTS
    ]
    assert list(tmp_path.iterdir()) == []
