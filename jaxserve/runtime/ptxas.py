"""Registers, spills and shared memory of hand-written kernels, as the PTX assembler counts them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from importlib import util
from pathlib import Path

from jaxserve.plan.compiled import KernelFigures

# Packages that carry an assembler, newest first: one refuses PTX newer than itself.
_PACKAGED = (
    ("nvidia.cu13", "bin/ptxas"),
    ("triton", "backends/nvidia/bin/ptxas-blackwell"),
    ("triton", "backends/nvidia/bin/ptxas"),
)
_PALLAS_CALL = re.compile(r'custom_call_target="(?:__gpu\$xla\.gpu\.triton|mosaic_gpu\w*)"(.*)')
_FIGURES = re.compile(
    r"Function properties for (\w+)\s*"
    r"\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s*"
    r"[^\n]*?Used (\d+) registers(?:[^\n]*?, (\d+) bytes smem)?"
)


def hand_written(hlo: str) -> set[str]:
    """Names of the Pallas kernels a compiled module calls; "" stands for one without a name."""
    calls = _PALLAS_CALL.findall(hlo)
    return {name[1] if (name := re.search(r', name = "(\w+)"', c)) else "" for c in calls}


def kernel_figures(ptx: Iterable[Path], names: set[str]) -> tuple[KernelFigures, ...] | None:
    """Figures of the kernels called ``names`` among files of PTX, by name.

    None when one of them cannot be had: no assembler, one too old, or a kernel without PTX.
    """
    figures: dict[str, KernelFigures] = {}
    for file in ptx:
        text = file.read_text()
        if names.isdisjoint(re.findall(r"\.entry (\w+)", text)):
            continue
        gpu = re.search(r"^\.target (\w+)", text, re.MULTILINE)
        said = _assemble(file, gpu[1]) if gpu else ""
        for name, stores, loads, registers, shared in _FIGURES.findall(said):
            figures[name] = KernelFigures(
                name=name,
                registers=int(registers),
                spill_store_bytes=int(stores),
                spill_load_bytes=int(loads),
                static_shared_bytes=int(shared or 0),
            )
    if not names <= figures.keys():
        return None
    return tuple(figures[name] for name in sorted(names))


def assembler_release() -> str | None:
    """The release of the first assembler there is, as "13.4.59"; None without one."""
    for assembler in _assemblers():
        said = subprocess.run([assembler, "--version"], capture_output=True, text=True, check=False)
        release = re.search(r"\bV(\d+(?:\.\d+)+)", said.stdout)
        return release[1] if release else None
    return None


def _assemblers() -> Iterator[str]:
    on_path = shutil.which("ptxas")
    if on_path is not None:
        yield on_path
    for package, file in _PACKAGED:
        try:
            spec = util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for place in (spec.submodule_search_locations or ()) if spec else ():
            if (path := Path(place) / file).is_file():
                yield str(path)


def _assemble(ptx: Path, gpu: str) -> str:
    """What the first assembler that takes the file says of it; empty when none does."""
    for assembler in _assemblers():
        done = subprocess.run(
            [assembler, "-v", "--gpu-name", gpu, "-o", "/dev/null", str(ptx)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return done.stderr
    return ""
