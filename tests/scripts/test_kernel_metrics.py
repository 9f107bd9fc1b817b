"""Widths of loads out of PTX, and programs a multiprocessor holds."""

import pytest

from jaxserve.runtime.targets import load_target
from scripts.kernel_metrics import Limits, limits, load_bits, resident_programs

# Written by hand in the forms that LLVM and Triton print.
PTX = """\
.visible .entry other(
	.param .u64 .ptr .align 32 other_param_0
)
{
	ld.param.b64 	%rd1, [other_param_0];
	ld.global.b8 	%rs1, [%rd1];
}
.visible .entry walk(
	.param .u64 .ptr .align 32 walk_param_0,
	.param .u64 .ptr .align 32 walk_param_1,
	.param .u64 .ptr .align 32 walk_param_2,
	.param .u64 .ptr .align 32 walk_param_3
)
.reqntid 128, 1, 1
{
	ld.param::entry.b64 	%rd1, [walk_param_0];
	ld.param::entry.b64 	%rd2, [walk_param_1];
	ld.param::entry.b64 	%rd3, [walk_param_2];
	ld.param::entry.b64 	%rd4, [walk_param_3];
	cvta.to.global.u64 	%rd11, %rd1;
	mov.b64 	%rd40, %rd2;
$L__BB0_1:
	add.s64 	%rd41, %rd40, %rd90;
	ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd11 + 16 ];
	@!%p1 ld.global.v2.b32 { %r5, %r6 }, [ %rd41 + 0 ];
	@%p2 ld.global.L1::evict_last.b32 { %r9 }, [ %rd3 + 0 ];
	mul.wide.s32 	%rd31, %r9, 4;
	add.s64 	%rd32, %rd4, %rd31;
	cp.async.cg.shared.global [ %r7 + 0 ], [ %rd32 + 0 ], 0x10, %p2;
	cp.async.ca.shared.global [ %r7 + 8 ], [ %rd40 + 0 ], 8;
	ld.shared.b16 	%rs2, [%r7];
	st.global.b32 	[%rd11], %r1;
	add.s64 	%rd40, %rd41, 64;
}
"""


@pytest.mark.parametrize(
    ("parameters", "bits"), [([0], 128), ([1], 64), ([2], 32), ([3], 128), ([0, 3], 128)]
)
def test_the_narrowest_load_through_a_pointer_is_found(parameters, bits):
    assert load_bits(PTX, "walk", parameters) == bits


def test_a_pointer_that_only_a_loop_moves_is_followed():
    narrow = PTX.replace("add.s64 	%rd41, %rd40, %rd90;", "ld.global.b16 %rs3, [%rd50];")
    narrow = narrow.replace("add.s64 	%rd40, %rd41, 64;", "add.s64 %rd50, %rd40, 64;")
    assert load_bits(narrow, "walk", [1]) == 16


def test_an_index_that_was_loaded_does_not_make_a_pointer():
    assert load_bits(PTX, "walk", [2]) == 32  # its value moves %rd32, which stays parameter 3's


def test_a_pointer_that_is_only_written_through_has_no_width():
    silent = PTX.replace("ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd11 + 16 ];", "")
    assert load_bits(silent, "walk", [0]) is None


def test_a_kernel_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="no kernel absent"):
        load_bits(PTX, "absent", [0])


def test_limits_are_those_of_the_compute_capability():
    found = {name: limits(load_target(name)) for name in ("h200", "a100", "l40")}
    assert found == {
        "h200": Limits(programs=32, threads=2048, registers=65536, shared_bytes=233472),
        "a100": Limits(programs=32, threads=2048, registers=65536, shared_bytes=167936),
        "l40": Limits(programs=24, threads=1536, registers=65536, shared_bytes=102400),
    }


# Worked by hand from the tables of the CUDA programming guide and occupancy calculator.
@pytest.mark.parametrize(
    ("threads", "registers", "shared", "programs"),
    [
        (32, 16, 0, 32),  # the limit of programs
        (1024, 32, 0, 2),  # threads: 2048 of them
        (128, 80, 21504, 6),  # registers: 2560 a warp, 24 warps
        (128, 255, 0, 2),  # 8160, rounded to 8192 a warp: 8 warps
        (256, 72, 0, 3),  # 2304 a warp: 28 warps, 3 programs of 8
        (128, 32, 113664, 2),  # shared: 114688 with what the system reserves, twice
        (128, 32, 231424, 1),
        (128, 32, 232449, 0),
    ],
)
def test_programs_that_fit_an_h200s_multiprocessor(threads, registers, shared, programs):
    assert resident_programs(limits(load_target("h200")), threads, registers, shared) == programs
