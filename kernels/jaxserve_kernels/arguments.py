"""What callers may pass: checks that name the argument and say both sides of a disagreement."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

FLOATS = ("float32", "bfloat16", "float16")
NARROW = ("float8_e4m3fn", "int8")
"""Dtypes of pools that hold a value over a scale."""


class Extras(NamedTuple):
    """The optional arrays of a call, in float32: sink logits [N], and scales [K] of the pools."""

    sinks_N: jax.Array | None
    k_scale_K: jax.Array | None
    v_scale_K: jax.Array | None


def require(holds: bool, message: str) -> None:
    """Raise ValueError unless ``holds``."""
    if not holds:
        raise ValueError(message)


def check_int32(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    """An int32 array of exactly ``shape``."""
    require(array.dtype == jnp.int32, f"{name} is {array.dtype}, must be int32")
    require(array.shape == shape, f"{name} has shape {array.shape}, must be {shape}")


def check_tables(name: str, tables: jax.Array) -> None:
    """Two dimensions, neither empty."""
    require(tables.ndim == 2, f"{name} has {tables.ndim} dimensions, must have 2")
    require(min(tables.shape) > 0, f"{name} has shape {tables.shape}, no side may be 0")


def check_options(window: int | None, soft_cap: float | None) -> None:
    """Absent or in range."""
    require(window is None or window >= 1, f"window is {window}, must be at least 1 or None")
    require(
        soft_cap is None or 0 < soft_cap < float("inf"),
        f"soft_cap is {soft_cap}, must be above 0 and finite, or None",
    )


def _check_floats(name: str, array: jax.Array, allowed: tuple[str, ...]) -> None:
    require(array.dtype.name in allowed, f"{name} is {array.dtype}, must be one of {allowed}")
    require(min(array.shape) > 0, f"{name} has shape {array.shape}, no side may be 0")


def check_pools(q_name: str, q: jax.Array, k_pool: jax.Array, v_pool: jax.Array) -> None:
    """Two pools of one kind, and queries whose heads fit theirs."""
    require(q.ndim == 3, f"{q_name} has {q.ndim} dimensions, must have 3")
    require(k_pool.ndim == 4, f"k_pool_CKZH has {k_pool.ndim} dimensions, must have 4")
    require(
        v_pool.shape == k_pool.shape,
        f"v_pool_CKZH has shape {v_pool.shape}, k_pool_CKZH {k_pool.shape}; must be equal",
    )
    _check_floats(q_name, q, FLOATS)
    _check_floats("k_pool_CKZH", k_pool, FLOATS + NARROW)
    _check_floats("v_pool_CKZH", v_pool, FLOATS + NARROW)
    require(
        v_pool.dtype == k_pool.dtype,
        f"v_pool_CKZH is {v_pool.dtype}, k_pool_CKZH {k_pool.dtype}; must be equal",
    )
    require(
        q.shape[2] == k_pool.shape[3],
        f"{q_name} has head size {q.shape[2]}, k_pool_CKZH {k_pool.shape[3]}; must be equal",
    )
    require(
        q.shape[1] % k_pool.shape[1] == 0,
        f"{q_name} has {q.shape[1]} query heads, no multiple of k_pool_CKZH's "
        f"{k_pool.shape[1]} kv heads",
    )


def scale_per_head(
    name: str, scale: jax.Array | float | None, pool: jax.Array, pool_name: str
) -> jax.Array | None:
    """``scale`` as float32 [K]: there for a pool of NARROW dtype, None for any other."""
    if pool.dtype.name not in NARROW:
        require(scale is None, f"{name} is given, and {pool_name} is {pool.dtype}, which has none")
        return None
    if scale is None:
        raise ValueError(f"{name} is None, and {pool_name} is {pool.dtype}, which needs one")
    scale = jnp.asarray(scale)
    heads = pool.shape[1]
    require(scale.dtype == jnp.float32, f"{name} is {scale.dtype}, must be float32")
    require(
        scale.shape in ((), (heads,)), f"{name} has shape {scale.shape}, must be () or ({heads},)"
    )
    return jnp.broadcast_to(scale, (heads,))


def checked_extras(
    sinks_N: jax.Array | None,
    k_scale: jax.Array | float | None,
    v_scale: jax.Array | float | None,
    num_heads: int,
    k_pool: jax.Array,
    v_pool: jax.Array,
) -> Extras:
    """The optional arrays of a call of ``num_heads`` query heads."""
    if sinks_N is not None:
        _check_floats("sinks_N", sinks_N, FLOATS)
        require(
            sinks_N.shape == (num_heads,),
            f"sinks_N has shape {sinks_N.shape}, must be ({num_heads},)",
        )
        sinks_N = sinks_N.astype(jnp.float32)
    return Extras(
        sinks_N,
        scale_per_head("k_scale", k_scale, k_pool, "k_pool_CKZH"),
        scale_per_head("v_scale", v_scale, v_pool, "v_pool_CKZH"),
    )
