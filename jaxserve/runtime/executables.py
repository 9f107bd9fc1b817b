"""Every step lowered from specs, and the compiled ones looked up by shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxserve.config import AttentionBackend, ModelConfig
from jaxserve.errors import NoExecutable
from jaxserve.model.attention import KVPool, kv_pool_specs
from jaxserve.model.params import param_specs
from jaxserve.plan.batch import (
    ArraySpec,
    DecodeState,
    counts_spec,
    decode_state_specs,
    mask_spec,
    new_blocks_spec,
    permutation_spec,
    prefill_batch_specs,
    row_spec,
)
from jaxserve.plan.buckets import DecodeShape
from jaxserve.plan.compiled import Key
from jaxserve.runtime.steps import jit_decode, jit_permute, jit_prefill, jit_write_counts


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
    """Everything that fixes the programs: the model, the pool, the rows and the bucket lists.

    ``persist_inputs``: the decode state is donated, so it stays where it is. ``stacked``: the
    layers are one, walked in a loop (see ``Params``). ``deterministic``: see ``EngineConfig``.
    """

    model: ModelConfig
    dtype: str
    backend: AttentionBackend
    num_blocks: int
    block_size: int
    blocks_per_row: int
    max_num_seqs: int
    decode: tuple[DecodeShape, ...]
    prefill_tokens: tuple[int, ...]
    persist_inputs: bool = True
    stacked: bool = False
    deterministic: bool = False

    def pool_specs(self) -> KVPool:
        """``KVPool`` of ArraySpec."""
        return kv_pool_specs(
            self.model, self.num_blocks, self.block_size, self.dtype, stacked=self.stacked
        )

    def state_specs(self) -> DecodeState:
        """``DecodeState`` of ArraySpec."""
        return decode_state_specs(self.max_num_seqs, self.blocks_per_row, self.model.vocab_size)


@dataclass(frozen=True)
class Built:
    """One compiled executable: what it cost this process in seconds, and its workspace in bytes.

    ``cache`` says where it came from: "hit", "miss: " and why, or "off".
    """

    name: str
    compiled: jax.stages.Compiled
    trace_s: float
    compile_s: float
    temp_bytes: int
    load_s: float = 0.0
    store_s: float = 0.0
    cache: str = "off"

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.trace_s + self.compile_s + self.load_s + self.store_s


PERMUTE: Literal["permute"] = "permute"
"""The key of the row permutation."""

WRITE_COUNTS: Literal["write_counts"] = "write_counts"
"""The key of the program that replaces a row's token counts."""

Lower = Callable[[], jax.stages.Lowered]
Recorder = Callable[[str, Lower], Built]
"""Makes one executable from its name and a call that traces and lowers it."""


class Executables:
    """The planned list by shape, and what was compiled after it.

    A shape that is absent is compiled by ``compile_late``, once, or raises NoExecutable where that
    is None.
    """

    def __init__(
        self, planned: Mapping[Key, Built], compile_late: Callable[[Key], Built] | None = None
    ) -> None:
        self.planned = MappingProxyType(dict(planned))
        self.decode: Mapping[DecodeShape, Built] = MappingProxyType(
            {k: b for k, b in planned.items() if isinstance(k, DecodeShape)}
        )
        self.prefill: Mapping[int, Built] = MappingProxyType(
            {k: b for k, b in planned.items() if isinstance(k, int)}
        )
        self._compile_late = compile_late
        self._late: dict[Key, Built] = {}

    @property
    def late(self) -> Mapping[Key, Built]:
        """What was compiled after the list, in that order."""
        return MappingProxyType(self._late)

    def permute_for(self) -> jax.stages.Compiled:
        """The executable that permutes rows."""
        return self._find(PERMUTE)

    def write_counts_for(self) -> jax.stages.Compiled:
        """The executable that replaces a row's token counts."""
        return self._find(WRITE_COUNTS)

    def decode_for(self, shape: DecodeShape) -> jax.stages.Compiled:
        """The decode executable of exactly ``shape``."""
        return self._find(shape)

    def prefill_for(self, tokens: int) -> jax.stages.Compiled:
        """The prefill executable of exactly ``tokens`` tokens."""
        return self._find(tokens)

    def serving_shape(self, shape: DecodeShape) -> DecodeShape:
        """``shape`` if it is there, else the smallest that covers it, else ``shape`` itself.

        Outside the list nothing planned covers it, only what was compiled late: some padding costs
        a client less than a compile.
        """
        if shape in self.decode or shape in self._late:
            return shape
        covers = (
            s
            for s in (*self.decode, *self._late)
            if isinstance(s, DecodeShape) and s.rows >= shape.rows and s.width >= shape.width
        )
        return min(covers, key=lambda s: s.cells, default=shape)

    @property
    def all(self) -> tuple[Built, ...]:
        """Every planned executable, in the order of the list."""
        return tuple(self.planned.values())

    @property
    def temp_bytes(self) -> int:
        """Workspace of the largest member: they run one at a time and share one allocator."""
        return max((b.temp_bytes for b in (*self.all, *self._late.values())), default=0)

    def _find(self, key: Key) -> jax.stages.Compiled:
        built = self.planned.get(key) or self._late.get(key)
        if built is None:
            if self._compile_late is None:
                raise NoExecutable(
                    f"{key_name(key)} was not compiled; there are "
                    f"{', '.join(b.name for b in self.all)}"
                )
            built = self._late[key] = self._compile_late(key)
        return built.compiled


def key_name(key: Key) -> str:
    """A key as people read it."""
    if isinstance(key, DecodeShape):
        return f"decode {key.rows}x{key.width}"
    return f"prefill {key}" if isinstance(key, int) else key


def planned_keys(shapes: StepShapes) -> tuple[Key, ...]:
    """The list, in order."""
    return (PERMUTE, WRITE_COUNTS, *shapes.decode, *shapes.prefill_tokens)


def lowerings(
    shapes: StepShapes, platform: str, sharding: jax.sharding.Sharding | None = None
) -> dict[Key, tuple[str, Lower]]:
    """Key -> (name, a call that traces and lowers it for ``platform``); no array is touched.

    ``sharding`` places every argument; None: on the default device.
    """
    return {
        key: (key_name(key), partial(lower_step, shapes, key, platform, sharding))
        for key in planned_keys(shapes)
    }


def lower_step(
    shapes: StepShapes, key: Key, platform: str, sharding: jax.sharding.Sharding | None = None
) -> jax.stages.Lowered:
    """Trace and lower one step from specs."""
    structs = partial(shape_structs, sharding=sharding)
    state = structs(shapes.state_specs())
    if key == PERMUTE:
        sources = structs(permutation_spec(shapes.max_num_seqs))
        return jit_permute(persist_inputs=shapes.persist_inputs).lower(state, sources)
    vocab_size = shapes.model.vocab_size
    if key == WRITE_COUNTS:
        row, counts = structs(row_spec()), structs(counts_spec(vocab_size))
        return jit_write_counts(persist_inputs=shapes.persist_inputs).lower(state, row, counts)
    params = structs(param_specs(shapes.model, shapes.dtype, stacked=shapes.stacked))
    pool = structs(shapes.pool_specs())
    model, backend = shapes.model, shapes.backend
    how = {"persist_inputs": shapes.persist_inputs, "deterministic": shapes.deterministic}
    if isinstance(key, DecodeShape):
        step = jit_decode(model, backend, key, shapes.block_size, platform, **how)
        sent = (new_blocks_spec(key.rows), mask_spec(key.rows, vocab_size))
    else:
        step = jit_prefill(model, backend, platform, **how)
        sent = (prefill_batch_specs(key, shapes.max_num_seqs, shapes.blocks_per_row, vocab_size),)
    return step.lower(params, pool, state, *structs(sent))


def record(name: str, lower: Lower) -> Built:
    """Trace, lower and compile."""
    start = time.perf_counter()
    lowered = lower()
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    memory = compiled.memory_analysis()
    temp = int(memory.temp_size_in_bytes) if memory is not None else 0
    return Built(name, compiled, lowered_at - start, done - lowered_at, temp)
