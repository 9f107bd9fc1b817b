"""write_kv puts each token's keys and values into its slot and touches nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxserve_kernels import write_kv

C, K, Z, H, T = 9, 2, 8, 16, 12

run = jax.jit(write_kv)


@given(
    slots=st.lists(st.integers(Z, C * Z - 1), min_size=T, max_size=T, unique=True),
    padded=st.integers(0, T),
    seed=st.integers(0, 2**16),
)
def test_each_token_lands_in_its_slot_and_the_rest_is_untouched(slots, padded, seed):
    rng = np.random.default_rng(seed)
    k_pool, v_pool = rng.standard_normal((2, C, K, Z, H), np.float32)
    k_new, v_new = rng.standard_normal((2, T, K, H), np.float32)
    slots = np.array(slots, np.int32)
    slots[T - padded :] = 3  # padding shares one slot of the null block
    got = run(k_pool, v_pool, k_new, v_new, slots)
    for pool, new, out in zip((k_pool, v_pool), (k_new, v_new), got, strict=True):
        want = pool.copy()
        for token in range(T - padded):
            block, offset = divmod(int(slots[token]), Z)
            for head in range(K):
                want[block, head, offset] = new[token, head]
        np.testing.assert_array_equal(np.asarray(out)[1:], want[1:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_new_values_take_the_pools_dtype(dtype):
    pool = jnp.zeros((C, K, Z, H), dtype)
    new = np.random.default_rng(0).standard_normal((T, K, H), np.float32)
    k_pool, v_pool = run(pool, pool, new, 2 * new, np.arange(Z, Z + T, dtype=np.int32))
    assert k_pool.dtype == v_pool.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(np.asarray(v_pool[1, :, 3]), (2 * new[3]).astype(dtype))


def test_donated_pools_are_written_in_place_at_any_size():
    def temp_and_alias(num_blocks: int) -> tuple[int, int]:
        pool = jax.ShapeDtypeStruct((num_blocks, K, Z, H), jnp.float32)
        new = jax.ShapeDtypeStruct((T, K, H), jnp.float32)
        slots = jax.ShapeDtypeStruct((T,), jnp.int32)
        memory = (
            jax.jit(write_kv, donate_argnums=(0, 1))
            .lower(pool, pool, new, new, slots)
            .compile()
            .memory_analysis()
        )
        return memory.temp_size_in_bytes, memory.alias_size_in_bytes

    (small, _), (large, alias) = temp_and_alias(64), temp_and_alias(8192)
    assert large == small < 2**20
    assert alias == 2 * 8192 * K * Z * H * 4


@pytest.mark.parametrize(
    ("dtype", "end"), [("int8", 127.0), ("float8_e4m3fn", 448.0)], ids=["int8", "float8"]
)
def test_pools_of_8_bits_take_the_nearest_value_over_the_heads_scale(dtype, end):
    pool = jnp.zeros((C, K, Z, H), dtype)
    rng = np.random.default_rng(1)
    new = rng.standard_normal((T, K, H), np.float32) * end  # a third of these are out of range
    k_scale, v_scale = np.float32([0.5, 2.0]), np.float32(1.0)
    slots = np.arange(Z, Z + T, dtype=np.int32)
    pools = run(pool, pool, new, new, slots, k_scale=k_scale, v_scale=v_scale)
    grid = np.unique(np.arange(256, dtype=np.uint8).view(pool.dtype).astype(np.float32))
    grid = grid[np.isfinite(grid)]
    for out, scale in zip(pools, (k_scale[:, None], v_scale), strict=True):
        assert out.dtype == jnp.dtype(dtype)
        stored = np.asarray(out.astype(jnp.float32))[slots // Z, :, slots % Z]
        wanted = np.clip(new / scale, grid[0], grid[-1])
        nearest = np.abs(wanted[..., None] - grid).min(-1)
        np.testing.assert_array_equal(np.abs(wanted - stored), nearest)


def test_a_pool_of_8_bits_is_not_written_without_scales():
    pool = jnp.zeros((C, K, Z, H), jnp.int8)
    new = jnp.zeros((T, K, H))
    with pytest.raises(ValueError, match="k_scale is None, and k_pool_CKZH is int8"):
        write_kv(pool, pool, new, new, jnp.zeros(T, jnp.int32))
