"""Make the executables of a boot: from the cache where it has them, else compiled, in parallel."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial

import jax

from jaxserve.plan.compiled import Key
from jaxserve.plan.units import format_bytes, format_seconds
from jaxserve.runtime.compile_cache import CompileCache, EntryInfo, keepable_compiles
from jaxserve.runtime.executables import (
    Built,
    Executables,
    Recorder,
    StepShapes,
    key_name,
    lower_step,
    planned_keys,
    record,
)
from jaxserve.runtime.steps import compiler_options


@dataclass(frozen=True, kw_only=True)
class StepCompiler:
    """Makes any executable of one set of shapes, out of ``cache`` where it is there.

    ``environment`` is the part of the cache's keys that all of them share.
    """

    shapes: StepShapes
    platform: str
    cache: CompileCache | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    recorder: Recorder = record

    def parts(self, key: Key) -> Mapping[str, str]:
        """All that fixes the executable of ``key``."""
        shapes = self.shapes
        return {
            **self.environment,
            "step": key_name(key),
            "model": hashlib.sha256(repr(shapes.model).encode()).hexdigest()[:16],
            "compiler_options": repr(
                compiler_options(self.platform, deterministic=shapes.deterministic)
            ),
            **{
                name: str(getattr(shapes, name))
                for name in (
                    "dtype",
                    "backend",
                    "num_blocks",
                    "block_size",
                    "blocks_per_row",
                    "max_num_seqs",
                    "persist_inputs",
                    "stacked",
                )
            },
        }

    def build(self, key: Key) -> Built:
        """Load it, or compile it and keep it."""
        name = key_name(key)
        lower = partial(lower_step, self.shapes, key, self.platform)
        if self.cache is None:
            return self.recorder(name, lower)
        start = time.perf_counter()
        parts = self.parts(key)
        found = self.cache.load(name, parts)
        load_s = time.perf_counter() - start
        if not isinstance(found, str):
            compiled, info = found
            return Built(name, compiled, 0.0, 0.0, info.temp_bytes, load_s=load_s, cache="hit")
        built = self.recorder(name, lower)
        start = time.perf_counter()
        self.cache.store(
            name,
            parts,
            built.compiled,
            trace_s=built.trace_s,
            compile_s=built.compile_s,
            temp_bytes=built.temp_bytes,
        )
        store_s = time.perf_counter() - start
        return replace(built, load_s=load_s, store_s=store_s, cache=f"miss: {found}")

    def forecast(self) -> str:
        """One line: how many of the list will be compiled, and whether a next boot will again."""
        keys = planned_keys(self.shapes)
        cache = self.cache
        if cache is None:
            return f"compiling {len(keys)} executables"
        missing = sum(not cache.holds(key_name(key), self.parts(key)) for key in keys)
        if not missing:
            return f"loading {len(keys)} executables from {cache.directory}"
        what = f"compiling {missing} of {len(keys)} executables"
        if not cache.keeps:
            return what
        return f"{what}, once: the next boot loads them from {cache.directory}"

    def earlier(self) -> EntryInfo | None:
        """The entry of an earlier boot of this server, whatever its pool; None: no such boot."""
        if self.cache is None:
            return None
        key = self.shapes.prefill_tokens[-1]
        return self.cache.earlier(key_name(key), self.parts(key))

    def workspace_bytes(self) -> int:
        """Temporary bytes of the largest step; they do not depend on the pool's size.

        From the entries of an earlier boot where every step has one, else compiled: the steps of
        most rows and of most tokens, which need the most.
        """
        keys = planned_keys(self.shapes)
        if self.cache is not None:
            known = [self.cache.earlier(key_name(k), self.parts(k)) for k in keys]
            if all(known):
                return max(info.temp_bytes for info in known if info is not None)
        largest = (*self.shapes.decode[-1:], *self.shapes.prefill_tokens[-1:])
        with keepable_compiles():
            return max(self.build(key).temp_bytes for key in largest)


def compile_executables(
    shapes: StepShapes,
    *,
    compiler: StepCompiler | None = None,
    workers: int = 1,
    ahead: bool = True,
    late: bool = False,
    progress: Callable[[Built, int, int], None] = lambda built, done, total: None,
    report: Callable[[str], None] = lambda line: None,
) -> Executables:
    """Compile the list from specs, ``workers`` at a time, before any pool exists.

    ``progress(built, done, total)`` is called as each one is ready. ``late`` allows shapes outside
    the list to be compiled when they are first met; each is a line to ``report``. Without ``ahead``
    there is no list.
    """
    compiler = compiler or StepCompiler(shapes=shapes, platform=jax.default_backend())
    keys: tuple[Key, ...] = planned_keys(shapes) if ahead else ()
    built: dict[Key, Built] = {}
    with keepable_compiles(), ThreadPoolExecutor(max_workers=workers) as threads:
        pending = {threads.submit(compiler.build, key): i for i, key in enumerate(keys)}
        for future in as_completed(pending):
            built[keys[pending[future]]] = future.result()
            progress(future.result(), len(built), len(keys))

    def compile_late(key: Key) -> Built:
        with keepable_compiles():
            made = compiler.build(key)
        report(f"late compile: {describe(made)}")
        return made

    return Executables({key: built[key] for key in keys}, compile_late if late else None)


def describe(built: Built) -> str:
    """One line: name, seconds, workspace and where it came from."""
    return (
        f"{built.name}: {format_seconds(built.seconds)}, temp {format_bytes(built.temp_bytes)}, "
        f"cache {built.cache}"
    )
