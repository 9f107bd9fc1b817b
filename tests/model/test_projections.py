"""The kernels of a layer's products give what the plain way gives, where they are taken."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels import fused

from jaxserve.model import projections
from jaxserve.model.params import param_specs
from jaxserve.model.rotary import rotary_table
from tests.models import FULL

ROWS, BLOCKS, Z = 3, 4, 8


def draw(tree, seed: int):
    """Normal arrays for a tree of specs, of variance 1 / (last axis)."""
    rng = np.random.default_rng(seed)

    def array(spec: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.standard_normal(spec.shape, np.float32) / spec.shape[-1] ** 0.5
        return jnp.asarray(values, spec.dtype)

    return jax.tree.map(array, tree)


def layer_outputs(config, layer, x_TD) -> list[np.ndarray]:
    """Everything the three functions of one layer give."""
    outputs = jax.jit(lambda layer, x_TD: _layer_outputs(config, layer, x_TD))(layer, x_TD)
    return [np.asarray(y.astype(jnp.float32)) for y in outputs]


def _layer_outputs(config, layer, x_TD) -> list[jax.Array]:
    positions = jnp.array([4, 0, 19], jnp.int32)
    slots = jnp.array([Z + 3, 3 * Z, 2 * Z + 7], jnp.int32)
    pool = jnp.zeros((BLOCKS, config.num_kv_heads, Z, config.head_dim), x_TD.dtype)
    table = rotary_table(config, positions)
    inputs = projections.attention_inputs(config, layer, x_TD, table, slots, pool, pool)
    out = inputs[0].reshape(ROWS, config.q_size)
    summed = projections.add_product(x_TD, out, layer.out_DQ, layer.out_bias_D)
    return [*inputs, summed, projections.gated(config, layer, summed)]


def test_the_kernels_give_what_the_plain_way_gives(monkeypatch):
    config = replace(FULL, num_kv_heads=1)
    layer = draw(param_specs(config, "bfloat16").layers[0], 0)
    x_TD = draw(jax.ShapeDtypeStruct((ROWS, config.hidden_size), jnp.bfloat16), 1)
    plain = layer_outputs(config, layer, x_TD)
    called = []

    def interpreted(name: str):
        run = getattr(fused, name)

        def call(*operands):
            called.append(name)
            return run(*operands, interpret=True)

        return call

    for name in ("norm_qkv_write", "norm_gate_up", "add_product"):
        monkeypatch.setattr(fused, name, interpreted(name))
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *operands, cuda, default: cuda(*operands)
    )
    kernels = layer_outputs(config, layer, x_TD)
    assert called == ["norm_qkv_write", "add_product", "norm_gate_up"]
    for got, want in zip(kernels, plain, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-2, rtol=2e-2)


KERNELS = {"norm_qkv_write", "rotate_write", "norm_gate_up", "add_product"}


@pytest.mark.parametrize(
    ("rows", "dtype", "kernels"),
    [
        (64, "bfloat16", {"norm_qkv_write", "rotate_write", "norm_gate_up", "add_product"}),
        (65, "bfloat16", {"norm_qkv_write", "rotate_write"}),
        (256, "bfloat16", {"norm_qkv_write", "rotate_write"}),
        (257, "bfloat16", {"rotate_write"}),
        (1, "float32", {"rotate_write"}),
    ],
)
def test_rows_and_dtype_say_which_kernels_a_program_for_cuda_may_have(rows, dtype, kernels):
    config = replace(FULL, num_kv_heads=1, head_dim=64)
    spec = partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    layer = param_specs(config, dtype).layers[0]
    pool = spec((BLOCKS, config.num_kv_heads, Z, config.head_dim))
    angles = jax.ShapeDtypeStruct((rows, config.head_dim // 2), jnp.float32)

    def whole_layer(layer, x_TD, table, slots, pool):
        inputs = projections.attention_inputs(config, layer, x_TD, table, slots, pool, pool)
        out = inputs[0].reshape(rows, config.q_size)
        summed = projections.add_product(x_TD, out, layer.out_DQ, layer.out_bias_D)
        return projections.gated(config, layer, summed)

    traced = str(
        jax.make_jaxpr(whole_layer)(
            layer,
            spec((rows, config.hidden_size)),
            (angles, angles),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            pool,
        )
    )
    assert {name for name in KERNELS if name in traced} == kernels
