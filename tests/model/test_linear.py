"""Every way to multiply by a weight, against numpy in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.model.linear import cpu_compiler_options, linear, product


@pytest.mark.parametrize("n_out", [12, 7])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16, 17, 40])
def test_a_product_is_that_of_numpy_for_any_number_of_rows(rows, n_out):
    rng = np.random.default_rng(rows)
    x, w = rng.normal(size=(rows, 33)), rng.normal(size=(n_out, 33))
    got = jax.jit(product, compiler_options=cpu_compiler_options())(
        jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    )
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, x @ w.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("n_out", "n_in", "dtype"), [(324, 64, "float32"), (7, 33, "float32"), (576, 1536, "bfloat16")]
)
def test_a_deterministic_product_sums_a_row_alike_wherever_it_stands(n_out, n_in, dtype):
    rng = np.random.default_rng(n_out)
    w = rng.normal(size=(n_out, n_in)).astype(jnp.dtype(dtype))
    row, others = np.split(rng.normal(size=(41, n_in)).astype(jnp.dtype(dtype)), [1])
    multiply = jax.jit(partial(product, deterministic=True))
    for rows in (3, 6, 40):  # summed by reduction, by the library, by it in panels
        alike = np.asarray(multiply(row.repeat(rows, 0), w))
        wanted = row[0].astype(np.float64) @ w.astype(np.float64).T
        np.testing.assert_allclose(alike[0], wanted, rtol=0, atol=1e-3)
        np.testing.assert_array_equal(alike, alike[:1].repeat(rows, 0))
        for place in (0, rows - 1):
            x = others[:rows].copy()
            x[place] = row
            np.testing.assert_array_equal(np.asarray(multiply(x, w))[place], alike[0])


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_a_bfloat16_product_is_summed_in_float32(rows):
    x, w = jnp.ones((rows, 4096), jnp.bfloat16), jnp.ones((3, 4096), jnp.bfloat16)
    w = w.at[:, 0].set(256)  # a bfloat16 sum would stay at 256
    y = jax.jit(linear, compiler_options=cpu_compiler_options())(x, w)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y.astype(jnp.float32), 4352.0)


def test_nan_and_infinity_survive_the_compiler_options():
    x = jnp.asarray([[1.0, jnp.inf], [jnp.nan, 0.0]], jnp.float32)
    y = jax.jit(product, compiler_options=cpu_compiler_options())(x, jnp.eye(2, dtype=jnp.float32))
    np.testing.assert_array_equal(np.isnan(np.asarray(y)), [[True, False], [True, True]])
    assert y[0, 1] == np.inf


def test_a_bias_is_added_to_every_row():
    x, w = jnp.ones((3, 2), jnp.float32), jnp.ones((4, 2), jnp.float32)
    y = linear(x, w, jnp.arange(4, dtype=jnp.float32))
    np.testing.assert_array_equal(y, [[2, 3, 4, 5]] * 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_librarys_product_of_one_row_is_summed_in_float32(dtype, monkeypatch):
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *arrays, cpu, default: default(*arrays)
    )
    rng = np.random.default_rng(1)
    x, w = (rng.normal(size=(n, 96)).astype(jnp.dtype(dtype)) for n in (1, 40))
    got = product(x, w)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, x.astype(np.float64) @ w.astype(np.float64).T, atol=1e-4)


def test_a_gpu_reads_16_bit_weights_once_for_one_row_and_writes_no_float32_copy_of_them():
    x, w = jax.ShapeDtypeStruct((1, 96), jnp.bfloat16), jax.ShapeDtypeStruct((40, 96), jnp.bfloat16)
    lowered = jax.jit(product).trace(x, w).lower(lowering_platforms=("cuda",))
    assert "dot_general" not in lowered.as_text()  # cuBLAS would need the copy
