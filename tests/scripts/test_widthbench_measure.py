"""A measured boot of both reads: what is counted, and that the three ratios stay apart."""

import csv
from dataclasses import replace

from scripts import widthbench
from scripts.widthbench import MeasuredList, measured_ratios, measured_row

RECTANGLE = MeasuredList(
    slots=8,
    context=2048,
    read="rectangle",
    tile=None,
    shapes=64,
    trace_seconds=8.0,
    compile_seconds=23.0,
    run_seconds=1.0,
    modelled_arena_bytes=512 * 1024,
    temp_bytes=3 * 2**20,
)
STREAMED = replace(
    RECTANGLE,
    read="streamed",
    tile=32,
    shapes=4,
    trace_seconds=1.0,
    compile_seconds=2.5,
    run_seconds=0.5,
    modelled_arena_bytes=8 * 1024,
    temp_bytes=2**16,
)


def test_the_streamed_boot_has_the_row_axis_only_and_a_smaller_workspace():
    rectangle = widthbench.measure("rectangle", 1, 256)
    streamed = widthbench.measure("streamed", 1, 256)
    assert (rectangle.shapes, rectangle.tile) == (2, None)  # widths 128 and 256
    assert (streamed.shapes, streamed.read) == (1, "streamed")
    assert 256 % streamed.tile == 0
    assert rectangle.modelled_arena_bytes == 256 * widthbench.TINY.num_heads * 4
    assert streamed.modelled_arena_bytes == streamed.tile * widthbench.TINY.num_heads * 4
    assert rectangle.temp_bytes > streamed.temp_bytes > 0
    for measured in (rectangle, streamed):
        assert min(measured.trace_seconds, measured.compile_seconds, measured.run_seconds) > 0


def test_each_ratio_comes_from_its_own_figures():
    ratios = measured_ratios(RECTANGLE, STREAMED)
    assert (ratios.shapes, ratios.startup, ratios.arena) == (16, 8, 48)
    slower = measured_ratios(RECTANGLE, replace(STREAMED, compile_seconds=14.5))
    assert (slower.shapes, slower.startup, slower.arena) == (16, 2, 48)


def test_a_line_gives_startup_as_a_whole_and_a_shape():
    assert measured_row(RECTANGLE) == (
        *("rectangle", "64", "8.00", "23.00", "1.00", "32.00", "500"),
        *("512.00 KiB", "3.00 MiB"),
    )
    assert measured_row(STREAMED)[0] == "streamed, 32-key tiles"
    assert len(measured_row(STREAMED)) == len(widthbench.MEASURED_HEADER)


def test_measure_prints_both_tables_and_writes_a_line_a_read(monkeypatch, tmp_path, capsys):
    made = {"rectangle": RECTANGLE, "streamed": STREAMED}
    monkeypatch.setattr(widthbench, "measure", lambda read, *args: made[read])
    path = tmp_path / "measured.csv"
    assert widthbench.main(["--measure", "--measured-csv", str(path)]) == 0
    with path.open(newline="") as file:
        rectangle, streamed = csv.DictReader(file)
    assert (rectangle["read"], rectangle["shapes"], rectangle["tile"]) == ("rectangle", "64", "")
    assert float(streamed["startup_seconds"]) == 4.0
    assert [float(streamed[f"{n}_ratio"]) for n in ("shapes", "startup", "arena")] == [16, 8, 48]
    assert capsys.readouterr().out.splitlines()[-1].split() == ["8", "2048", "16.0x", "8.0x", "48x"]


def test_the_slots_and_context_that_are_measured_fill_the_limit_exactly():
    list_ = widthbench.price(widthbench.MEASURED_SLOTS, widthbench.MEASURED_CONTEXT, None)
    assert list_.shapes == 64
