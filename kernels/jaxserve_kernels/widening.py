"""What a Triton kernel can read of a pool, and how values of 8 bits become operands of products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt


def check_pool(pool: jax.Array) -> None:
    """Raise NotImplementedError for a pool that the kernels cannot read."""
    head_size = pool.shape[3]
    if head_size % 16 or head_size > 256:
        raise NotImplementedError(f"head size {head_size} is no multiple of 16 up to 256")
    # Pallas takes 32-bit offsets up to 2**32 bytes, and elements of a byte pass 2**31 before that.
    if pool.dtype.itemsize == 1 and 2**31 < pool.size <= 2**32:
        raise NotImplementedError(
            f"a pool of {pool.size} elements of {pool.dtype} is between 2**31 and 2**32"
        )


def float8_unit(pool_dtype: Any, interpret: bool) -> int:
    """How many times smaller than they are ``widened`` leaves values of ``pool_dtype``.

    Ada and Hopper have instructions that convert float8; elsewhere its bits are moved.
    """
    if pool_dtype != jnp.float8_e4m3fn or interpret:
        return 1
    gpu_info = getattr(plt, "get_gpu_info", None)  # not in jax 0.10
    try:
        return 1 if gpu_info is not None and gpu_info().compute_capability >= 89 else 2**8
    except ValueError:  # no GPU is known to be lowered for
        return 2**8


def widened(x: jax.Array, compute: Any, float8_unit: int) -> jax.Array:
    """Values of a pool in ``compute``, those of float8 over ``float8_unit``."""
    if x.dtype != jnp.float8_e4m3fn or float8_unit == 1:
        return x.astype(compute)
    # A float16 of the same bits, exponent at the low end: 2**8 too small, exactly.
    bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16)
    bits = (bits & -(2**15)) | ((bits & 0x7F) << 7)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(compute)
