"""Writing new keys and values into their slots of the KV pool, in place when donated."""

from __future__ import annotations

import jax


def write_kv(
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    slots_T: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The pools with token t's K/V at slot ``slots_T[t]`` (int32, block * Z + offset).

    Padded tokens name a slot of block 0, which nothing reads. Where two tokens name one slot, one
    of them is kept.
    """
    block_size = k_pool_CKZH.shape[2]
    block_T, offset_T = slots_T // block_size, slots_T % block_size

    def write(pool: jax.Array, new: jax.Array) -> jax.Array:
        return pool.at[block_T, :, offset_T].set(new.astype(pool.dtype), mode="promise_in_bounds")

    return write(k_pool_CKZH, k_TKH), write(v_pool_CKZH, v_TKH)
