"""Registers and spills out of the assembler's report."""

import pytest

from jaxserve.plan.compiled import KernelFigures
from jaxserve.runtime import ptxas
from jaxserve.runtime.ptxas import hand_written, kernel_figures

HLO = """\
  %call.1 = f32[8]{0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", metadata={}, \
backend_config={debug = false, ir = "ML\\EFR", name = "walk_tiles", num_warps = 4 : i32}
  %call.2 = f32[8]{0} custom-call(%x), custom_call_target="__cublas$gemm", name = "not_ours"
"""
PTX = ".version 9.0\n.target sm_90a\n.visible .entry walk_tiles(\n)\n"
# What ptxas 13.4 printed for a Pallas kernel, with other numbers.
REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'walk_tiles' for 'sm_90a'
ptxas info    : Function properties for walk_tiles
    16 bytes stack frame, 24 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 177 registers, used 1 barriers, 512 bytes smem
"""


@pytest.fixture
def assembler(tmp_path, monkeypatch):
    """Puts an assembler on PATH that prints REPORT if it is called as ptxas is."""

    def install(body: str) -> None:
        tool = tmp_path / "ptxas"
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    monkeypatch.setattr(ptxas, "_PACKAGED", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    return install


@pytest.fixture
def files(tmp_path):
    ours, others = tmp_path / "a.ptx", tmp_path / "b.ptx"
    ours.write_text(PTX)
    others.write_text(PTX.replace("walk_tiles", "loop_fusion"))
    return [ours, others]


def test_pallas_kernels_are_found_by_name_in_the_compiled_module():
    assert hand_written(HLO) == {"walk_tiles"}
    assert hand_written('custom_call_target="mosaic_gpu_v2", backend_config={}') == {""}
    assert hand_written("ROOT %fusion = f32[] fusion(%x)") == set()


def test_registers_and_spills_are_read_from_the_assemblers_report(assembler, files):
    assembler(
        f'[ "$*" = "-v --gpu-name sm_90a -o /dev/null {files[0]}" ] || exit 1\n'
        f"cat >&2 <<'X'\n{REPORT}X"
    )
    assert kernel_figures(files, {"walk_tiles"}) == (
        KernelFigures(
            name="walk_tiles",
            registers=177,
            spill_store_bytes=24,
            spill_load_bytes=28,
            static_shared_bytes=512,
        ),
    )


def test_a_kernel_without_fixed_shared_memory_has_none_of_it(assembler, files):
    assembler(f"cat >&2 <<'X'\n{REPORT.replace(', 512 bytes smem', '')}X")
    found = kernel_figures(files, {"walk_tiles"})
    assert found is not None
    (figures,) = found
    assert (figures.registers, figures.static_shared_bytes) == (177, 0)


def test_an_assembler_too_old_for_the_file_gives_no_figures(assembler, files):
    assembler("echo 'Unsupported .version 9.0' >&2; exit 255")
    assert kernel_figures(files, {"walk_tiles"}) is None


@pytest.mark.usefixtures("assembler")
def test_without_an_assembler_there_are_no_figures(files):
    assert kernel_figures(files, {"walk_tiles"}) is None


@pytest.mark.usefixtures("assembler")
def test_a_kernel_without_ptx_has_no_figures_and_no_kernel_needs_none(files):
    assert kernel_figures(files, {"another"}) is None
    assert kernel_figures(files, set()) == ()
