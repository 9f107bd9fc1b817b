"""Matrix products against weights stored [out, in].

A decode step reads every weight once and multiplies it by a handful of rows, so it should run at
the speed of memory. Library products do on GPUs. On XLA:CPU they pack the weights first, which at
eight rows costs as much as reading them; there, few rows are multiplied and summed in one fused
loop instead.
"""

from __future__ import annotations

import operator
from functools import partial

import jax
import jax.numpy as jnp

# At most this many rows are summed by reduction; more are worth the library's packing. In order, a
# reduction is scalar and its time grows with the rows.
_MOST_ROWS = 16
_MOST_ROWS_IN_ORDER = 4
# Sums a reduction carries side by side, at least: one row runs eight streams of weights at once.
# One load of a weight serves all rows. A single sum over [rows, O, I] would do so too, but inside
# a loop over layers XLA then copies the layer's weights out of the stacked ones first.
_SUMS = 8


def cpu_compiler_options() -> dict[str, bool]:
    """Options that steps are compiled with on CPUs.

    Reductions stay scalar there unless the order of a sum may change; NaN and infinity keep their
    meaning under this flag.
    """
    return {"xla_cpu_enable_fast_math": True}


def _reduced(x_TI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """x @ w.T as fused multiply-and-sum over I, float32 [T, O]."""
    # Barriers, or what makes x and what takes the product would be fused in and computed per sum.
    x_TI = jax.lax.optimization_barrier(x_TI.astype(jnp.float32))
    rows, n_out = x_TI.shape[0], w_OI.shape[0]
    streams = next(n for n in range(max(1, _SUMS // rows), 0, -1) if n_out % n == 0)
    products = tuple(
        part_OI.astype(jnp.float32) * x_TI[row][None, :]
        for row in range(rows)
        for part_OI in jnp.split(w_OI, streams)
    )
    sums = jax.lax.reduce(
        products,
        (jnp.zeros((), jnp.float32),) * len(products),
        lambda a, b: tuple(map(operator.add, a, b)),
        (1,),
    )
    return jax.lax.optimization_barrier(jnp.concatenate(sums).reshape(rows, n_out))


def _cpu_product(x_TI: jax.Array, w_OI: jax.Array, deterministic: bool) -> jax.Array:
    """x @ w.T, float32 [T, O], the fast way for the number of rows."""
    if x_TI.shape[0] <= (_MOST_ROWS_IN_ORDER if deterministic else _MOST_ROWS):
        return _reduced(x_TI, w_OI)
    # The weight first: the product is read out transposed, but the weight is packed once.
    return jax.lax.dot_general(
        w_OI, x_TI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    ).T


def _library_product(x_TI: jax.Array, w_OI: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x @ w.T in ``dtype`` [T, O], by the platform's library, which sums in float32."""
    if x_TI.shape[0] == 1 and dtype != x_TI.dtype:
        # cuBLAS has no such product of a vector: XLA would write down all of w in float32 first.
        return jnp.sum(w_OI.astype(jnp.float32) * x_TI.astype(jnp.float32), axis=1)[None]
    return jax.lax.dot_general(x_TI, w_OI, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def product(
    x_TI: jax.Array,
    w_OI: jax.Array,
    dtype: jnp.dtype = jnp.float32,
    *,
    deterministic: bool = False,
) -> jax.Array:
    """x @ w.T summed in float32, [T, O] in ``dtype``; the platform lowered for picks the way.

    ``deterministic``: it is compiled without ``cpu_compiler_options``, so that on CPUs too every
    row is summed alike, wherever it stands.
    """
    return jax.lax.platform_dependent(
        x_TI,
        w_OI,
        cpu=lambda x_TI, w_OI: _cpu_product(x_TI, w_OI, deterministic).astype(dtype),
        default=partial(_library_product, dtype=dtype),
    )


def linear(
    x_TI: jax.Array,
    w_OI: jax.Array,
    bias_O: jax.Array | None = None,
    *,
    deterministic: bool = False,
) -> jax.Array:
    """x @ w.T (+ bias) in x's dtype, [T, O]; see ``product``."""
    y_TO = product(x_TI, w_OI, x_TI.dtype, deterministic=deterministic)
    return y_TO if bias_O is None else y_TO + bias_O[None, :]
