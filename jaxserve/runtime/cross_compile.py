"""The child process that compiles steps for an absent GPU and reports what the compiler says."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.plan.compiled import CompiledFigures, Key
from jaxserve.runtime.compile_cache import CompileCache
from jaxserve.runtime.compiler import StepCompiler
from jaxserve.runtime.executables import StepShapes, lowerings
from jaxserve.runtime.fingerprint import environment_parts
from jaxserve.runtime.ptxas import hand_written, kernel_figures
from jaxserve.runtime.thunks import count_launches


@dataclass(frozen=True)
class Build:
    """Where executables are kept, and the XLA_FLAGS of the server that will load them."""

    directory: Path
    xla_flags: str


@dataclass(frozen=True)
class CrossCompiled:
    """One executable is done."""

    key: Key
    figures: CompiledFigures


@dataclass(frozen=True)
class Note:
    """A line for the operator."""

    text: str


@dataclass(frozen=True)
class Failed:
    """One executable does not compile, in a line."""

    name: str
    why: str


def absent_gpu(target: str) -> jax.sharding.Mesh:
    """A mesh of the one GPU that ``target``, a GpuTargetConfigProto as text, describes."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    return topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))


def cross_compile(
    results: Connection,
    target: str,
    shapes: StepShapes,
    workers: int,
    scratch: str,
    stderr: str,
    build: Build | None,
) -> None:
    """Send a CrossCompiled for each executable of ``shapes``, or a Failed and nothing more.

    ``target`` is a GpuTargetConfigProto as text. Must run in a process that has not used JAX yet.
    What the compiler prints goes to the file ``stderr``; ``scratch`` is a directory for its dumps.
    With a ``build`` each executable is also kept in a compile cache, for a boot on that GPU.
    """
    with open(stderr, "wb") as log:
        os.dup2(log.fileno(), 2)
    jax.config.update("jax_platforms", "cpu")  # no GPU of this machine is touched
    # A hit would cost no time, and its dump would be missing.
    jax.config.update("jax_enable_compilation_cache", False)
    name = "the first step"
    try:
        mesh = absent_gpu(target)
        jobs = lowerings(shapes, "cuda", NamedSharding(mesh, PartitionSpec()))
        keep = None
        if build is not None:
            keep = _Keeper(
                build, shapes, list(mesh.devices.flat), lambda line: results.send(Note(line))
            )
        threads = ThreadPoolExecutor(max_workers=workers)
        pending: dict[Future[_Made], Key] = {
            threads.submit(
                _make, lower, mesh.abstract_mesh, Path(scratch) / str(i), keep is not None
            ): key
            for i, (key, (_, lower)) in enumerate(jobs.items())
        }
        for future in as_completed(pending):
            key = pending[future]
            name, _ = jobs[key]
            figures, compiled = future.result()
            if keep is not None:
                keep(name, key, compiled, figures)
            results.send(CrossCompiled(key, figures))
        if keep is not None:
            keep.cache.tidy()
    except Exception as error:  # the compiler raises anything
        results.send(Failed(name, f"{type(error).__name__}: {error}".splitlines()[0][:300]))
        results.close()
        os._exit(1)  # what still compiles is not waited for


_Made = tuple[CompiledFigures, jax.stages.Compiled]


class _Keeper:
    """Stores executables under the keys that a boot on the target looks for."""

    def __init__(
        self,
        build: Build,
        shapes: StepShapes,
        devices: Sequence[Any],
        report: Callable[[str], None],
    ) -> None:
        self.cache = CompileCache(build.directory, report)
        environment = environment_parts(build.xla_flags, devices)
        self._keys = StepCompiler(shapes=shapes, platform="cuda", environment=environment)

    def __call__(
        self, name: str, key: Key, compiled: jax.stages.Compiled, figures: CompiledFigures
    ) -> None:
        self.cache.store(
            name,
            self._keys.parts(key),
            compiled,
            trace_s=figures.trace_seconds,
            compile_s=figures.backend_seconds,
            temp_bytes=figures.temp_bytes,
        )


def _make(
    lower: Callable[[], jax.stages.Lowered], mesh: jax.sharding.AbstractMesh, dump: Path, keep: bool
) -> _Made:
    started = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh):  # Pallas asks it which GPU it lowers for
        lowered = lower()
    traced = time.perf_counter()
    dumped = lowered.compile(
        compiler_options={"xla_dump_to": str(dump), "xla_dump_emitter_re": "ptx"}
    )
    done = time.perf_counter()
    memory = dumped.memory_analysis()
    assert memory is not None  # GPU executables have one
    (thunks,) = dump.glob("*.thunk_sequence.txt")
    launches = count_launches(thunks.read_text())
    kernels = kernel_figures(sorted(dump.glob("*.ptx")), hand_written(dumped.as_text() or ""))
    shutil.rmtree(dump)
    figures = CompiledFigures(
        trace_seconds=traced - started,
        backend_seconds=done - traced,
        argument_bytes=int(memory.argument_size_in_bytes),
        output_bytes=int(memory.output_size_in_bytes),
        alias_bytes=int(memory.alias_size_in_bytes),
        temp_bytes=int(memory.temp_size_in_bytes),
        launches=launches.once,
        loop_launches=launches.in_loops,
        branch_launches=launches.in_branches,
        kernels=kernels,
    )
    # An executable remembers that it is to dump and where, so a kept one is compiled without.
    return figures, lowered.compile() if keep else dumped
