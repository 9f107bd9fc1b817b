"""Every implementation of paged attention against the float64 reference, on the device at hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_timing import noise
from jaxserve_kernels import IMPLEMENTATIONS, paged_attention, paged_prefill, reference
from kernelbench import FAMILIES

# Of the results, which are averages of values in [-1, 1]: the step of the result's own dtype, and
# room for products whose factors a tensor core rounds (TF32, probabilities in the values' dtype).
TOLERANCE = {"float32": 2e-3, "bfloat16": 1.6e-2, "float16": 2e-3}
SCALES = {"float8_e4m3fn": 1.0, "int8": 1.0 / 127.0}
WILD = (-(2**31), -1, 2**30)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A corner of the contract; the pool is of ``dtype``, the queries too if it is a float."""

    dtype: str
    head_size: int
    num_heads: int = 8
    num_kv_heads: int = 2
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    lengths: tuple[int, ...] = (0, 1, 15, 16, 17, 300, 1029, 700)

    @property
    def query_dtype(self) -> str:
        """Narrow pools are read by bfloat16 queries."""
        return "bfloat16" if self.dtype in SCALES else self.dtype

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the operations."""
        options = {"scale": self.head_size**-0.5, "window": self.window, "soft_cap": self.soft_cap}
        if self.dtype in SCALES:
            options |= {"k_scale": SCALES[self.dtype], "v_scale": SCALES[self.dtype]}
        return options

    @property
    def name(self) -> str:
        """What is special about it."""
        extras = f" window {self.window}" if self.window else ""
        extras += f" cap {self.soft_cap}" if self.soft_cap else ""
        groups = f"{self.num_heads}/{self.num_kv_heads}"
        return (
            f"{self.dtype} {groups} heads of {self.head_size}, blocks of {self.block_size}{extras}"
        )


def cases(*, tiny: bool) -> tuple[Case, ...]:
    """The cases, the main shapes first."""
    if tiny:
        return (Case(dtype="bfloat16", head_size=64, lengths=(0, 17, 40)),)
    return (
        Case(dtype="bfloat16", head_size=128, num_heads=32, num_kv_heads=8),
        Case(dtype="bfloat16", head_size=64, num_heads=32, num_kv_heads=8, block_size=64),
        Case(dtype="float16", head_size=80, num_heads=6, window=33),
        Case(dtype="float32", head_size=96, num_heads=7, num_kv_heads=1, soft_cap=5.0),
        Case(dtype="bfloat16", head_size=256, num_heads=16, num_kv_heads=1, block_size=256),
        Case(dtype="bfloat16", head_size=112, num_heads=3, num_kv_heads=3, block_size=8),
        Case(dtype="bfloat16", head_size=192),
        Case(dtype="float8_e4m3fn", head_size=128),
        Case(dtype="int8", head_size=128, window=100),
    )


@dataclass(frozen=True)
class World:
    """Pools in which everything that no row owns is poison, and tables with wild entries."""

    k: np.ndarray
    v: np.ndarray
    tables: np.ndarray
    lengths: np.ndarray


def make_world(case: Case, seed: int = 0) -> World:
    """Rows over permuted blocks."""
    rng = np.random.default_rng(seed)
    Z, rows = case.block_size, len(case.lengths)
    width = -(-max(case.lengths) // Z) + 1
    tables = rng.permutation(rows * width).reshape(rows, width) + 1
    owned = np.zeros((rows * width + 1, Z), bool)
    for row, length in enumerate(case.lengths):
        for position in range(length):
            owned[tables[row, position // Z], position % Z] = True
        tables[row, -(-length // Z) :] = rng.choice(WILD)
    shape = (rows * width + 1, case.num_kv_heads, Z, case.head_size)
    dtype = jnp.dtype(case.dtype)
    poison = np.array(127 if case.dtype == "int8" else np.nan).astype(dtype)
    if case.dtype == "int8":
        draws = [rng.integers(-127, 128, shape).astype(dtype) for _ in range(2)]
    else:
        draws = [rng.uniform(-1, 1, shape).astype(dtype) for _ in range(2)]
    k, v = (np.where(owned[:, None, :, None], x, poison) for x in draws)
    return World(k, v, tables.astype(np.int32), np.array(case.lengths, np.int32))


def _queries(case: Case, tokens: int) -> np.ndarray:
    shape = (tokens, case.num_heads, case.head_size)
    draw = np.random.default_rng(1).uniform(-1, 1, shape)
    return draw.astype(jnp.dtype(case.query_dtype))


def check(*, tiny: bool) -> Iterator[dict[str, Any]]:
    """A row for each implementation, operation and case: its largest error, and whether it passed.

    What an implementation does not do (NotImplementedError) is told and is no failure.
    """
    names = [name for name in IMPLEMENTATIONS if name not in FAMILIES]
    if jax.default_backend() != "gpu":
        names.remove("streamed_mosaic")  # interpreted, a call takes seconds
    if jax.default_backend() != "gpu":
        names = [name for name in names if name != "streamed_mosaic"]  # a call takes seconds
    for case in cases(tiny=tiny):
        world = make_world(case)
        for operation, run in (("decode", _decode), ("prefill", _prefill)):
            wanted = None
            for name in names:
                row = {"implementation": name, "operation": operation, "case": case.name}
                try:
                    got, alone, wanted = run(case, world, name, wanted)
                except NotImplementedError as reason:
                    yield row | {"passed": True, "error": None, "why": str(reason)[:200]}
                    continue
                except Exception as error:  # the other implementations are still wanted
                    why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                    yield row | {"passed": False, "error": None, "why": why}
                    continue
                error = float(np.abs(got.astype(np.float64) - wanted).max())
                same = name == "rectangle" or np.array_equal(got[-1], alone)
                close = bool(np.isfinite(error)) and error <= TOLERANCE[case.query_dtype]
                yield row | {
                    "passed": close and same,
                    "error": error,
                    "why": "" if same else "a row alone has other bits than in its batch",
                }
    if not tiny:
        yield from _large_pools(names)


Checked = tuple[np.ndarray, np.ndarray, np.ndarray]


def _decode(case: Case, world: World, name: str, wanted: np.ndarray | None) -> Checked:
    """What came, the last row by itself, and what must come."""
    q = _queries(case, len(case.lengths))
    run = jax.jit(partial(paged_attention, implementation=name, **case.options))
    pools = jnp.asarray(world.k), jnp.asarray(world.v)
    got = np.asarray(run(jnp.asarray(q), *pools, world.tables, world.lengths))
    alone = np.asarray(run(jnp.asarray(q[-1:]), *pools, world.tables[-1:], world.lengths[-1:]))
    if wanted is None:
        wanted = reference.paged_attention(
            q, world.k, world.v, world.tables, world.lengths, **case.options
        )
    return got, alone[-1], wanted


def _prefill(case: Case, world: World, name: str, wanted: np.ndarray | None) -> Checked:
    """Chunks of up to 50 tokens at the end of each row."""
    chunks = np.minimum(world.lengths, 50)
    cu = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32)
    tokens = -(-int(cu[-1]) // 64) * 64
    q = _queries(case, tokens)
    run = jax.jit(partial(paged_prefill, implementation=name, **case.options))
    pools = jnp.asarray(world.k), jnp.asarray(world.v)
    got = np.asarray(run(jnp.asarray(q), *pools, world.tables, world.lengths, cu))
    used, last = int(cu[-1]), int(chunks[-1])
    moved = np.zeros_like(q)
    moved[:last] = q[used - last : used]
    one = np.array([0, last], np.int32)
    alone = run(jnp.asarray(moved), *pools, world.tables[-1:], world.lengths[-1:], one)
    if wanted is None:
        wanted = reference.paged_prefill(
            q, world.k, world.v, world.tables, world.lengths, cu, **case.options
        )
    return got[:used], np.asarray(alone)[last - 1], wanted[:used]


def _large_pools(names: list[str]) -> Iterator[dict[str, Any]]:
    """A pool whose offsets need more than 32 bits gives the same bits as a small one."""
    for dtype, blocks in (("bfloat16", 3 * 2**16), ("float8_e4m3fn", 3 * 2**16)):
        case = Case(dtype=dtype, head_size=128, num_kv_heads=8, num_heads=8, lengths=(900,))
        large = noise((blocks, 8, 16, 128), dtype, 5)
        ids = np.arange(blocks - 64, blocks, dtype=np.int32)[None]
        small = large[ids[0, 0] :]
        q = jnp.asarray(_queries(case, 1))
        lens = jnp.array(case.lengths, jnp.int32)
        for name in names:
            row = {
                "implementation": name,
                "operation": "decode",
                "case": f"{dtype} pool of {large.nbytes} bytes",
            }
            run = jax.jit(partial(paged_attention, implementation=name, **case.options))
            try:
                far = np.asarray(run(q, large, large, ids, lens), np.float32)
                near = np.asarray(run(q, small, small, ids - ids[0, 0], lens), np.float32)
            except Exception as error:
                why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                passed = isinstance(error, NotImplementedError)
                yield row | {"passed": passed, "error": None, "why": why}
                continue
            error = float(np.abs(far - near).max())
            yield row | {"passed": error == 0.0, "error": error, "why": ""}
        del large, small
