"""The contract of paged attention, asked of every implementation against a float64 reference.

A new implementation joins by adding its name to DECODE or PREFILL; kernels run interpreted here.
All checks of a case share one compiled shape: 8 rows for decode, 6 segments in 192 tokens for
prefill. The Hopper kernel, whose interpreter takes seconds a call, meets each kind of check once.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxserve_kernels import paged_attention, paged_prefill, reference, tiling

DECODE = ("rectangle", "streamed_xla", "streamed_triton")
PREFILL = ("rectangle", "streamed_xla", "streamed_triton")

TOLERANCE = {"float32": 4e-6, "bfloat16": 1e-2, "float16": 1.5e-3}
UNIT = {"float8_e4m3fn": 1 / 64, "int8": 1 / 32}  # about what a standard normal is stored over
WILD_IDS = np.array([-(2**31), -7, -1, 2**20, 2**31 - 1], np.int64)
TOKENS = 192


@dataclass(frozen=True)
class Case:
    """One corner of the contract."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: str = "float32"
    pool_dtype: str = "float32"
    scale: float = 0.125
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def options(self) -> dict:
        return {"scale": self.scale, "window": self.window, "soft_cap": self.soft_cap}

    @cached_property
    def extras(self) -> dict:
        """The optional arrays: a sink high and low among the scores, scales apart by head."""
        extras = {}
        if self.sinks:
            extras["sinks"] = np.linspace(-1.0, 4.0, self.num_heads, dtype=np.float32)
        if self.pool_dtype in UNIT:
            scale = UNIT[self.pool_dtype] * np.linspace(0.5, 1.5, self.num_kv_heads)
            extras |= {"k_scale": scale.astype(np.float32), "v_scale": np.float32(scale[0])}
        return extras

    @property
    def width(self) -> int:
        """Blocks a row: several tiles of keys, and no multiple of a tile."""
        return max(2, -(-290 // self.block_size))


PLAIN = Case("groups of 3", 9, 3, 64, 16)
CAPPED = Case("cap, window, sinks", 4, 2, 64, 16, scale=1.0, window=33, soft_cap=4.0, sinks=True)
CASES = (
    PLAIN,
    CAPPED,
    Case("groups of 1, window of 1", 2, 2, 80, 8, window=1),
    Case(
        "groups of 4 in bfloat16, window over tiles", 8, 2, 128, 32, *["bfloat16"] * 2, window=140
    ),
    Case("groups of 7 in float16", 7, 1, 96, 16, "float16", "float16", scale=0.1),
    Case(
        "groups of 8 over a bfloat16 pool, window in a block",
        8,
        1,
        112,
        8,
        "float32",
        "bfloat16",
        window=5,
    ),
    Case("blocks of 256, heads of 192, sinks", 2, 1, 192, 256, sinks=True),
    Case(
        "groups of 16 over float8, sinks",
        16,
        1,
        256,
        16,
        "bfloat16",
        "float8_e4m3fn",
        scale=0.06,
        sinks=True,
    ),
    Case("int8 under a cap and a window", 4, 2, 64, 16, "float32", "int8", window=90, soft_cap=4.0),
)

every_decode = pytest.mark.parametrize("implementation", DECODE)
every_prefill = pytest.mark.parametrize("implementation", PREFILL)
every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])

HOPPER = "streamed_mosaic"
HALF = {"dtype": "float16", "pool_dtype": "float16"}
HOPPER_CASES = (
    next(case for case in CASES if case.dtype == case.pool_dtype == "bfloat16"),
    replace(CAPPED, name=f"{CAPPED.name} in float16", **HALF),
)
HOPPER_PLAIN = replace(PLAIN, name="groups of 3 in float16", num_heads=3, num_kv_heads=1, **HALF)
needs_newer_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2),
    reason=f"NOT CHECKED, the Hopper kernel needs jax 0.11.2, this is {jax.__version__}",
)
hopper_cases = pytest.mark.parametrize("case", HOPPER_CASES, ids=[c.name for c in HOPPER_CASES])
every_plain_decode = pytest.mark.parametrize(
    ("implementation", "plain"),
    [
        *((name, PLAIN) for name in DECODE),
        pytest.param(HOPPER, HOPPER_PLAIN, marks=needs_newer_jax),
    ],
    ids=[*DECODE, HOPPER],
)


# ---- worlds ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Pools and the rows in them; what no row owns is poison, unused table entries are wild."""

    k_pool: np.ndarray
    v_pool: np.ndarray
    tables: np.ndarray
    lengths: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.k_pool, self.v_pool, self.tables, self.lengths


def draw(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (values / UNIT.get(dtype, 1.0)).astype(jnp.dtype(dtype))


def poison(value: float, dtype: str) -> np.ndarray:
    """``value``, or the largest of a dtype that has no such thing."""
    return np.array(127 if dtype == "int8" else value, jnp.dtype(dtype))


def make_world(case: Case, lengths: list[int], seed: int) -> World:
    """Rows over permuted blocks; every odd row shares its first blocks with row 0."""
    rng = np.random.default_rng(seed)
    Z, rows = case.block_size, len(lengths)
    num_blocks = rows * case.width + 1
    tables = (rng.permutation(num_blocks - 1) + 1).reshape(rows, case.width)
    owned = np.zeros((num_blocks, Z), bool)
    for row, length in enumerate(lengths):
        if row % 2:
            common = min(length, lengths[0]) // Z
            tables[row, :common] = tables[0, :common]
        for position in range(length):
            owned[tables[row, position // Z], position % Z] = True
        unused = slice(-(-length // Z), None)
        tables[row, unused] = rng.choice(WILD_IDS, tables[row, unused].shape)
    pools = []
    for wrong in (np.nan, np.inf):
        shape = (num_blocks, case.num_kv_heads, Z, case.head_size)
        pool = draw(shape, case.pool_dtype, int(rng.integers(2**31)))
        pools.append(np.where(owned[:, None, :, None], pool, poison(wrong, case.pool_dtype)))
    return World(*pools, tables.astype(np.int32), np.array(lengths, np.int32))


def edge_lengths(case: Case) -> list[int]:
    """None, one, both sides of a block, of a tile, and of the table."""
    Z, full = case.block_size, case.width * case.block_size
    tile = tiling.decode_tile(Z, case.width)
    return [full, 0, 1, Z - 1, Z, Z + 1, tile + 1, full - 3]


def packing(queries: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)


# ---- what is run, what is wanted, and the check ------------------------------------------------


@cache
def compiled(op, case: Case, implementation: str):
    return jax.jit(partial(op, **case.options, implementation=implementation))


def decode_queries(case: Case, world: World, seed: int) -> np.ndarray:
    return draw((len(world.lengths), case.num_heads, case.head_size), case.dtype, seed)


def decode(case: Case, implementation: str, world: World, seed: int) -> jax.Array:
    run = compiled(paged_attention, case, implementation)
    return run(decode_queries(case, world, seed), *world.arrays, **case.extras)


def decode_wanted(case: Case, world: World, seed: int) -> np.ndarray:
    queries = decode_queries(case, world, seed)
    return reference.paged_attention(queries, *world.arrays, **case.options, **case.extras)


def prefill_queries(case: Case, queries: list[int], seed: int) -> np.ndarray:
    q = draw((TOKENS, case.num_heads, case.head_size), case.dtype, seed)
    q[sum(queries) :] = np.nan
    return q


def prefill(
    case: Case, implementation: str, world: World, queries: list[int], seed: int
) -> jax.Array:
    run = compiled(paged_prefill, case, implementation)
    q = prefill_queries(case, queries, seed)
    return run(q, *world.arrays, packing(queries), **case.extras)


def prefill_wanted(case: Case, world: World, queries: list[int], seed: int) -> np.ndarray:
    q = prefill_queries(case, queries, seed)
    options = case.options | case.extras
    return reference.paged_prefill(q, *world.arrays, packing(queries), **options)


def check(case: Case, got: jax.Array, want: np.ndarray) -> None:
    assert got.dtype == jnp.dtype(case.dtype)
    tolerance = max(TOLERANCE[case.dtype], TOLERANCE["float32"])
    np.testing.assert_allclose(
        np.asarray(got.astype(jnp.float32)), want, atol=tolerance, rtol=tolerance
    )


# ---- decode ----------------------------------------------------------------------------------


@every_decode
@every_case
def test_decode_equals_the_reference_at_every_edge_length(case, implementation):
    world = make_world(case, edge_lengths(case), 1)
    check(case, decode(case, implementation, world, 2), decode_wanted(case, world, 2))


@needs_newer_jax
@hopper_cases
def test_the_hopper_decode_equals_the_reference_at_every_edge_length(case):
    world = make_world(case, edge_lengths(case), 1)
    check(case, decode(case, HOPPER, world, 2), decode_wanted(case, world, 2))


@every_decode
@given(lengths=st.lists(st.integers(0, 300), min_size=8, max_size=8), seed=st.integers(0, 2**16))
def test_decode_equals_the_reference_for_any_lengths(implementation, lengths, seed):
    world = make_world(PLAIN, lengths, seed)
    check(PLAIN, decode(PLAIN, implementation, world, seed), decode_wanted(PLAIN, world, seed))


@every_plain_decode
def test_empty_rows_give_zeros(implementation, plain):
    world = make_world(plain, [0] * 8, 3)
    np.testing.assert_array_equal(np.asarray(decode(plain, implementation, world, 4)), 0.0)


# ---- prefill ---------------------------------------------------------------------------------

# An empty row, a whole prompt, a chunk of several query tiles after earlier context, an empty
# segment of a long row, one token, and a chunk that fills the table to the brim.
QUERIES = [0, 17, 100, 0, 1, 20]


def prefill_lengths(case: Case) -> list[int]:
    return [0, 17, 150, 40, 33, case.width * case.block_size]


@every_prefill
@every_case
def test_prefill_equals_the_reference_for_every_kind_of_segment(case, implementation):
    world = make_world(case, prefill_lengths(case), 5)
    got = prefill(case, implementation, world, QUERIES, 6)
    check(case, got, prefill_wanted(case, world, QUERIES, 6))


@every_prefill
@given(
    segments=st.lists(st.tuples(st.integers(0, 32), st.integers(0, 90)), min_size=6, max_size=6),
    seed=st.integers(0, 2**16),
)
def test_prefill_equals_the_reference_for_any_packing(implementation, segments, seed):
    queries = [new for new, _ in segments]
    world = make_world(PLAIN, [new + before for new, before in segments], seed)
    got = prefill(PLAIN, implementation, world, queries, seed)
    check(PLAIN, got, prefill_wanted(PLAIN, world, queries, seed))


@every_prefill
def test_a_prefill_of_padding_alone_gives_zeros(implementation):
    world = make_world(PLAIN, [9, 0, 0, 0, 0, 0], 7)
    got = prefill(PLAIN, implementation, world, [0] * 6, 8)
    np.testing.assert_array_equal(np.asarray(got), 0.0)


# ---- the same bits in any batch --------------------------------------------------------------

every_streamed_decode = pytest.mark.parametrize("implementation", DECODE[1:])
every_streamed_prefill = pytest.mark.parametrize("implementation", PREFILL[1:])


@every_streamed_decode
@given(order=st.permutations(range(8)), rows=st.sampled_from([1, 2, 8]))
def test_a_decode_row_has_the_same_bits_in_any_row_of_any_batch(implementation, order, rows):
    world = make_world(PLAIN, [300, 128, 129, 1, 16, 255, 77, 200], 9)
    queries = decode_queries(PLAIN, world, 10)
    whole = np.asarray(decode(PLAIN, implementation, world, 10))
    picked = list(order[:rows])
    run = compiled(paged_attention, PLAIN, implementation)
    part = run(
        queries[picked], world.k_pool, world.v_pool, world.tables[picked], world.lengths[picked]
    )
    np.testing.assert_array_equal(np.asarray(part), whole[picked])


@needs_newer_jax
def test_a_hopper_decode_row_has_the_same_bits_in_any_row_of_any_batch():
    world = make_world(HOPPER_PLAIN, [300, 1, 129, 64], 9)
    queries = decode_queries(HOPPER_PLAIN, world, 10)
    whole = np.asarray(decode(HOPPER_PLAIN, HOPPER, world, 10))
    picked = [2, 0]
    part = compiled(paged_attention, HOPPER_PLAIN, HOPPER)(
        queries[picked], world.k_pool, world.v_pool, world.tables[picked], world.lengths[picked]
    )
    np.testing.assert_array_equal(np.asarray(part), whole[picked])


@every_streamed_prefill
def test_a_prefill_segment_has_the_same_bits_in_any_packing(implementation):
    world = make_world(PLAIN, prefill_lengths(PLAIN), 11)
    packed = np.asarray(prefill(PLAIN, implementation, world, QUERIES, 12))
    q = np.roll(prefill_queries(PLAIN, QUERIES, 12), -17, axis=0)
    run = compiled(paged_prefill, PLAIN, implementation)
    alone = run(q, *world.arrays, packing([0, 0, 100, 0, 0, 0]))
    np.testing.assert_array_equal(np.asarray(alone)[:100], packed[17:117])


# ---- traps: the checks must be able to fail ----------------------------------------------------

fails = partial(pytest.raises, AssertionError, match="Not equal to tolerance")


slightly_wrong = pytest.mark.parametrize(
    ("case", "wrong"),
    [
        (CAPPED, {"window": 32}),
        (CAPPED, {"scale": 1.001}),
        (CAPPED, {"soft_cap": 4.01}),
        (CAPPED, {"sinks": False}),
    ],
)


@every_decode
@slightly_wrong
def test_the_decode_check_fails_under_a_slightly_wrong_option(implementation, case, wrong):
    world = make_world(case, edge_lengths(case), 13)
    told = replace(case, **wrong)
    with fails():
        check(case, decode(case, implementation, world, 14), decode_wanted(told, world, 14))


@every_prefill
@slightly_wrong
def test_the_prefill_check_fails_under_a_slightly_wrong_option(implementation, case, wrong):
    world = make_world(case, prefill_lengths(case), 13)
    told = replace(case, **wrong)
    with fails():
        got = prefill(case, implementation, world, QUERIES, 14)
        check(case, got, prefill_wanted(told, world, QUERIES, 14))


@every_decode
@pytest.mark.parametrize("off", [-1, 1])
def test_the_decode_check_fails_when_a_row_sees_one_token_more_or_less(implementation, off):
    right = replace(make_world(PLAIN, [101] * 8, 15), lengths=np.full(8, 100, np.int32))
    wrong = replace(right, lengths=right.lengths + np.array([0] * 7 + [off], np.int32))
    with fails():
        check(PLAIN, decode(PLAIN, implementation, wrong, 16), decode_wanted(PLAIN, right, 16))


@every_prefill
@pytest.mark.parametrize("off", [-1, 1])
def test_the_prefill_check_fails_when_queries_sit_one_place_off(implementation, off):
    lengths = np.array(prefill_lengths(PLAIN), np.int32)
    right = replace(make_world(PLAIN, list(np.minimum(lengths + 1, 300)), 17), lengths=lengths)
    shifted = lengths + np.array([0, 0, off, 0, 0, 0], np.int32)
    with fails():
        got = prefill(PLAIN, implementation, replace(right, lengths=shifted), QUERIES, 18)
        check(PLAIN, got, prefill_wanted(PLAIN, right, QUERIES, 18))


@every_plain_decode
def test_poison_inside_a_row_reaches_that_row_and_no_other(implementation, plain):
    world = make_world(plain, [0, 40, 50, 60, 0, 0, 0, 0], 19)
    clean = np.asarray(decode(plain, implementation, world, 20))
    world.v_pool[world.tables[2, 1], :, 3] = np.nan
    poisoned = np.asarray(decode(plain, implementation, world, 20))
    assert np.isnan(poisoned[2]).all()
    others = [0, 1, 3, 4, 5, 6, 7]
    np.testing.assert_array_equal(poisoned[others], clean[others])
