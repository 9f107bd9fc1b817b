"""Times work on a device, and fills device memory with values that cost no time to make."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

State = TypeVar("State")


def seconds_a_step(
    step: Callable[[State], State],
    state: State,
    *,
    at_least: float = 0.02,
    most: int = 1000,
    repeats: int = 5,
) -> tuple[float, State]:
    """Device seconds of ``step``, which is called on its own result, and the last result.

    The time of many calls less that of few, over the difference: what a first call and the wait for
    the last one cost is not in it, and the host's share is not where the device is the slower one.
    Median of ``repeats``; the longer run takes ``at_least`` seconds, but no more than ``most``
    calls.
    """

    def run(calls: int, state: State) -> tuple[float, State]:
        start = time.perf_counter()
        for _ in range(calls):
            state = step(state)
        jax.block_until_ready(state)
        return time.perf_counter() - start, state

    _, state = run(1, state)  # a first call may record a command buffer
    once, state = run(2, state)
    many = min(most, max(4, int(2 * at_least / max(once, 1e-6))))
    slopes = []
    for _ in range(repeats):
        short, state = run(2, state)
        long, state = run(2 + many, state)
        slopes.append((long - short) / many)
    return statistics.median(slopes), state


def host_seconds_a_call(
    step: Callable[[State], State], state: State, calls: int = 30
) -> tuple[float, State]:
    """Median seconds until a call returns, with an idle device."""
    taken = []
    for _ in range(calls):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = step(state)
        taken.append(time.perf_counter() - start)
    jax.block_until_ready(state)
    return statistics.median(taken), state


@partial(jax.jit, static_argnums=(0, 1))
def noise(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    """Values in [-1, 1) by a hash of their place, made in place: no larger array is needed."""
    place = sum(
        jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(0x9E3779B1 + 2 * axis)
        for axis in range(len(shape))
    )
    bits = (place + jnp.uint32(seed)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0xC2B2AE35)
    top = (bits >> 8).astype(jnp.float32)
    return (top * jnp.float32(2.0**-23) - jnp.float32(1.0)).astype(dtype)


def fill(specs: Any, scale: float) -> Any:
    """A pytree of ShapeDtypeStruct as arrays of noise times ``scale``, vectors as ones."""

    def one(spec: jax.ShapeDtypeStruct) -> jax.Array:
        if len(spec.shape) < 2:
            return jnp.ones(spec.shape, spec.dtype)
        return noise(spec.shape, str(spec.dtype), 1) * jnp.asarray(scale, spec.dtype)

    return jax.tree.map(one, specs)
