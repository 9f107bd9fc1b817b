"""A layer's matrix products and what surrounds each, plain or in one kernel.

The plain way is what the kernels are held to, and what every platform but CUDA runs. There, few
rows of bfloat16 go through the kernels of ``jaxserve_kernels.fused``: at few rows a layer takes as
long as its weights are read, and every launch between two products adds to that. With more rows
arithmetic sets the pace and the library multiplies faster; a kernel then has to save launches
around a product too small for that to matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxserve_kernels import fused, write_kv
from jaxserve_kernels.products import FEW_ROWS, MAX_ROWS

from jaxserve.config import ModelConfig
from jaxserve.model.linear import linear
from jaxserve.model.params import LayerParams
from jaxserve.model.rotary import rotate

Table = tuple[jax.Array, jax.Array]


def rms_norm(x_TD: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm with float32 statistics (Zhang & Sennrich 2019, arXiv 1910.07467)."""
    x32 = x_TD.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return weight_D[None, :] * (x32 * scale).astype(x_TD.dtype)


def _either(kernel: Callable[..., Any], plain: Callable[..., Any], *operands: Any) -> Any:
    """``kernel`` of the operands where it is lowered for CUDA and takes them, else ``plain``."""

    def on_cuda(*operands: Any) -> Any:
        try:
            return kernel(*operands)
        except NotImplementedError:
            return plain(*operands)

    return jax.lax.platform_dependent(*operands, cuda=on_cuda, default=plain)


def _up_to(
    most_rows: int,
    kernel: Callable[..., Any],
    plain: Callable[..., Any],
    x_TD: jax.Array,
    *rest: Any,
) -> Any:
    """``_either`` for up to ``most_rows`` rows of bfloat16, else ``plain``."""
    if x_TD.dtype != jnp.bfloat16 or x_TD.shape[0] > most_rows:
        return plain(x_TD, *rest)
    return _either(kernel, plain, x_TD, *rest)


def attention_inputs(
    config: ModelConfig,
    layer: LayerParams,
    x_TD: jax.Array,
    table: Table,
    slots_T: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    *,
    deterministic: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [T, N, H] of normed x, turned by ``table``, and the pools with K/V at ``slots_T``.

    A small product with the most around it: the kernel saves two launches at any number of rows
    that it takes.
    """
    eps, N = config.rms_norm_eps, config.num_heads

    def plain(
        x_TD: jax.Array,
        layer: LayerParams,
        table: Table,
        slots_T: jax.Array,
        k_pool: jax.Array,
        v_pool: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        normed = rms_norm(x_TD, layer.attn_norm_D, eps)
        qkv = linear(normed, layer.qkv_ED, layer.qkv_bias_E, deterministic=deterministic)
        return _either(fused.rotate_write, rotate_write, qkv, table, slots_T, k_pool, v_pool)

    def rotate_write(
        qkv_TE: jax.Array, table: Table, slots_T: jax.Array, k_pool: jax.Array, v_pool: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        heads = qkv_TE.reshape(-1, N + 2 * config.num_kv_heads, config.head_dim)
        turned = rotate(heads[:, : N + config.num_kv_heads], table)
        k_TKH, v_TKH = turned[:, N:], heads[:, N + config.num_kv_heads :]
        return turned[:, :N], *write_kv(k_pool, v_pool, k_TKH, v_TKH, slots_T)

    def kernel(x_TD: jax.Array, layer: LayerParams, *rest: Any) -> Any:
        norm = fused.RmsNorm(layer.attn_norm_D, eps)
        return fused.norm_qkv_write(x_TD, norm, layer.qkv_ED, layer.qkv_bias_E, *rest)

    return _up_to(MAX_ROWS, kernel, plain, x_TD, layer, table, slots_T, k_pool, v_pool)


def gated(
    config: ModelConfig, layer: LayerParams, x_TD: jax.Array, *, deterministic: bool = False
) -> jax.Array:
    """The inner half of SwiGLU (Shazeer 2020, arXiv 2002.05202) over normed x, [T, F].

    The largest product of a layer: the library's above FEW_ROWS, where it gains more than the
    launches of norm and activation cost.
    """
    eps = config.rms_norm_eps

    def plain(x_TD: jax.Array, layer: LayerParams) -> jax.Array:
        normed = rms_norm(x_TD, layer.ffn_norm_D, eps)
        both = linear(normed, layer.gate_up_JD, layer.gate_up_bias_J, deterministic=deterministic)
        gate, up = jnp.split(both, 2, axis=-1)
        return jax.nn.silu(gate) * up

    def kernel(x_TD: jax.Array, layer: LayerParams) -> jax.Array:
        norm = fused.RmsNorm(layer.ffn_norm_D, eps)
        return fused.norm_gate_up(x_TD, norm, layer.gate_up_JD, layer.gate_up_bias_J)

    return _up_to(FEW_ROWS, kernel, plain, x_TD, layer)


def add_product(
    x_TD: jax.Array,
    y_TI: jax.Array,
    w_DI: jax.Array,
    bias_D: jax.Array | None,
    *,
    deterministic: bool = False,
) -> jax.Array:
    """x + y @ w.T (+ bias), [T, D].

    The library's above FEW_ROWS: it adds x itself, so a kernel would save no launch.
    """

    def plain(
        x_TD: jax.Array, y_TI: jax.Array, w_DI: jax.Array, bias_D: jax.Array | None
    ) -> jax.Array:
        return x_TD + linear(y_TI, w_DI, bias_D, deterministic=deterministic)

    return _up_to(FEW_ROWS, fused.add_product, plain, x_TD, y_TI, w_DI, bias_D)
