"""Compiles attention kernels for an absent GPU: the child process of kernel_ledger.py.

Reads cases as JSON from standard input, all of one target, and prints the ledger lines of each.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from compile_child import print_result, read_jobs
from jax.sharding import NamedSharding, PartitionSpec
from jaxserve_kernels import fused, paged_attention, paged_prefill
from kernel_metrics import limits, load_bits, resident_programs

from jaxserve.runtime.cross_compile import absent_gpu
from jaxserve.runtime.ptxas import assembler_release, hand_written, kernel_figures
from jaxserve.runtime.targets import GpuTarget, load_target
from jaxserve.runtime.thunks import Launch, list_launches

# A Llama 3 model's heads and rows of up to 8k tokens. The number of blocks is a prime, so that no
# other array has as many elements as a pool.
_HEADS, _KV_HEADS = 32, 8
_BLOCKS_A_ROW, _BLOCK_SIZE, _BLOCKS = 512, 16, 4099
_SEGMENTS = 8
_NARROW = ("float8_e4m3fn", "int8")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


@dataclass(frozen=True, order=True)
class Case:
    """One compilation: an operation on ``tokens`` by an implementation, the pool's dtype."""

    target: str
    operation: str
    implementation: str
    tokens: int
    dtype: str
    head_size: int


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the ledger: a kernel that a case launches. ``registers`` are those of a thread.

    ``spill_bytes`` are stores and loads together, ``shared_bytes`` fixed and asked for at launch
    together, ``resident_programs`` how many a multiprocessor holds, and ``load_bits`` the width of
    the narrowest load from what the operation streams (the pool, or a product's weights); None: the
    kernel loads nothing of it, or by TMA.
    """

    target: str
    operation: str
    implementation: str
    tokens: int
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
    def case(self) -> Case:
        """What was compiled."""
        return Case(**{f.name: getattr(self, f.name) for f in fields(Case)})

    @property
    def key(self) -> tuple[Case, str]:
        """What two ledgers are joined by."""
        return self.case, self.kernel

    @property
    def name(self) -> str:
        """The key as people read it."""
        return " ".join(map(str, (*astuple(self.case), self.kernel)))


@dataclass(frozen=True)
class Operation:
    """A function to compile, its arguments, and which of them it streams, if any."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    streamed: jax.ShapeDtypeStruct | None


def operation_of(case: Case, sharding: jax.sharding.Sharding) -> Operation:
    """What ``case`` compiles, from specs."""
    H, T = case.head_size, case.tokens
    narrow = case.dtype in _NARROW
    dtype = jnp.dtype(case.dtype)

    def spec(*shape: int, dtype: Any = jnp.bfloat16 if narrow else dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    ints = partial(spec, dtype=jnp.int32)
    pool = spec(_BLOCKS, _KV_HEADS, _BLOCK_SIZE, H, dtype=dtype)
    options: dict[str, Any] = {"scale": H**-0.5, "implementation": case.implementation}
    if narrow:
        options |= {"k_scale": 0.5, "v_scale": 0.5}
    if case.operation == "decode":
        lists = (ints(T, _BLOCKS_A_ROW), ints(T))
        call = partial(paged_attention, **options)
        return Operation(call, (spec(T, _HEADS, H), pool, pool, *lists), pool)
    if case.operation == "prefill":
        lists = (ints(_SEGMENTS, _BLOCKS_A_ROW), ints(_SEGMENTS), ints(_SEGMENTS + 1))
        call = partial(paged_prefill, **options)
        return Operation(call, (spec(T, _HEADS, H), pool, pool, *lists), pool)
    D = _HEADS * H
    x, norm = spec(T, D), spec(D)

    def normed(operation: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, norm, *rest: operation(x, fused.RmsNorm(norm, 1e-5), *rest)

    angles = spec(T, H // 2, dtype=jnp.float32)
    E = (_HEADS + 2 * _KV_HEADS) * H
    if case.operation == "rotate_write":
        arguments = (spec(T, E), (angles, angles), ints(T), pool, pool)
        return Operation(fused.rotate_write, arguments, None)
    if case.operation == "norm_qkv_write":
        weights = spec(E, D)
        arguments = (x, norm, weights, None, (angles, angles), ints(T), pool, pool)
        return Operation(normed(fused.norm_qkv_write), arguments, weights)
    if case.operation == "norm_gate_up":
        weights = spec(2 * 4 * D, D)
        return Operation(normed(fused.norm_gate_up), (x, norm, weights, None), weights)
    assert case.operation == "add_product", case
    weights = spec(D, 4 * D)
    return Operation(fused.add_product, (x, spec(T, 4 * D), weights, None), weights)


def measure_case(case: Case, target: GpuTarget, mesh: jax.sharding.Mesh) -> Iterator[Line]:
    """Compile one case and yield a line for each hand-written kernel in it."""
    operation = operation_of(case, NamedSharding(mesh, PartitionSpec()))
    with tempfile.TemporaryDirectory(prefix="jaxserve-kernel-") as scratch:
        dump, mosaic = Path(scratch) / "xla", Path(scratch) / "mosaic"
        mosaic.mkdir()
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(mosaic)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(operation.call).lower(*operation.arguments)
        compiled = lowered.compile(
            compiler_options={"xla_dump_to": str(dump), "xla_dump_emitter_re": "ptx"}
        )
        hlo = compiled.as_text() or ""
        (thunks,) = dump.glob("*.thunk_sequence.txt")
        launches = {k.name: k for k in list_launches(thunks.read_text())}
        launches |= {k.name: k for k in map(_mosaic_launch, mosaic.glob("*.ptx"))}
        ptx = sorted((*dump.glob("*.ptx"), *mosaic.glob("*.ptx")))
        names = {name for name in launches if name in hand_written(hlo) or _MOSAIC in name}
        kernels = kernel_figures(ptx, names)
        text = "\n".join(file.read_text() for file in ptx)
    if not kernels:
        raise RuntimeError(f"{case}: no figures of its kernels {sorted(hand_written(hlo))}")
    for kernel in kernels:
        launch = launches[kernel.name]
        shared = kernel.static_shared_bytes + launch.dynamic_shared_bytes
        elements = 0 if operation.streamed is None else operation.streamed.size
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
            load_bits=load_bits(text, kernel.name, streamed_operands(hlo, kernel.name, elements)),
            jax=jax.__version__,
            ptxas=assembler_release() or "",
        )


_MOSAIC = "_mosaic_gpu_kernel"


def _mosaic_launch(ptx: Path) -> Launch:
    """How a kernel that Mosaic GPU compiled is started, from what it wrote down of it."""
    text = ptx.read_text()
    entry, threads = re.search(r"\.entry (\w+)", text), re.search(r"\.maxntid ([\d, ]+)", text)
    shared = re.search(r"smem_scratch_bytes=(\d+)", ptx.with_suffix(".resources.txt").read_text())
    assert entry is not None
    assert threads is not None
    assert shared is not None
    sides = [int(n) for n in threads[1].split(",")]
    return Launch(0, "kCustomCall", entry[1], "once", (), math.prod(sides), int(shared[1]))


def streamed_operands(hlo: str, kernel: str, elements: int) -> list[int]:
    """Which operands of a kernel's call have so many elements; none of a Mosaic kernel's."""
    layouts = {
        found[1]
        for line in hlo.splitlines()
        if f', name = "{kernel}"' in line
        and (found := re.search(r"operand_layout_constraints=\{(.*?)\}, [a-z_]+=", line))
    }
    return sorted(
        {
            i
            for layout in layouts
            for i, dims in enumerate(_SHAPE.findall(layout))
            if math.prod(int(n) for n in dims.split(",") if n) == elements
        }
    )


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
