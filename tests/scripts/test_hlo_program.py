"""Copies and descriptions out of a compiled program's text, and a layer out of its launches."""

import pytest

from scripts.hlo_program import Program, array
from scripts.step_cases import one_layer

# In the form XLA prints, shortened.
HLO = """\
HloModule jit_step, is_scheduled=true

%fused_scatter.4 (p0: bf16[9,2,16,64], p1: bf16[8,2,64]) -> bf16[9,2,16,64] {
  %p0 = bf16[9,2,16,64]{3,2,1,0} parameter(0)
  %p1 = bf16[8,2,64]{2,1,0} parameter(1)
  ROOT %scatter.1 = bf16[9,2,16,64]{3,2,1,0} scatter(%p0, %p1), metadata={op_name="a/scatter"}
}

%fused_transpose (p0: bf16[128,64]) -> bf16[64,128] {
  %p0.1 = bf16[128,64]{1,0} parameter(0)
  ROOT %t.1 = bf16[64,128]{1,0} transpose(%p0.1), metadata={op_name="jit(step)/transpose"}
}

%fused_norm (p0: bf16[8,64]) -> bf16[8,128] {
  %m.1 = f32[8,64]{1,0} multiply(%x, %x), metadata={op_name="jit(step)/mul"}
  %r.1 = f32[8]{0} rsqrt(%m.1), metadata={op_name="jit(step)/norm/rsqrt"}
  ROOT %d.1 = bf16[8,128]{1,0} dot(%r.1, %y), metadata={op_name="jit(step)/dot_general"}
}

%body.1 (state: (bf16[9,2,16,64])) -> (bf16[9,2,16,64]) {
  %state = (bf16[9,2,16,64]{3,2,1,0}) parameter(0)
  %copy.7 = bf16[9,2,16,64]{3,2,1,0} copy(%g)
}

ENTRY %main.1 (params_layers_0__qkv_ED.1: bf16[128,64], pool: bf16[9,2,16,64]) -> bf16[8,128] {
  %params_layers_0__qkv_ED.1 = bf16[128,64]{1,0} parameter(0)
  %pool = bf16[9,2,16,64]{3,2,1,0} parameter(1)
  %bitcast.1 = bf16[1,128,64]{2,1,0} bitcast(%params_layers_0__qkv_ED.1)
  %scatter_fusion.4 = bf16[9,2,16,64]{3,2,1,0} fusion(%pool, %new), kind=kInput, \
calls=%fused_scatter.4
  %transpose_fusion = bf16[64,128]{1,0} fusion(%bitcast.1), kind=kInput, calls=%fused_transpose
  %small = bf16[8,64]{1,0} copy(%other)
  ROOT %norm_fusion.2 = bf16[8,128]{1,0} fusion(%small, %bitcast.1), kind=kCustom, \
calls=%fused_norm, metadata={op_name="jit(step)/dot_general"}
}
"""
WEIGHT = array("bf16", (128, 64))
POOL = array("bf16", (9, 2, 16, 64))


def test_a_transposed_weight_and_a_pool_copied_in_a_loop_are_copies_and_a_scatter_is_not():
    assert Program(HLO).copies({WEIGHT, POOL}) == ["copy.7", "transpose_fusion"]
    assert Program(HLO).copies({WEIGHT}) == ["transpose_fusion"]
    assert Program(HLO).copies(set()) == []


def test_arrays_are_the_same_whatever_the_order_of_their_sides():
    assert array("bf16", (64, 1, 128)) == WEIGHT
    assert array("f32", (128, 64)) != WEIGHT


def test_a_launch_is_described_by_its_operations_and_the_weights_it_reads():
    assert Program(HLO).describe("norm_fusion_2") == "mul rsqrt dot_general [qkv_ED]"
    assert Program(HLO).describe("transpose_fusion") == "transpose [qkv_ED]"
    assert Program(HLO).describe("no_such_thing") == ""


def sequence(*names: str) -> str:
    lines = [
        f"{i:03}: kCustomKernel [source | sink] {name} grid: [1, 1, 1] threads: [32, 1, 1]"
        for i, name in enumerate(names, 1)
    ]
    return "\n".join(lines) + "\n"


def test_a_layer_goes_from_one_attention_kernel_to_the_next():
    step = sequence("embed", "walk", "out", "ffn", "walk", "out2", "ffn2", "walk", "head")
    assert [launch.name for launch in one_layer(step, {"walk"}, 3)] == ["walk", "out2", "ffn2"]


def test_what_is_computed_once_does_not_count_for_the_layer_it_stands_in():
    step = sequence("walk", "once", "out", "walk", "out", "walk", "out", "walk", "head")
    assert [launch.name for launch in one_layer(step, {"walk"}, 4)] == ["walk", "out"]


def test_layers_that_launch_differently_or_no_marking_kernel_are_an_error():
    uneven = sequence("walk", "out", "walk", "out", "ffn", "walk")
    with pytest.raises(ValueError, match=r"layers launch \[2, 3\]"):
        one_layer(uneven, {"walk"}, 3)
    with pytest.raises(ValueError, match="runs 4 times a step"):
        one_layer(uneven, {"walk"}, 4)
