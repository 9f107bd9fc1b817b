"""The tables of nanoserve's build log (days 56 and 61), cell for cell."""

import csv
from pathlib import Path

import pytest

from scripts import bootbench, widthbench

GOLDEN = Path(__file__).parents[1] / "golden"


def read_golden(name):
    with (GOLDEN / name).open(newline="") as file:
        header, *rows = [tuple(line) for line in csv.reader(file)]
    return header, rows


def test_every_deployment_wants_and_keeps_the_list_of_day_56():
    header, rows = read_golden("bootbench_wanted.csv")
    assert header == bootbench.WANTED_HEADER
    assert [bootbench.wanted_row(bootbench.price(*d)) for d in bootbench.DEPLOYMENTS] == rows


def test_every_trim_moves_into_latency_what_day_56_says():
    header, rows = read_golden("bootbench_trim.csv")
    assert header == bootbench.TRIM_HEADER
    assert [bootbench.trim_row(bootbench.price(*d)) for d in bootbench.DEPLOYMENTS] == rows


def test_both_reads_have_the_lists_of_day_61():
    header, rows = read_golden("widthbench_lists.csv")
    assert header == widthbench.LIST_HEADER
    lists = [
        widthbench.list_row(widthbench.price(slots, context, tile))
        for slots, context in widthbench.DEPLOYMENTS
        for tile in (None, widthbench.TILE)
    ]
    assert lists == rows


def test_the_three_ratios_are_those_of_day_61():
    header, rows = read_golden("widthbench_ratios.csv")
    assert header == widthbench.RATIO_HEADER
    for row in rows:
        slots, context = int(row[0]), int(row[1])
        pair = (
            widthbench.price(slots, context, None),
            widthbench.price(slots, context, widthbench.TILE),
        )
        assert widthbench.ratio_row(slots, context, widthbench.ratios(*pair)) == row


def test_another_limit_does_not_reproduce_the_table():
    _, rows = read_golden("bootbench_wanted.csv")
    lists = [
        bootbench.wanted_row(bootbench.price(slots, context, limit=72))
        for slots, context in bootbench.DEPLOYMENTS
    ]
    assert lists != rows


@pytest.mark.parametrize(
    ("bench", "goldens"),
    [
        (bootbench, ("bootbench_wanted.csv", "bootbench_trim.csv")),
        (widthbench, ("widthbench_lists.csv", "widthbench_ratios.csv")),
    ],
)
def test_a_bench_prints_every_golden_row(bench, goldens, capsys):
    bench.main([])
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name in goldens:
        for row in read_golden(name)[1]:
            assert " ".join(row).split() in printed


def test_bootbench_writes_one_csv_line_a_deployment(tmp_path):
    path = tmp_path / "boot.csv"
    bootbench.main(["--csv", str(path)])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(bootbench.DEPLOYMENTS)
    last = rows[-1]
    assert (last["wanted"], last["kept"], last["arena_bytes"]) == ("576", "63", str(28 * 2**20))
    assert float(last["saved_startup_seconds"]) == 25.65


def test_widthbench_writes_one_csv_line_a_cache_and_read(tmp_path):
    path = tmp_path / "width.csv"
    widthbench.main(["--csv", str(path)])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(widthbench.DEPLOYMENTS)
    rectangle, streamed = rows[-2:]
    assert (rectangle["read"], rectangle["shapes"]) == ("rectangle", "576")
    assert (streamed["read"], streamed["shapes"]) == ("streamed", "9")
    assert float(rectangle["arena_ratio"]) == 1.0
    assert float(streamed["arena_ratio"]) == 256.0
