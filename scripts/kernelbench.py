"""Decode attention against the bandwidth of memory: python scripts/kernelbench.py [--tiny].

Measures the bandwidth of a copy, then the read of each implementation at rows x context, as the
share of that bandwidth which the K/V it must read amount to: 8 KV heads and 1, groups of 4 and 8,
heads of 128, bfloat16, blocks of 16 tokens. Beside ours: jax's own paged_attention and, if
they can be imported, FlashInfer. Prints a table; gpu_check.py runs the same and writes it down.

A step is a chain of reads, each the query of the next, over blocks of their own, so that the second
level cache holds nothing of what a read needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_timing import noise, seconds_a_step
from jaxserve_kernels import IMPLEMENTATIONS, paged_attention

from jaxserve.plan.report import format_table

FAMILIES = {"auto", "streamed"}
CHAIN = 16
# An array larger than 4 GiB would need longer offsets than a layer's pool has in a deployment.
POOL_BYTES = 2 * 2**30
GATHER_BYTES = 8 * 2**30
JAX_OWN, FLASHINFER = "jax paged_attention", "flashinfer"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One point: rows of ``context`` tokens."""

    rows: int
    context: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16

    @property
    def blocks_a_row(self) -> int:
        """P."""
        return -(-self.context // self.block_size)

    @property
    def kv_bytes(self) -> int:
        """K and V of all rows in bfloat16."""
        return 2 * 2 * self.rows * self.context * self.num_kv_heads * self.head_size


@dataclass(frozen=True, kw_only=True)
class Point:
    """A measurement; ``why`` says what kept it from being made."""

    implementation: str
    rows: int
    context: int
    num_heads: int
    num_kv_heads: int
    microseconds: float | None
    gb_per_s: float | None
    share_of_copy: float | None
    why: str = ""


def shapes(*, tiny: bool) -> tuple[Shape, ...]:
    """The points, those that matter most first."""
    if tiny:
        return (Shape(rows=2, context=40, num_heads=4, num_kv_heads=2, head_size=64),)
    grid = sorted(
        itertools.product((1, 8, 64, 256), (512, 2048, 8192, 32768)),
        key=lambda p: p not in ((64, 8192), (8, 2048)),
    )
    return tuple(
        Shape(rows=rows, context=context, num_heads=heads, num_kv_heads=kv_heads)
        for heads, kv_heads in ((32, 8), (8, 1))
        for rows, context in grid
    )


def copy_bandwidth(*, tiny: bool) -> dict[str, float]:
    """Bytes a second of a copy (read and written) and of a sum (read)."""
    elements = 2**16 if tiny else 2**30
    x = noise((elements,), "float32", 0)
    double = jax.jit(lambda x: -x, donate_argnums=0)
    copy_s, x = seconds_a_step(double, x)
    total = jax.jit(lambda state: (state[0], jnp.sum(state[0]) + state[1]), donate_argnums=0)
    read_s, _ = seconds_a_step(total, (x, jnp.float32(0)))
    return {"copy": 2 * 4 * elements / copy_s, "read": 4 * elements / read_s}


class Pools:
    """One K and one V array of noise, and tables over permuted blocks of them."""

    def __init__(self, shape: Shape, *, tiny: bool) -> None:
        a_block = shape.num_kv_heads * shape.block_size * shape.head_size * 2
        self.num_blocks = 64 if tiny else POOL_BYTES // a_block
        self.chain = 2 if tiny else CHAIN
        sides = (self.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_size)
        self.k, self.v = noise(sides, "bfloat16", 1), noise(sides, "bfloat16", 2)
        self._order = np.random.default_rng(0).permutation(self.num_blocks - 1) + 1

    def tables(self, shape: Shape, count: int) -> tuple[jax.Array, ...]:
        """``count`` tables [rows, P], each over the next blocks in the order."""
        size = shape.rows * shape.blocks_a_row
        ids = np.resize(self._order, count * size).astype(np.int32)
        return tuple(jnp.asarray(part.reshape(shape.rows, -1)) for part in np.split(ids, count))


Read = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def own_read(implementation: str, shape: Shape) -> Read:
    """One of ours; raises ValueError where a gather would not fit."""
    gathered = 2 * shape.kv_bytes  # in float32
    if implementation == "rectangle" and gathered > GATHER_BYTES:
        raise ValueError(f"gathers {gathered} bytes, at most {GATHER_BYTES}")
    return partial(paged_attention, scale=shape.head_size**-0.5, implementation=implementation)


def jax_read(shape: Shape) -> Read:
    """jax's own kernel, which wants pools [K, C, Z, H] and a static number of splits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        from jax.experimental.pallas.ops.gpu import paged_attention as module
    splits = max(1, min(16, shape.blocks_a_row // 8))

    def read(q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, lens: jax.Array):
        return module.paged_attention(q, k, v, tables, lens, k_splits=splits)  # without a scale

    return read


def measure(read: Read, shape: Shape, pools: Pools, k: jax.Array, v: jax.Array) -> float:
    """Device seconds of one read."""
    chain = pools.chain if shape.kv_bytes < 2**30 else 4
    q = noise((shape.rows, shape.num_heads, shape.head_size), "bfloat16", 3)
    lens = jnp.full(shape.rows, shape.context, jnp.int32)
    tables = pools.tables(shape, chain)

    @jax.jit
    def step(q: jax.Array, k: jax.Array, v: jax.Array, tables: Any, lens: jax.Array) -> jax.Array:
        for table in tables:
            q = read(q, k, v, table, lens)
        return q

    compiled = step.lower(q, k, v, tables, lens).compile()
    seconds, q = seconds_a_step(lambda q: compiled(q, k, v, tables, lens), q)
    if not bool(jnp.isfinite(q.astype(jnp.float32)).all()):
        raise ValueError("the result is not finite")
    return seconds / chain


def measure_flashinfer(shape: Shape, pools: Pools) -> float:
    """Device seconds of FlashInfer's batch decode over as many blocks."""
    import flashinfer  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    sides = (pools.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_size)
    cache = tuple(torch.randn(sides, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(
        (shape.rows, shape.num_heads, shape.head_size), device="cuda", dtype=torch.bfloat16
    )
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    (table,) = pools.tables(shape, 1)
    ends = torch.arange(shape.rows + 1, dtype=torch.int32) * shape.blocks_a_row
    last = torch.full((shape.rows,), (shape.context - 1) % shape.block_size + 1, dtype=torch.int32)
    wrapper.plan(
        ends.cuda(),
        torch.from_numpy(np.asarray(table).reshape(-1).copy()).cuda(),
        last.cuda(),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_size,
        shape.block_size,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(20):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        wrapper.run(q, cache)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return float(np.median(times))


def bench(copy_bytes_per_s: float, *, tiny: bool) -> Iterator[Point]:
    """Every implementation at every shape."""
    names = [name for name in IMPLEMENTATIONS if name not in FAMILIES]
    if jax.default_backend() == "gpu":
        names = [name for name in names if name != "streamed_xla"]  # loops of launches: no rival
        names += [JAX_OWN]
    else:
        names.remove("streamed_mosaic")  # interpreted, a call takes seconds
    if importlib.util.find_spec("flashinfer") is not None:
        names += [FLASHINFER]
    for _, group in itertools.groupby(shapes(tiny=tiny), lambda s: (s.num_heads, s.num_kv_heads)):
        points = list(group)
        pools = Pools(points[0], tiny=tiny)
        for name in names:
            k, v = pools.k, pools.v
            if name == JAX_OWN:
                k, v = (jnp.swapaxes(x, 0, 1) for x in (k, v))
            for shape in points:
                yield _point(name, shape, pools, k, v, copy_bytes_per_s)


def _point(
    name: str, shape: Shape, pools: Pools, k: jax.Array, v: jax.Array, copy_bytes_per_s: float
) -> Point:
    point = Point(
        implementation=name,
        rows=shape.rows,
        context=shape.context,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        microseconds=None,
        gb_per_s=None,
        share_of_copy=None,
    )
    try:
        if name == FLASHINFER:
            seconds = measure_flashinfer(shape, pools)
        else:
            read = jax_read(shape) if name == JAX_OWN else own_read(name, shape)
            seconds = measure(read, shape, pools, k, v)
    except Exception as error:  # a rival may raise anything, and the others are still wanted
        return replace(point, why=f"{type(error).__name__}: {error}".splitlines()[0][:200])
    rate = shape.kv_bytes / seconds
    return replace(
        point,
        microseconds=seconds * 1e6,
        gb_per_s=rate / 1e9,
        share_of_copy=rate / copy_bytes_per_s,
    )


HEADER = ("implementation", "rows", "context", "heads", "us", "GB/s", "of copy")


def table_row(point: Point) -> tuple[str, ...]:
    """A line under HEADER."""
    place = (
        point.implementation,
        str(point.rows),
        str(point.context),
        f"{point.num_heads}/{point.num_kv_heads}",
    )
    if point.microseconds is None or point.gb_per_s is None or point.share_of_copy is None:
        return (*place, "-", "-", point.why[:40])
    return (
        *place,
        f"{point.microseconds:.1f}",
        f"{point.gb_per_s:.0f}",
        f"{point.share_of_copy:.0%}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    args = parser.parse_args(argv)
    rates = copy_bandwidth(tiny=args.tiny)
    print(f"copy {rates['copy'] / 1e9:.0f} GB/s, read {rates['read'] / 1e9:.0f} GB/s")
    points = list(bench(rates["copy"], tiny=args.tiny))
    print(format_table(HEADER, [table_row(point) for point in points]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
