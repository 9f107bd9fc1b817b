"""The fused products of a layer, interpreted, against the same formulas in float64.

What is multiplied is rounded to bfloat16 in both; what is left is the rounding of the result.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels import fused
from jaxserve_kernels.fused import RmsNorm

EPS = 1e-5
# Half a unit of the result's last place, and float32 sums of some hundred terms.
TOLERANCE = {"float32": 1e-5, "float16": 2**-11 + 1e-5, "bfloat16": 2**-8 + 1e-5}
Z, C = 8, 40


@dataclass(frozen=True)
class Case:
    """Sizes of a layer and a step; ``inputs`` and ``ffn`` need fill no tile."""

    rows: int
    inputs: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    bias: bool = False
    dtype: str = "bfloat16"


CASES = (
    Case(1, 64, 40, 4, 2, 32),
    Case(17, 300, 72, 3, 1, 80, bias=True),
    Case(64, 136, 96, 2, 1, 96),
    Case(65, 100, 130, 1, 1, 64),
    Case(256, 128, 72, 2, 1, 128, bias=True),
)
every_case = pytest.mark.parametrize("case", CASES, ids=str)


class Draw:
    """Standard normal arrays of a case's dtype, one after the other."""

    def __init__(self, case: Case) -> None:
        self.rng, self.dtype = np.random.default_rng(0), jnp.dtype(case.dtype)

    def __call__(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, np.float32).astype(self.dtype)

    def matrix(self, n_out: int, n_in: int) -> np.ndarray:
        return (self(n_out, n_in).astype(np.float32) / n_in**0.5).astype(self.dtype)


def exact(x: np.ndarray | jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def normed_product(x, weight, w, bias) -> np.ndarray:
    weighted = exact((x.astype(np.float32) * weight.astype(np.float32)).astype(x.dtype))
    rms = np.sqrt((exact(x) ** 2).mean(axis=1, keepdims=True) + EPS)
    return weighted @ exact(w).T / rms + (0 if bias is None else exact(bias))


def check(case: Case, got: jax.Array, want: np.ndarray) -> None:
    assert got.dtype == jnp.dtype(case.dtype)
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(exact(got), want, atol=tolerance, rtol=tolerance)


def places(case: Case, rows: int, draw: Draw) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Angles and slots of ``rows`` tokens, and two pools."""
    angles = draw.rng.standard_normal((rows, case.head_size // 2), np.float32)
    slots = (Z + draw.rng.permutation((C - 1) * Z)[:rows]).astype(np.int32)
    pool = (C, case.num_kv_heads, Z, case.head_size)
    return angles, slots, [draw(*pool), draw(*pool)]


def check_places(case: Case, y, angles, slots, pools, q, written) -> None:
    """``y`` turned by ``angles`` is in ``q`` and, at ``slots``, in the pools ``written``."""
    heads = y.reshape(len(y), -1, case.head_size)
    N, K = case.num_heads, case.num_kv_heads
    first, second = np.split(heads, 2, axis=2)
    cos, sin = np.cos(exact(angles))[:, None], np.sin(exact(angles))[:, None]
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)
    check(case, q, turned[:, :N])
    for pool, got, new in zip(
        pools, written, (turned[:, N : N + K], heads[:, N + K :]), strict=True
    ):
        want = exact(pool)
        for token, slot in enumerate(slots):
            want[slot // Z, :, slot % Z] = new[token]
        check(case, got, want)


@every_case
def test_queries_are_turned_and_keys_and_values_land_in_their_slots(case):
    draw, heads = Draw(case), case.num_heads + 2 * case.num_kv_heads
    H = case.head_size
    x, weight, w = (
        draw(case.rows, case.inputs),
        draw(case.inputs),
        draw.matrix(heads * H, case.inputs),
    )
    bias = draw(heads * H) if case.bias else None
    angles, slots, pools = places(case, case.rows, draw)
    table = (np.cos(angles), np.sin(angles))
    run = partial(fused.norm_qkv_write, interpret=True)
    q, *written = run(x, RmsNorm(weight, EPS), w, bias, table, slots, *pools)
    check_places(case, normed_product(x, weight, w, bias), angles, slots, pools, q, written)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_any_number_of_products_is_turned_and_written(dtype):
    case, rows = replace(CASES[1], dtype=dtype), 290
    draw, heads = Draw(case), case.num_heads + 2 * case.num_kv_heads
    qkv = draw(rows, heads * case.head_size)
    angles, slots, pools = places(case, rows, draw)
    table = (np.cos(angles), np.sin(angles))
    q, *written = fused.rotate_write(qkv, table, slots, *pools, interpret=True)
    check_places(case, exact(qkv), angles, slots, pools, q, written)


@every_case
def test_gate_and_up_are_those_of_the_norm(case):
    draw = Draw(case)
    x, weight = draw(case.rows, case.inputs), draw(case.inputs)
    w = draw.matrix(2 * case.ffn, case.inputs)
    bias = draw(2 * case.ffn) if case.bias else None
    got = fused.norm_gate_up(x, RmsNorm(weight, EPS), w, bias, interpret=True)
    gate, up = np.split(normed_product(x, weight, w, bias), 2, axis=1)
    check(case, got, gate / (1 + np.exp(-gate)) * up)


@every_case
def test_a_product_is_added_to_the_residual(case):
    draw = Draw(case)
    x, y, w = (
        draw(case.rows, case.ffn),
        draw(case.rows, case.inputs),
        draw.matrix(case.ffn, case.inputs),
    )
    bias = draw(case.ffn) if case.bias else None
    got = fused.add_product(x, y, w, bias, interpret=True)
    check(case, got, exact(x) + exact(y) @ exact(w).T + (0 if bias is None else exact(bias)))


# Within one tile of rows, and over the last of one and the first of the next.
@pytest.mark.parametrize(("few", "most"), [(3, 16), (130, 256)])
def test_a_row_has_the_same_bits_beside_any_other_rows_and_in_any_place(few, most):
    case = Case(most, 128, 64, 2, 1, 64)
    draw, heads = Draw(case), case.num_heads + 2 * case.num_kv_heads
    x, norm = draw(most, case.inputs), RmsNorm(draw(case.inputs), EPS)
    qkv = draw.matrix(heads * case.head_size, case.inputs)
    gate_up, down = draw.matrix(2 * case.ffn, case.inputs), draw.matrix(case.inputs, case.inputs)
    angles, slots, pools = places(case, most, draw)

    @jax.jit
    def run(x, angles, slots):
        table = (jnp.cos(angles), jnp.sin(angles))
        q, *written = fused.norm_qkv_write(
            x, norm, qkv, None, table, slots, *map(jnp.asarray, pools), interpret=True
        )
        return (
            q,
            *(pool[slots // Z, :, slots % Z] for pool in written),
            fused.norm_gate_up(x, norm, gate_up, None, interpret=True),
            fused.add_product(x, x, down, None, interpret=True),
        )

    whole = run(x, angles, slots)
    order = draw.rng.permutation(most)
    for rows in (order, order[:few]):
        for all_rows, some in zip(whole, run(x[rows], angles[rows], slots[rows]), strict=True):
            np.testing.assert_array_equal(np.asarray(some), np.asarray(all_rows)[rows])


# ---- what they refuse ------------------------------------------------------------------------


def specs(rows: int = 1, head_size: int = 64, dtype: str = "bfloat16", pool: str = "bfloat16"):
    """The operands of each kernel for a layer of one head, by its name, zeros."""

    def zeros(*shape: int, dtype: str = dtype) -> jax.Array:
        return jnp.zeros(shape, dtype)

    x, w, norm = zeros(rows, 64), zeros(64, 64), RmsNorm(zeros(64), EPS)
    table = (zeros(rows, head_size // 2, dtype="float32"),) * 2
    slots = zeros(rows, dtype="int32")
    pools = (zeros(2, 1, Z, head_size, dtype=pool),) * 2
    qkv = zeros(3 * head_size, 64)
    return {
        "norm_qkv_write": (x, norm, qkv, None, table, slots, *pools),
        "norm_gate_up": (x, norm, w, None),
        "add_product": (x, x, w, None),
        "rotate_write": (zeros(rows, 3 * head_size), table, slots, *pools),
    }


MULTIPLY = ("norm_qkv_write", "norm_gate_up", "add_product")


@pytest.mark.parametrize("name", MULTIPLY)
def test_more_rows_than_the_kernels_take_are_refused_with_both_numbers(name):
    with pytest.raises(NotImplementedError, match="257 rows, at most 256"):
        getattr(fused, name)(*specs(rows=257)[name])


@pytest.mark.parametrize("name", MULTIPLY)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_product_of_another_dtype_is_refused_by_name(name, dtype):
    with pytest.raises(NotImplementedError, match=f"T[DI] is {dtype}, must be bfloat16"):
        getattr(fused, name)(*specs(dtype=dtype)[name])


@pytest.mark.parametrize("name", ["norm_qkv_write", "rotate_write"])
@pytest.mark.parametrize("pool", ["int8", "float8_e4m3fn"])
def test_a_pool_whose_values_are_over_a_scale_is_refused_by_name(name, pool):
    with pytest.raises(NotImplementedError, match=f"k_pool_CKZH is {pool}"):
        getattr(fused, name)(*specs(pool=pool)[name])


@pytest.mark.parametrize(("rows", "head_size"), [(1, 24), (65, 96)])
def test_a_head_size_whose_halves_fill_no_tile_is_refused(rows, head_size):
    with pytest.raises(NotImplementedError, match=f"head size {head_size} is no multiple"):
        fused.norm_qkv_write(*specs(rows, head_size)["norm_qkv_write"])
