"""Compiles attention kernels for an absent GPU: the child process of kernel_ledger.py.

Reads cases as JSON from standard input, all of one target, and prints the ledger lines of each.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from compile_child import print_result, read_jobs
from jax.sharding import NamedSharding, PartitionSpec
from jaxserve_kernels import paged_attention, paged_prefill
from kernel_metrics import limits, load_bits, resident_programs

from jaxserve.runtime.cross_compile import absent_gpu
from jaxserve.runtime.ptxas import assembler_release, hand_written, kernel_figures
from jaxserve.runtime.targets import GpuTarget, load_target
from jaxserve.runtime.thunks import list_launches

# A Llama 3 model's heads at 64 rows of up to 8k tokens. The number of blocks is a prime, which
# divides the size of no other array.
_HEADS, _KV_HEADS = 32, 8
_ROWS, _BLOCKS_A_ROW, _BLOCK_SIZE, _BLOCKS = 64, 512, 16, 4099
_PREFILL_TOKENS, _SEGMENTS = 2048, 8
_NARROW = ("float8_e4m3fn", "int8")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


@dataclass(frozen=True, order=True)
class Case:
    """One compilation: an operation by an implementation, the pool's dtype, the head size."""

    target: str
    operation: str
    implementation: str
    dtype: str
    head_size: int


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the ledger: a kernel that a case launches. ``registers`` are those of a thread.

    ``spill_bytes`` are stores and loads together, ``shared_bytes`` fixed and asked for at launch
    together, ``resident_programs`` how many a multiprocessor holds, and ``load_bits`` the width of
    the narrowest load from the pool; None: the kernel loads nothing from it, or by TMA.
    """

    target: str
    operation: str
    implementation: str
    dtype: str
    head_size: int
    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    resident_programs: int
    load_bits: int | None
    jax: str
    ptxas: str

    @property
    def key(self) -> tuple[str, str, str, str, int, str]:
        """What two ledgers are joined by."""
        case = (self.target, self.operation, self.implementation, self.dtype, self.head_size)
        return (*case, self.kernel)

    @property
    def name(self) -> str:
        """The key as people read it."""
        return " ".join(map(str, self.key))


def lowering(case: Case, sharding: jax.sharding.Sharding) -> Callable[[], jax.stages.Lowered]:
    """A call that traces and lowers ``case``'s operation from specs."""
    spec = partial(jax.ShapeDtypeStruct, sharding=sharding)
    narrow = case.dtype in _NARROW
    q = spec((1, _HEADS, case.head_size), jnp.bfloat16 if narrow else case.dtype)
    pool = spec((_BLOCKS, _KV_HEADS, _BLOCK_SIZE, case.head_size), jnp.dtype(case.dtype))
    options: dict[str, Any] = {
        "scale": case.head_size**-0.5,
        "implementation": case.implementation,
    }
    if narrow:
        options |= {"k_scale": 0.5, "v_scale": 0.5}

    def tokens(n: int) -> jax.ShapeDtypeStruct:
        return spec((n, *q.shape[1:]), q.dtype)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return spec(shape, jnp.int32)

    if case.operation == "decode":
        operation = paged_attention
        rest = (ints(_ROWS, _BLOCKS_A_ROW), ints(_ROWS))
        q = tokens(_ROWS)
    else:
        operation = paged_prefill
        rest = (ints(_SEGMENTS, _BLOCKS_A_ROW), ints(_SEGMENTS), ints(_SEGMENTS + 1))
        q = tokens(_PREFILL_TOKENS)
    return lambda: jax.jit(partial(operation, **options)).lower(q, pool, pool, *rest)


def measure_case(case: Case, target: GpuTarget, mesh: jax.sharding.Mesh) -> Iterator[Line]:
    """Compile one case and yield a line for each hand-written kernel in it."""
    with tempfile.TemporaryDirectory(prefix="jaxserve-kernel-") as scratch:
        dump = Path(scratch)
        lower = lowering(case, NamedSharding(mesh, PartitionSpec()))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = lower()
        compiled = lowered.compile(
            compiler_options={"xla_dump_to": scratch, "xla_dump_emitter_re": "ptx"}
        )
        hlo = compiled.as_text() or ""
        (thunks,) = dump.glob("*.thunk_sequence.txt")
        launches = {k.name: k for k in list_launches(thunks.read_text())}
        ptx = sorted(dump.glob("*.ptx"))
        kernels = kernel_figures(ptx, hand_written(hlo))
        if not kernels:
            raise RuntimeError(f"{case}: no figures of its kernels {hand_written(hlo)}")
        text = "".join(file.read_text() for file in ptx)
    for kernel in kernels:
        launch = launches[kernel.name]
        shared = kernel.static_shared_bytes + launch.dynamic_shared_bytes
        yield Line(
            **asdict(case),
            kernel=kernel.name,
            registers=kernel.registers,
            spill_bytes=kernel.spill_store_bytes + kernel.spill_load_bytes,
            shared_bytes=shared,
            threads=launch.threads,
            resident_programs=resident_programs(
                limits(target), launch.threads, kernel.registers, shared
            ),
            load_bits=load_bits(text, kernel.name, pool_operands(hlo, kernel.name)),
            jax=jax.__version__,
            ptxas=assembler_release() or "",
        )


def pool_operands(hlo: str, kernel: str) -> list[int]:
    """Which operands of a kernel's call are pools, told by their number of elements."""
    (layouts,) = {
        found[1]
        for line in hlo.splitlines()
        if f', name = "{kernel}"' in line
        and (found := re.search(r"operand_layout_constraints=\{(.*?)\}, api", line))
    }
    shapes = [[int(n) for n in dims.split(",") if n] for dims in _SHAPE.findall(layouts)]
    return [i for i, shape in enumerate(shapes) if shape and math.prod(shape) % _BLOCKS == 0]


def main() -> None:
    """Measure the cases of standard input, a line of JSON each on standard output."""
    cases = [Case(**case) for case in read_jobs()]
    jax.config.update("jax_enable_compilation_cache", False)
    (name,) = {case.target for case in cases}
    target = load_target(name)
    mesh = absent_gpu(target.text)
    for case in cases:
        print_result([asdict(line) for line in measure_case(case, target, mesh)])


if __name__ == "__main__":
    main()
