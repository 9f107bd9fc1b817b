"""Lower every step from specs, compile ahead of time, look up by shape and never compile later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import AttentionBackend, ModelConfig
from jaxserve.errors import NoExecutable
from jaxserve.model.attention import KVPool, kv_pool_specs
from jaxserve.model.params import param_specs
from jaxserve.plan.batch import (
    ArraySpec,
    DecodeState,
    decode_state_specs,
    new_blocks_spec,
    permutation_spec,
    prefill_batch_specs,
)
from jaxserve.plan.buckets import DecodeShape
from jaxserve.runtime.steps import jit_decode, jit_permute, jit_prefill


def shape_structs(tree: Any, sharding: jax.sharding.Sharding | None = None) -> Any:
    """A pytree of ArraySpec (or ShapeDtypeStruct) as ShapeDtypeStruct placed by ``sharding``."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(s.dtype), sharding=sharding),
        tree,
        is_leaf=lambda x: isinstance(x, ArraySpec),
    )


def zeros(tree: Any) -> Any:
    """A pytree of ArraySpec as device arrays of zeros."""
    return jax.tree.map(
        lambda s: jnp.zeros(s.shape, jnp.dtype(s.dtype)),
        tree,
        is_leaf=lambda x: isinstance(x, ArraySpec),
    )


@dataclass(frozen=True, kw_only=True)
class StepShapes:
    """Everything that fixes the programs: the model, the pool, the rows and the bucket lists."""

    model: ModelConfig
    dtype: str
    backend: AttentionBackend
    num_blocks: int
    block_size: int
    blocks_per_row: int
    max_num_seqs: int
    decode: tuple[DecodeShape, ...]
    prefill_tokens: tuple[int, ...]

    def pool_specs(self) -> KVPool:
        """``KVPool`` of ArraySpec."""
        return kv_pool_specs(self.model, self.num_blocks, self.block_size, self.dtype)

    def state_specs(self) -> DecodeState:
        """``DecodeState`` of ArraySpec."""
        return decode_state_specs(self.max_num_seqs, self.blocks_per_row)


@dataclass(frozen=True)
class Built:
    """One compiled executable and what it cost: seconds, and bytes of temporary workspace."""

    name: str
    compiled: jax.stages.Compiled
    trace_s: float
    compile_s: float
    temp_bytes: int


@dataclass(frozen=True)
class Executables:
    """The whole list, looked up by shape; an absent shape raises NoExecutable."""

    permute: Built
    decode: Mapping[DecodeShape, Built]
    prefill: Mapping[int, Built]

    def decode_for(self, shape: DecodeShape) -> jax.stages.Compiled:
        """The decode executable of exactly ``shape``."""
        try:
            return self.decode[shape].compiled
        except KeyError:
            raise NoExecutable(
                f"decode of {shape.rows} rows x {shape.width} tokens was not compiled; "
                f"there are {[tuple(s) for s in self.decode]}"
            ) from None

    def prefill_for(self, tokens: int) -> jax.stages.Compiled:
        """The prefill executable of exactly ``tokens`` tokens."""
        try:
            return self.prefill[tokens].compiled
        except KeyError:
            raise NoExecutable(
                f"prefill of {tokens} tokens was not compiled; there are {list(self.prefill)}"
            ) from None

    @property
    def all(self) -> tuple[Built, ...]:
        """Every executable, in the order of the list."""
        return (self.permute, *self.decode.values(), *self.prefill.values())

    @property
    def temp_bytes(self) -> int:
        """Workspace of the largest member: they run one at a time and share one allocator."""
        return max(b.temp_bytes for b in self.all)


def lowerings(
    shapes: StepShapes, platform: str, sharding: jax.sharding.Sharding | None = None
) -> dict[Any, tuple[str, Callable[[], jax.stages.Lowered]]]:
    """Key -> (name, a call that traces and lowers it for ``platform``); no array is touched.

    ``sharding`` places every argument; None: on the default device.
    """
    structs = partial(shape_structs, sharding=sharding)
    params = structs(param_specs(shapes.model, shapes.dtype))
    pool = structs(shapes.pool_specs())
    state = structs(shapes.state_specs())
    sources = structs(permutation_spec(shapes.max_num_seqs))
    jobs: dict[Any, tuple[str, Callable[[], jax.stages.Lowered]]] = {
        "permute": (
            "permute",
            lambda: jit_permute().lower(state, sources),
        )
    }
    for shape in shapes.decode:
        bound = jit_decode(shapes.model, shapes.backend, shape, shapes.block_size, platform)
        blocks = structs(new_blocks_spec(shape.rows))
        jobs[shape] = (
            f"decode {shape.rows}x{shape.width}",
            lambda b=bound, n=blocks: b.lower(params, pool, state, n),
        )
    for tokens in shapes.prefill_tokens:
        bound = jit_prefill(shapes.model, shapes.backend, platform)
        batch = structs(prefill_batch_specs(tokens, shapes.max_num_seqs, shapes.blocks_per_row))
        jobs[tokens] = (
            f"prefill {tokens}",
            lambda b=bound, x=batch: b.lower(params, pool, state, x),
        )
    return jobs


def _build(name: str, lower: Callable[[], jax.stages.Lowered]) -> Built:
    start = time.perf_counter()
    lowered = lower()
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    memory = compiled.memory_analysis()
    temp = int(memory.temp_size_in_bytes) if memory is not None else 0
    return Built(name, compiled, lowered_at - start, done - lowered_at, temp)


def compile_executables(
    shapes: StepShapes,
    *,
    workers: int = 1,
    progress: Callable[[Built, int, int], None] = lambda built, done, total: None,
) -> Executables:
    """Compile the list from specs, ``workers`` at a time, before any pool exists.

    ``progress(built, done, total)`` is called as each one is ready.
    """
    jobs = lowerings(shapes, jax.default_backend())
    built: dict[Any, Built] = {}
    with ThreadPoolExecutor(max_workers=workers) as threads:
        pending = {threads.submit(_build, *job): key for key, job in jobs.items()}
        for future in as_completed(pending):
            built[pending[future]] = future.result()
            progress(future.result(), len(built), len(jobs))

    def part(keys: Iterable[Any]) -> Mapping[Any, Built]:
        return MappingProxyType({key: built[key] for key in keys})

    return Executables(built["permute"], part(shapes.decode), part(shapes.prefill_tokens))
