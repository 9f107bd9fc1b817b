"""The child process that compiles steps for an absent GPU and reports what the compiler says."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.plan.compiled import CompiledFigures, Key
from jaxserve.runtime.executables import StepShapes, lowerings
from jaxserve.runtime.ptxas import hand_written, kernel_figures
from jaxserve.runtime.thunks import count_launches


@dataclass(frozen=True)
class CrossCompiled:
    """One executable is done."""

    key: Key
    figures: CompiledFigures


@dataclass(frozen=True)
class Failed:
    """One executable does not compile, in a line."""

    name: str
    why: str


def cross_compile(
    results: Connection,
    target: str,
    shapes: StepShapes,
    workers: int,
    scratch: str,
    stderr: str,
) -> None:
    """Send a CrossCompiled for each executable of ``shapes``, or a Failed and nothing more.

    ``target`` is a GpuTargetConfigProto as text. Must run in a process that has not used JAX yet.
    What the compiler prints goes to the file ``stderr``; ``scratch`` is a directory for its dumps.
    """
    with open(stderr, "wb") as log:
        os.dup2(log.fileno(), 2)
    jax.config.update("jax_platforms", "cpu")  # no GPU of this machine is touched
    # A hit would cost no time, and its dump would be missing.
    jax.config.update("jax_enable_compilation_cache", False)
    name = "the first step"
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target, topology="1x1x1"
        )
        mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
        jobs = lowerings(shapes, "cuda", NamedSharding(mesh, PartitionSpec()))
        threads = ThreadPoolExecutor(max_workers=workers)
        pending: dict[Future[CompiledFigures], Key] = {
            threads.submit(_build, lower, mesh.abstract_mesh, Path(scratch) / str(i)): key
            for i, (key, (_, lower)) in enumerate(jobs.items())
        }
        for future in as_completed(pending):
            key = pending[future]
            name, _ = jobs[key]
            results.send(CrossCompiled(key, future.result()))
    except Exception as error:  # the compiler raises anything
        results.send(Failed(name, f"{type(error).__name__}: {error}".splitlines()[0][:300]))
        results.close()
        os._exit(1)  # what still compiles is not waited for


def _build(
    lower: Callable[[], jax.stages.Lowered], mesh: jax.sharding.AbstractMesh, dump: Path
) -> CompiledFigures:
    started = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh):  # Pallas asks it which GPU it lowers for
        lowered = lower()
    traced = time.perf_counter()
    compiled = lowered.compile(
        compiler_options={"xla_dump_to": str(dump), "xla_dump_emitter_re": "ptx"}
    )
    done = time.perf_counter()
    memory = compiled.memory_analysis()
    assert memory is not None  # GPU executables have one
    (thunks,) = dump.glob("*.thunk_sequence.txt")
    launches = count_launches(thunks.read_text())
    kernels = kernel_figures(sorted(dump.glob("*.ptx")), hand_written(compiled.as_text() or ""))
    shutil.rmtree(dump)
    return CompiledFigures(
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
