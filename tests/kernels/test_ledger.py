"""Kernels and steps compiled for GPUs that are not here, held to the committed ledgers."""

import importlib.util
import sys
from dataclasses import astuple, replace
from itertools import product

import pytest

from scripts import kernel_ledger, step_ledger
from scripts.kernel_ledger import KERNELS, MAIN_SHAPES, Line, all_cases, part_of_cases
from scripts.step_ledger import MODELS, ROWS, Step

needs_compiler = pytest.mark.skipif(
    sys.version_info < (3, 12) or not importlib.util.find_spec("jax_cuda13_plugin"),
    reason="NOT CHECKED, kernels for NVIDIA GPUs are compiled on Python 3.12 and newer with "
    "pip install -e '.[test,cross]'",
)
WORKERS = 2
# One row, whose output head is no matrix product; up to 64 in kernels alone; with cuBLAS.
STEPS = (("llama-3.1-8b", 1), ("llama-3.2-1b", 64), ("llama-3.2-1b", 256))
LINE = Line(
    target="h200",
    operation="decode",
    implementation="streamed_triton",
    tokens=64,
    dtype="bfloat16",
    head_size=128,
    kernel="walk",
    registers=100,
    spill_bytes=0,
    shared_bytes=20000,
    threads=128,
    resident_programs=10,
    load_bits=128,
    jax="0.11.2",
    ptxas="13.0.88",
)
STEP = Step(
    target="h200",
    model="llama-3.2-1b",
    rows=8,
    layers=16,
    launches=200,
    launches_per_layer=8,
    loop_launches=0,
    branch_launches=30,
    temp_bytes=1000,
    pool_array_bytes=2000,
    alias_bytes=5000,
    donated_bytes=5000,
    copies="",
    jax="0.11.2",
)


@needs_compiler
@pytest.mark.timeout(900)
def test_no_kernel_is_worse_than_its_line_in_the_ledger():
    fresh = kernel_ledger.measure(part_of_cases(), WORKERS)
    assert kernel_ledger.complaints(kernel_ledger.read_ledger(kernel_ledger.LEDGER), fresh) == []


@needs_compiler
@pytest.mark.timeout(900)
def test_no_decode_step_launches_more_or_copies_more_than_the_ledger_says():
    fresh = [m.step for m in step_ledger.measure(STEPS, WORKERS, layers=4)]
    assert step_ledger.complaints(step_ledger.read_steps(step_ledger.LEDGER), fresh) == []


def test_the_part_meets_every_kernel_on_every_target_and_its_every_dtype_and_head_size():
    part = set(part_of_cases())
    assert part < set(all_cases())
    for kernel in KERNELS:
        mine = part & set(kernel.cases())
        assert {c.dtype for c in mine} == set(kernel.dtypes)
        assert {c.head_size for c in mine} == set(kernel.head_sizes)
        assert {(c.target, (c.dtype, c.head_size)) for c in mine} >= {
            (target, shape) for target in kernel.targets for shape in MAIN_SHAPES
        }


def test_the_committed_ledger_has_every_case_under_two_versions_of_jax_and_no_complaint():
    lines = kernel_ledger.read_ledger(kernel_ledger.LEDGER)
    versions = {line.jax for line in lines}
    assert {"0.11.2"} < versions
    for version in versions:
        assert {line.case for line in lines if line.jax == version} == set(all_cases())
    assert kernel_ledger.complaints(lines, lines) == []
    main = {c for c in all_cases() if (c.dtype, c.head_size) in MAIN_SHAPES}
    # One reads by TMA, the other neither pool nor weights.
    others = {c for c in main if "streamed_mosaic" in astuple(c) or "rotate_write" in astuple(c)}
    assert {line.case for line in lines if line.load_bits is not None} >= main - others


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"spill_bytes": 4}, "4 bytes spilled"),
        ({"load_bits": 64}, "streams 64 bits at a time, must be 128"),
        ({"load_bits": None}, "load_bits None, was 128"),
        ({"registers": 111}, "registers 111, was 100"),
        ({"shared_bytes": 22001}, "shared_bytes 22001, was 20000"),
        ({"resident_programs": 8}, "resident_programs 8, was 10"),
        ({"resident_programs": 0}, "no multiprocessor has 20000 bytes"),
        ({"kernel": "another"}, "is not in the ledger"),
    ],
)
def test_a_kernel_that_got_worse_is_told(change, complaint):
    told = kernel_ledger.complaints([LINE], [replace(LINE, **change)])
    assert complaint in told[0]
    assert replace(LINE, **change).name in told[0]


@pytest.mark.parametrize(
    "change", [{"registers": 110}, {"registers": 60}, {"resident_programs": 9}, {"threads": 256}]
)
def test_a_kernel_within_a_tenth_or_better_passes(change):
    assert kernel_ledger.complaints([LINE], [replace(LINE, **change)]) == []


def test_a_jax_without_a_line_of_a_kernel_is_held_to_the_newest_that_has_one():
    lines = [replace(LINE, jax="0.9.9", registers=10), replace(LINE, jax="0.12.0.1"), LINE]
    assert kernel_ledger.complaints(lines, [replace(LINE, jax="0.13.0")]) == []
    (told,) = kernel_ledger.complaints(lines, [replace(LINE, jax="0.13.0", registers=120)])
    assert "was 100 (jax 0.12.0.1" in told


def test_a_ledger_is_read_as_it_was_written(tmp_path):
    lines = (LINE, replace(LINE, kernel="by_tma", load_bits=None))
    kernel_ledger.write_ledger(tmp_path / "k.csv", lines)
    assert kernel_ledger.read_ledger(tmp_path / "k.csv") == lines
    step_ledger.write_lines(tmp_path / "s.csv", [STEP])
    assert step_ledger.read_steps(tmp_path / "s.csv") == [STEP]


def test_a_new_measurement_replaces_the_lines_of_its_own_jax_only(tmp_path, monkeypatch, capsys):
    file = tmp_path / "k.csv"
    kernel_ledger.write_ledger(file, [LINE, replace(LINE, jax="0.12.0")])
    fresh = (replace(LINE, jax="0.12.0", registers=90),)
    monkeypatch.setattr(kernel_ledger, "measure", lambda *args, **kwargs: fresh)
    assert kernel_ledger.main(["--csv", str(file)]) == 0
    assert kernel_ledger.read_ledger(file) == (LINE, *fresh)
    assert kernel_ledger.main(["--csv", str(file), "--check"]) == 0
    monkeypatch.setattr(
        kernel_ledger, "measure", lambda *args, **kwargs: (replace(LINE, spill_bytes=8),)
    )
    assert kernel_ledger.main(["--csv", str(file), "--check"]) == 1
    assert "8 bytes spilled" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"copies": "copy.1 copy.2"}, "copies a weight or the pool: copy.1 copy.2"),
        ({"alias_bytes": 4999}, "updates 4999 bytes in place of the 5000"),
        ({"temp_bytes": 2000}, "has room for a copy of a pool array of 2000"),
        ({"temp_bytes": 1101}, "a workspace of 1101 bytes, was 1000"),
        ({"launches_per_layer": 9}, "launches 9 a layer, was 8"),
        ({"launches": 201}, "launches 201, was 200"),
        ({"rows": 9}, "is not in the ledger"),
    ],
)
def test_a_step_that_got_worse_is_told(change, complaint):
    told = step_ledger.complaints([STEP], [replace(STEP, **change)])
    assert complaint in told[0]


def test_a_better_step_passes_and_a_shorter_one_is_held_to_its_layers():
    better = replace(STEP, launches=150, launches_per_layer=7, temp_bytes=900)
    assert step_ledger.complaints([STEP], [better]) == []
    assert step_ledger.complaints([STEP], [replace(STEP, layers=4, temp_bytes=1900)]) == []


def test_the_committed_steps_are_of_whole_models_copy_nothing_and_launch_eight_a_layer_at_most():
    steps = step_ledger.read_steps(step_ledger.LEDGER)
    assert {(s.model, s.rows) for s in steps} == set(product(MODELS, ROWS))
    assert all(s.layers == MODELS[s.model].num_layers for s in steps)
    assert step_ledger.complaints(steps, steps) == []
    assert {s.rows: s.launches_per_layer for s in steps} == {1: 6, 8: 6, 64: 6, 256: 8}
