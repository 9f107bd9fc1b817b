"""The fused products of a layer, interpreted, against the same formulas in float64."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels import fused

EPS = 1e-5
TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-2}
Z, C = 8, 12


@dataclass(frozen=True)
class Case:
    """Sizes of a layer and a step; ``inputs`` and ``ffn`` need fill no tile."""

    dtype: str
    rows: int
    inputs: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    bias: bool = False


CASES = (
    Case("float32", 1, 64, 40, 4, 2, 32),
    Case("float32", 17, 300, 72, 3, 1, 80, bias=True),
    Case("bfloat16", 5, 256, 64, 2, 2, 64, bias=True),
    Case("bfloat16", 64, 136, 96, 2, 1, 96),
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
    x, weight, w = map(exact, (x, weight, w))
    normed = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * weight
    return normed @ w.T + (0 if bias is None else exact(bias))


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
    q, *written = run(x, fused.RmsNorm(weight, EPS), w, bias, table, slots, *pools)
    check_places(case, normed_product(x, weight, w, bias), angles, slots, pools, q, written)


def test_any_number_of_products_is_turned_and_written():
    case, rows = CASES[1], 70
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
    got = fused.norm_gate_up(x, fused.RmsNorm(weight, EPS), w, bias, interpret=True)
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


@pytest.mark.parametrize("rows", [3, 16])
def test_a_row_has_the_same_bits_beside_any_other_rows(rows):
    case = CASES[2]
    draw = Draw(case)
    x, weight, w = draw(16, case.inputs), draw(case.inputs), draw.matrix(2 * case.ffn, case.inputs)
    run = partial(fused.norm_gate_up, norm=fused.RmsNorm(weight, EPS), gate_up_JD=w, bias_J=None)
    whole = np.asarray(run(x, interpret=True))
    order = draw.rng.permutation(16)[:rows]
    np.testing.assert_array_equal(np.asarray(run(x[order], interpret=True)), whole[order])


def test_more_rows_than_a_program_takes_are_refused_with_both_numbers():
    x = jnp.zeros((65, 64))
    with pytest.raises(NotImplementedError, match="65 rows, at most 64"):
        fused.add_product(x, x, jnp.zeros((64, 64)), None)


def test_a_head_size_whose_halves_fill_no_tile_is_refused():
    pool = jnp.zeros((2, 1, Z, 24))
    norm = fused.RmsNorm(jnp.ones((64,)), EPS)
    with pytest.raises(NotImplementedError, match="head size 24"):
        fused.norm_qkv_write(
            jnp.zeros((1, 64)), norm, jnp.zeros((72, 64)), None, (), jnp.zeros(1), pool, pool
        )
