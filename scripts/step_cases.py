"""Compiles whole decode steps for an absent GPU: the child process of step_ledger.py."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import jax
from compile_child import print_result, read_jobs
from hlo_program import Array, Program, array
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.config import ModelConfig, RopeScaling
from jaxserve.model.params import param_specs
from jaxserve.plan.buckets import DecodeShape
from jaxserve.plan.price_list import tree_nbytes
from jaxserve.runtime import thunks
from jaxserve.runtime.cross_compile import absent_gpu
from jaxserve.runtime.executables import StepShapes, lower_step
from jaxserve.runtime.ptxas import hand_written
from jaxserve.runtime.targets import load_target

_LLAMA_3 = {
    "architecture": "LlamaForCausalLM",
    "vocab_size": 128256,
    "num_heads": 32,
    "num_kv_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
}
MODELS = {
    "llama-3.2-1b": ModelConfig(
        **_LLAMA_3,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        head_dim=64,
        tie_word_embeddings=True,
        rope_scaling=RopeScaling(kind="llama3", factor=32.0, original_max=8192),
    ),
    "llama-3.1-8b": ModelConfig(
        **_LLAMA_3,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        head_dim=128,
        rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max=8192),
    ),
}
"""The models by name, as their publisher's config.json has them."""

MAX_ROWS, MAX_LEN, BLOCK_SIZE = 256, 8192, 16
# A K or V array of a layer is larger than any workspace, so no workspace holds a copy of one.
_POOL_ARRAY_BYTES = 2**30

_THUNK_OF = re.compile(r'profile_annotation: "([^"]+)"\s+thunk_id: (\d+)')
_HLO_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclass(frozen=True, kw_only=True)
class Step:
    """A decode step of ``rows`` rows compiled for the target.

    ``launches`` are kernels and copies a step, ``launches_per_layer`` those of one layer; those in
    loops and conditionals are apart, since nothing says how often they run. ``temp_bytes`` is
    workspace, ``alias_bytes`` what is updated in place of the ``donated_bytes`` of pool and state.
    ``copies`` names what copies a weight or an array of the pool, also into float32, separated by
    blanks.
    """

    target: str
    model: str
    rows: int
    layers: int
    launches: int
    launches_per_layer: int
    loop_launches: int
    branch_launches: int
    temp_bytes: int
    pool_array_bytes: int
    alias_bytes: int
    donated_bytes: int
    copies: str
    jax: str


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch of one layer; ``does`` are the operations it computes and the weights it reads."""

    target: str
    model: str
    rows: int
    order: int
    launch: str
    does: str
    jax: str


def step_shapes(model: ModelConfig, rows: int) -> StepShapes:
    """One decode bucket of ``rows`` rows, at the whole width."""
    a_block = model.num_kv_heads * BLOCK_SIZE * model.head_dim * 2
    return StepShapes(
        model=model,
        dtype="bfloat16",
        backend="auto",
        num_blocks=_POOL_ARRAY_BYTES // a_block,
        block_size=BLOCK_SIZE,
        blocks_per_row=MAX_LEN // BLOCK_SIZE,
        max_num_seqs=MAX_ROWS,
        decode=(DecodeShape(rows, MAX_LEN),),
        prefill_tokens=(),
    )


def measure_step(target: str, name: str, rows: int, layers: int) -> tuple[Step, list[Launch]]:
    """Compile one step; ``layers`` of the model's are enough to see what a layer launches."""
    shapes = step_shapes(replace(MODELS[name], num_layers=layers), rows)
    mesh = absent_gpu(load_target(target).text)
    with tempfile.TemporaryDirectory(prefix="jaxserve-step-") as scratch:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = lower_step(
                shapes, shapes.decode[0], "cuda", NamedSharding(mesh, PartitionSpec())
            )
        compiled = lowered.compile(compiler_options={"xla_dump_to": scratch})
        (file,) = Path(scratch).glob("*.thunk_sequence.txt")
        sequence = file.read_text()
        (file,) = Path(scratch).glob("*.thunk_metadata.txt")
        instructions = {number: name for name, number in _THUNK_OF.findall(file.read_text())}
    hlo = compiled.as_text() or ""
    memory = compiled.memory_analysis()
    assert memory is not None  # GPU executables have one
    counted = thunks.count_launches(sequence)
    layer = one_layer(sequence, hand_written(hlo), layers)
    program = Program(hlo)
    pool = shapes.pool_specs()
    step = Step(
        target=target,
        model=name,
        rows=rows,
        layers=layers,
        launches=counted.once,
        launches_per_layer=len(layer),
        loop_launches=counted.in_loops,
        branch_launches=counted.in_branches,
        temp_bytes=int(memory.temp_size_in_bytes),
        pool_array_bytes=pool.k[0].nbytes,
        alias_bytes=int(memory.alias_size_in_bytes),
        donated_bytes=tree_nbytes(pool) + tree_nbytes(shapes.state_specs()),
        copies=" ".join(program.copies(large_arrays(shapes))),
        jax=jax.__version__,
    )
    launches = [
        Launch(
            target=target,
            model=name,
            rows=rows,
            order=i,
            launch=launch.name,
            does=program.describe(instructions.get(str(launch.number), launch.name)),
            jax=jax.__version__,
        )
        for i, launch in enumerate(layer)
    ]
    return step, launches


def one_layer(thunk_sequence: str, kernels: set[str], layers: int) -> list[thunks.Launch]:
    """What a layer launches, up to the same place of the next one.

    ``kernels`` are the hand-written kernels of the step; the first of them to run once a layer
    marks the place. What is computed once a step may stand in any layer, so the one taken launches
    as many as most do. Raises ValueError when no kernel marks the place, or most layers differ.
    """
    flat = [launch for launch in thunks.list_launches(thunk_sequence) if launch.where == "once"]
    names = [launch.name for launch in flat]
    marks = [name for name in names if name in kernels and names.count(name) == layers]
    if not marks:
        raise ValueError(f"none of the kernels {sorted(kernels)} runs {layers} times a step")
    at = [i for i, name in enumerate(names) if name == marks[0]]
    spans = [flat[start:end] for start, end in pairwise(at)]
    lengths = [len(span) for span in spans]
    usual, count = Counter(lengths).most_common(1)[0]
    if 2 * count <= len(spans):
        raise ValueError(f"layers launch {lengths}")
    return next(span for span in reversed(spans) if len(span) == usual)


def large_arrays(shapes: StepShapes) -> set[Array]:
    """Every matrix of the weights and every array of the pool, also as float32."""
    specs = [*jax.tree.leaves(param_specs(shapes.model, shapes.dtype)), shapes.pool_specs().k[0]]
    return {
        array(dtype, spec.shape)
        for spec in specs
        if len(spec.shape) > 1
        for dtype in (_HLO_DTYPES[str(spec.dtype)], "f32")
    }


def main() -> None:
    """Compile the steps of standard input, a line of JSON each on standard output."""
    jax.config.update("jax_enable_compilation_cache", False)
    for job in read_jobs():
        step, launches = measure_step(**job)
        print_result({"step": asdict(step), "launches": [asdict(x) for x in launches]})


if __name__ == "__main__":
    main()
