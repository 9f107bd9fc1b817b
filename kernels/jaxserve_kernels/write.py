"""Writing new keys and values into their slots of the KV pool, in place when donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve_kernels.arguments import scale_per_head


def quantize(values: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``values / scale`` rounded to the nearest (ties to even) of ``dtype``; what is beyond its
    range takes its end. ``scale`` broadcasts. ``dtype`` is float8_e4m3fn or int8.
    """
    scaled = values.astype(jnp.float32) / scale
    if dtype == jnp.int8:
        end = jnp.iinfo(jnp.int8)
        return jnp.clip(jnp.round(scaled), end.min, end.max).astype(dtype)
    end = jnp.finfo(dtype)
    return jnp.clip(scaled, float(end.min), float(end.max)).astype(dtype)


def write_kv(
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    slots_T: jax.Array,
    *,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The pools with token t's K/V at slot ``slots_T[t]`` (int32, block * Z + offset).

    Padded tokens name a slot of block 0, which nothing reads. Where two tokens name one slot, one
    of them is kept. Pools of float8_e4m3fn or int8 take the scales that
    :func:`jaxserve_kernels.paged_attention` reads them with; see :func:`quantize`.
    """
    block_size = k_pool_CKZH.shape[2]
    block_T, offset_T = slots_T // block_size, slots_T % block_size

    def write(pool: jax.Array, new: jax.Array, scale_K: jax.Array | None) -> jax.Array:
        if scale_K is None:
            new = new.astype(pool.dtype)
        else:
            new = quantize(new, scale_K[None, :, None], pool.dtype)
        return pool.at[block_T, :, offset_T].set(new, mode="promise_in_bounds")

    return (
        write(k_pool_CKZH, k_TKH, scale_per_head("k_scale", k_scale, k_pool_CKZH, "k_pool_CKZH")),
        write(v_pool_CKZH, v_TKH, scale_per_head("v_scale", v_scale, v_pool_CKZH, "v_pool_CKZH")),
    )
