"""What the streamed read may not do: build the rectangle, or copy a pool."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from jaxserve_kernels import paged_attention, paged_prefill, write_kv

B, T, N, K, H, Z = 4, 64, 6, 2, 64, 16


def arguments(op, num_blocks: int, width: int) -> list[jax.ShapeDtypeStruct]:
    """Specs of a call of ``op`` over ``num_blocks`` blocks, ``width`` of them a row."""
    f32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    i32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    pool = f32((num_blocks, K, Z, H))
    rows = [f32((B if op is paged_attention else T, N, H)), pool, pool, i32((B, width)), i32((B,))]
    return rows if op is paged_attention else [*rows, i32((B + 1,))]


def intermediates(jaxpr) -> list[tuple[int, ...]]:
    """Shapes of all results in a jaxpr and in those nested in it."""
    shapes = []
    for eqn in jaxpr.eqns:
        for nested in jaxprs_in_params(eqn.params):
            shapes += intermediates(nested)
        shapes += [out.aval.shape for out in eqn.outvars]
    return shapes


def elements(shape: tuple[int, ...]) -> int:
    return 1 if not shape else shape[0] * elements(shape[1:])


def largest_intermediate(op, implementation: str, width: int) -> int:
    call = partial(op, scale=0.125, implementation=implementation)
    traced = jax.make_jaxpr(call)(*arguments(op, 32, width))
    return max(elements(shape) for shape in intermediates(traced.jaxpr))


def temp_bytes(op, implementation: str, num_blocks: int, width: int) -> int:
    call = jax.jit(partial(op, scale=0.125, implementation=implementation))
    compiled = call.lower(*arguments(op, num_blocks, width)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


both_ops = pytest.mark.parametrize("op", [paged_attention, paged_prefill])


@both_ops
def test_no_streamed_intermediate_grows_with_the_table(op):
    narrow, wide = (largest_intermediate(op, "streamed_xla", width) for width in (64, 4096))
    assert narrow == wide < B * N * 4096 * Z


def test_the_partial_sums_of_the_decode_kernel_are_bounded():
    narrow, wide = (
        largest_intermediate(paged_attention, "streamed_triton", width) for width in (1024, 4096)
    )
    assert narrow == wide < B * N * 4096 * Z


@both_ops
def test_the_rectangle_does_grow_so_the_measure_can_fail(op):
    narrow, wide = (largest_intermediate(op, "rectangle", width) for width in (64, 4096))
    assert wide == 64 * narrow


@both_ops
def test_streamed_temp_bytes_depend_on_neither_table_nor_pool(op):
    small = temp_bytes(op, "streamed", num_blocks=64, width=64)
    assert temp_bytes(op, "streamed", num_blocks=64, width=4096) == small
    assert temp_bytes(op, "streamed", num_blocks=65_536, width=64) == small
    assert small < 4 * 2**20


@both_ops
def test_layers_that_write_then_read_donated_pools_copy_none(op):
    layers, num_blocks = 4, 4096

    def step(pools, q, k_TKH, slots_T, *tables):
        out = []
        for k_pool, v_pool in pools:
            k_pool, v_pool = write_kv(k_pool, v_pool, k_TKH, k_TKH, slots_T)
            q = q + op(q, k_pool, v_pool, *tables, scale=0.125, implementation="streamed")
            out.append((k_pool, v_pool))
        return out, q

    q, pool, _, *tables = arguments(op, num_blocks, 64)
    new = jax.ShapeDtypeStruct((q.shape[0], K, H), jnp.float32)
    slots = jax.ShapeDtypeStruct((q.shape[0],), jnp.int32)
    compiled = (
        jax.jit(step, donate_argnums=0)
        .lower([(pool, pool)] * layers, q, new, slots, *tables)
        .compile()
    )
    pool_bytes = num_blocks * K * Z * H * 4
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * layers * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 4
    copies = re.findall(rf"= f32\[{num_blocks},{K},{Z},{H}\]\S* copy\(", compiled.as_text())
    assert copies == []
