"""A wrong argument of a paged attention call is refused by name, with both numbers."""

import jax
import jax.numpy as jnp
import jaxserve_kernels
import pytest
from jaxserve_kernels import IMPLEMENTATIONS, paged_attention, paged_prefill

B, T, N, K, H, Z, C, P = 2, 32, 4, 2, 64, 16, 8, 3


def good(op) -> dict:
    pool = jnp.zeros((C, K, Z, H))
    arguments = {
        "k_pool_CKZH": pool,
        "v_pool_CKZH": pool,
        "scale": 1.0,
    }
    ints = {"tables": jnp.zeros((B, P), jnp.int32), "lens": jnp.zeros((B,), jnp.int32)}
    if op is paged_attention:
        return arguments | {
            "q_BNH": jnp.zeros((B, N, H)),
            "block_tables_BP": ints["tables"],
            "context_lens_B": ints["lens"],
        }
    return arguments | {
        "q_TNH": jnp.zeros((T, N, H)),
        "block_tables_SP": ints["tables"],
        "context_lens_S": ints["lens"],
        "cu_query_lens_S1": jnp.zeros((B + 1,), jnp.int32),
    }


INT8_POOL = jnp.zeros((C, K, Z, H), jnp.int8)
NARROW = {"k_pool_CKZH": INT8_POOL, "v_pool_CKZH": INT8_POOL, "k_scale": 1.0, "v_scale": 1.0}
BOTH = [
    ({"k_pool_CKZH": jnp.zeros((K, Z, H))}, r"k_pool_CKZH has 3 dimensions, must have 4"),
    ({"v_pool_CKZH": jnp.zeros((C, K, Z, 32))}, r"v_pool_CKZH has shape \(8, 2, 16, 32\).* 64\)"),
    ({"v_pool_CKZH": jnp.zeros((C, K, Z, H), jnp.bfloat16)}, "v_pool_CKZH is bfloat16.*float32"),
    ({"window": 0}, "window is 0, must be at least 1"),
    ({"soft_cap": 0.0}, "soft_cap is 0.0, must be above 0"),
    ({"soft_cap": float("inf")}, "soft_cap is inf, must be above 0 and finite"),
    ({"implementation": "flash"}, "implementation is 'flash', must be one of"),
    ({"sinks": jnp.zeros((5,))}, r"sinks_N has shape \(5,\), must be \(4,\)"),
    ({"sinks": jnp.zeros((N,), jnp.int32)}, "sinks_N is int32, must be one of"),
    ({"k_scale": 1.0}, "k_scale is given, and k_pool_CKZH is float32, which has none"),
    ({"v_scale": 1.0}, "v_scale is given, and v_pool_CKZH is float32, which has none"),
    (NARROW | {"k_scale": None}, "k_scale is None, and k_pool_CKZH is int8, which needs one"),
    (NARROW | {"v_scale": None}, "v_scale is None, and v_pool_CKZH is int8, which needs one"),
    (NARROW | {"v_scale": jnp.zeros((3,))}, r"v_scale has shape \(3,\), must be \(\) or \(2,\)"),
    (NARROW | {"k_scale": jnp.zeros((2,), jnp.bfloat16)}, "k_scale is bfloat16, must be float32"),
]
DECODE = [
    ({"q_BNH": jnp.zeros((B, H))}, "q_BNH has 2 dimensions, must have 3"),
    ({"q_BNH": jnp.zeros((B, 5, H))}, "q_BNH has 5 query heads, no multiple of .* 2 kv heads"),
    ({"q_BNH": jnp.zeros((B, N, 80))}, "q_BNH has head size 80, k_pool_CKZH 64"),
    ({"q_BNH": jnp.zeros((B, N, H), jnp.int8)}, "q_BNH is int8, must be one of"),
    ({"q_BNH": jnp.zeros((0, N, H))}, r"q_BNH has shape \(0, 4, 64\), no side may be 0"),
    ({"block_tables_BP": jnp.zeros((B, P))}, "block_tables_BP is float32, must be int32"),
    ({"block_tables_BP": jnp.zeros((3, P), jnp.int32)}, r"block_tables_BP .*\(3, 3\).*\(2, 3\)"),
    ({"block_tables_BP": jnp.zeros((P,), jnp.int32)}, "block_tables_BP has 1 dimensions"),
    ({"context_lens_B": jnp.zeros((3,), jnp.int32)}, r"context_lens_B .*\(3,\).*\(2,\)"),
]
PREFILL = [
    ({"q_TNH": jnp.zeros((T, 3, H))}, "q_TNH has 3 query heads, no multiple of .* 2 kv heads"),
    ({"context_lens_S": jnp.zeros((3,), jnp.int32)}, r"context_lens_S .*\(3,\).*\(2,\)"),
    ({"cu_query_lens_S1": jnp.zeros((B,), jnp.int32)}, r"cu_query_lens_S1 .*\(2,\).*\(3,\)"),
]


@pytest.mark.parametrize(
    ("op", "wrong", "message"),
    [(paged_attention, *row) for row in BOTH + DECODE]
    + [(paged_prefill, *row) for row in BOTH + PREFILL],
)
def test_a_wrong_argument_is_named_with_both_numbers(op, wrong, message):
    with pytest.raises(ValueError, match=message):
        op(**good(op) | wrong)


@pytest.mark.parametrize("op", [paged_attention, paged_prefill])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_name_of_an_implementation_runs(op, implementation):
    arguments = good(op)
    if implementation == "streamed_mosaic" and op is paged_attention:
        with pytest.raises(NotImplementedError, match=r"streamed_mosaic: (jax 0\.10|.* float32)"):
            op(**arguments, implementation=implementation)
        return
    q = arguments["q_BNH" if op is paged_attention else "q_TNH"]
    out = jax.eval_shape(lambda: op(**arguments, implementation=implementation))
    assert (out.shape, out.dtype) == (q.shape, q.dtype)


class Unable:
    @staticmethod
    def paged_attention(*_, **__):
        raise NotImplementedError("not on this device")


def test_an_implementation_the_device_cannot_run_is_passed_over(monkeypatch):
    monkeypatch.setitem(jaxserve_kernels._MODULES, "streamed_xla", Unable)
    out = paged_attention(**good(paged_attention), implementation="auto")
    assert out.shape == (B, N, H)
    with pytest.raises(NotImplementedError, match="streamed_xla: not on this device"):
        paged_attention(**good(paged_attention), implementation="streamed")
