"""Matrix products against weights stored [out, in].

A decode step reads every weight once and multiplies it by a handful of rows, so it should run at
the speed of memory. Library products do on GPUs. On XLA:CPU they pack the weights first, which at
eight rows costs as much as reading them; there, few rows are multiplied and summed by one fused
reduction instead, which reads each weight straight into registers.
"""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp

# Sums a fused reduction carries: rows times parts of the weight. More of them reuse each loaded
# vector of x; past this many the registers overflow (AVX-512 has 32).
_ACCUMULATORS = 24
_MOST_ROWS = 8


def cpu_compiler_options() -> dict[str, bool]:
    """Options that steps are compiled with on CPUs.

    Reductions stay scalar there unless the order of a sum may change; NaN and infinity keep their
    meaning under this flag.
    """
    return {"xla_cpu_enable_fast_math": True}


def _parts(rows: int, n_out: int) -> int:
    """Into how many equal row streams to cut a weight of ``n_out`` rows."""
    most = min(8, _ACCUMULATORS // rows)
    return next(parts for parts in range(most, 0, -1) if n_out % parts == 0)


def _fused_reduction(x_TI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """x @ w.T as one variadic reduction over I, float32 [T, O]."""
    # Barriers, or what makes x and what takes the product would be fused in and computed per sum.
    x_TI = jax.lax.optimization_barrier(x_TI.astype(jnp.float32))
    rows, n_out = x_TI.shape[0], w_OI.shape[0]
    parts = _parts(rows, n_out)
    size = n_out // parts
    products = tuple(
        w_OI[p * size : (p + 1) * size].astype(jnp.float32) * x_TI[row][None, :]
        for row in range(rows)
        for p in range(parts)
    )
    zero = jnp.zeros((), jnp.float32)
    sums = jax.lax.reduce(
        products,
        (zero,) * len(products),
        lambda a, b: tuple(map(operator.add, a, b)),
        (1,),
    )
    return jax.lax.optimization_barrier(jnp.concatenate(sums).reshape(rows, n_out))


def _cpu_product(x_TI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """x @ w.T, float32 [T, O], the fast way for the number of rows."""
    if x_TI.shape[0] <= _MOST_ROWS:
        return _fused_reduction(x_TI, w_OI)
    # The weight first: the product is read out transposed, but the weight is packed once.
    return jax.lax.dot_general(
        w_OI, x_TI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    ).T


def _library_product(x_TI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """x @ w.T, float32 [T, O], by the platform's library."""
    return jax.lax.dot_general(
        x_TI, w_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def product(x_TI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """x @ w.T summed in float32, float32 [T, O]; the platform lowered for picks the way."""
    return jax.lax.platform_dependent(x_TI, w_OI, cpu=_cpu_product, default=_library_product)


def linear(x_TI: jax.Array, w_OI: jax.Array, bias_O: jax.Array | None = None) -> jax.Array:
    """x @ w.T (+ bias) in x's dtype, [T, O]."""
    y_TO = product(x_TI, w_OI).astype(x_TI.dtype)
    return y_TO if bias_O is None else y_TO + bias_O[None, :]
