"""The matrix products of a decoder layer at few rows, each with what surrounds it in one kernel.

At few rows a product takes as long as reading its weights, and a small kernel between two products
about as long as starting it. So norms, rotary embedding, the write of keys and values, activations
and residual sums ride along: a layer is four of these kernels and its attention.

A norm's statistics are summed on the way and divided out at the end, since they are one number a
row: ``norm(x) @ w.T = (x * norm_weight) @ w.T / rms(x)``. Weights are [out, in] and read once, by
programs that take a few rows of them against all rows of x; above 128 rows of x two programs share
a tile of weights, and the second finds it in the L2 cache. No row of a result depends on another
row of x. Products multiply bfloat16, which has the range for values not yet divided; everything
else between the loads and the stores is float32.

Shape letters beyond those of the package: D model width, F ffn width, E = (N + 2K) * H.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxserve_kernels.arguments import FLOATS
from jaxserve_kernels.products import (
    FEW_ROWS,
    RmsNorm,
    Tile,
    check_bfloat16,
    plus_bias,
    products,
    tile_for,
)


def _lanes(head_size: int, most: int) -> int:
    """Pairs of a head that a program takes: the largest power of two that divides them."""
    if head_size % 16:
        raise NotImplementedError(f"head size {head_size} is no multiple of 16")
    return math.gcd(head_size // 2, most)


def _store_head(
    halves: tuple[jax.Array, jax.Array],
    head: jax.Array,
    row: jax.Array,
    first: jax.Array,
    row_mask: jax.Array,
    table: Any,
    slots_ref: Any,
    refs: tuple[Any, Any, Any],
) -> None:
    """Rows ``row`` of head ``head``: lanes ``first`` and those H / 2 further, float32.

    A query is turned and stored in q, a key turned and written to its slot, a value written.
    """
    q_ref, k_ref, v_ref = refs
    N, H = q_ref.shape[1:]
    K, Z = k_ref.shape[1:3]
    mask, second = row_mask[:, None], first + H // 2
    cos, sin = (plt.load(t.at[row[:, None], first[None]], mask=mask, other=0.0) for t in table)
    y1, y2 = halves
    turned = y1 * cos - y2 * sin, y2 * cos + y1 * sin

    def store(ref: Any, at: tuple[Any, ...], parts: tuple[jax.Array, jax.Array]) -> None:
        for lane, part in zip((first, second), parts, strict=True):
            plt.store(ref.at[(*at, lane[None])], part.astype(ref.dtype), mask=mask)

    slot = plt.load(slots_ref.at[row], mask=row_mask, other=0)
    block, offset = lax.div(slot, jnp.int32(Z))[:, None], lax.rem(slot, jnp.int32(Z))[:, None]

    @pl.when(head < N)
    def _() -> None:
        store(q_ref, (row[:, None], head), turned)

    @pl.when((head >= N) & (head < N + K))
    def _() -> None:
        store(k_ref, (block, head - N, offset), turned)

    @pl.when(head >= N + K)
    def _() -> None:
        store(v_ref, (block, head - N - K, offset), halves)


def _qkv_kernel(
    x_ref: Any,
    norm_ref: Any,
    w_ref: Any,
    bias_ref: Any,
    table: Any,
    slots_ref: Any,
    _k_ref: Any,
    _v_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *,
    eps: float,
    tile: Tile,
) -> None:
    """Program (_, head, i): pairs i * out to (i + 1) * out - 1 of a query, key or value head."""
    head, row, H = pl.program_id(1), tile.row(), q_ref.shape[2]
    first = pl.program_id(2) * tile.out + lax.iota(jnp.int32, tile.out)
    second = first + H // 2
    outs = (head * H + first, head * H + second)
    y = products(x_ref, w_ref, outs, RmsNorm(norm_ref, eps), tile)
    y1, y2 = (plus_bias(part, bias_ref, out) for part, out in zip(y, outs, strict=True))

    mask = row < x_ref.shape[0]
    _store_head((y1, y2), head, row, first, mask, table, slots_ref, (q_ref, k_ref, v_ref))


def norm_qkv_write(
    x_TD: jax.Array,
    norm: RmsNorm,
    qkv_ED: jax.Array,
    bias_E: jax.Array | None,
    table: tuple[jax.Array, jax.Array],
    slots_T: jax.Array,
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norm, query-key-value projection, rotary embedding and the write of K/V.

    ``table`` is (cos, sin), float32 [T, H / 2] each, of each token's position; pairs are (i,
    i + H / 2). Returns q [T, N, H] and the pools with token t's K/V at slot ``slots_T[t]`` (int32,
    block * Z + offset), in place if donated. Raises NotImplementedError for more than MAX_ROWS
    tokens, a dtype other than bfloat16, or a head size that is no multiple of 16, above 64 tokens
    of 64.
    """
    check_bfloat16(x_TD=x_TD, qkv_ED=qkv_ED, k_pool_CKZH=k_pool_CKZH, v_pool_CKZH=v_pool_CKZH)
    T, (_, K, _, H) = x_TD.shape[0], k_pool_CKZH.shape
    heads = qkv_ED.shape[0] // H
    tile = tile_for(T, out=8)
    tile = tile._replace(out=_lanes(H, tile.out))
    if T > FEW_ROWS and tile.out < 32:
        raise NotImplementedError(f"{T} rows: head size {H} is no multiple of 64")
    pools = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool_CKZH, v_pool_CKZH)]
    first_pool = 5 + len(table) - (bias_E is None)
    return pl.pallas_call(
        partial(_qkv_kernel, eps=norm.eps, tile=tile),
        grid=(pl.cdiv(T, tile.rows), heads, H // 2 // tile.out),
        out_shape=(jax.ShapeDtypeStruct((T, heads - 2 * K, H), x_TD.dtype), *pools),
        input_output_aliases={first_pool: 1, first_pool + 1: 2},
        compiler_params=tile.compiler_params,
        interpret=interpret,
        name="norm_qkv_write",
    )(x_TD, norm.weight_D, qkv_ED, bias_E, table, slots_T, k_pool_CKZH, v_pool_CKZH)


def _rotate_kernel(
    qkv_ref: Any,
    table: Any,
    slots_ref: Any,
    _k_ref: Any,
    _v_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *,
    rows: int,
    lanes: int,
) -> None:
    """Program (head, i, j): pairs i * lanes on of rows j * rows on of a head."""
    head, H = pl.program_id(0), q_ref.shape[2]
    first = pl.program_id(1) * lanes + lax.iota(jnp.int32, lanes)
    row = pl.program_id(2) * rows + lax.iota(jnp.int32, rows)
    row_mask = row < qkv_ref.shape[0]

    def half(lane: jax.Array) -> jax.Array:
        at = (row[:, None], (head * H + lane)[None])
        return plt.load(qkv_ref.at[at], mask=row_mask[:, None], other=0.0).astype(jnp.float32)

    halves = half(first), half(first + H // 2)
    _store_head(halves, head, row, first, row_mask, table, slots_ref, (q_ref, k_ref, v_ref))


def rotate_write(
    qkv_TE: jax.Array,
    table: tuple[jax.Array, jax.Array],
    slots_T: jax.Array,
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What :func:`norm_qkv_write` does after the projection, for any number of tokens.

    Takes float32, bfloat16 and float16; raises NotImplementedError for pools of 8 bits, whose
    values are over a scale, and a head size that is no multiple of 16.
    """
    if k_pool_CKZH.dtype.name not in FLOATS:
        raise NotImplementedError(f"k_pool_CKZH is {k_pool_CKZH.dtype}, must be one of {FLOATS}")
    T, (_, K, _, H) = qkv_TE.shape[0], k_pool_CKZH.shape
    heads, rows, lanes = qkv_TE.shape[1] // H, 16, _lanes(H, 64)
    pools = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool_CKZH, v_pool_CKZH)]
    first_pool = 2 + len(table)
    return pl.pallas_call(
        partial(_rotate_kernel, rows=rows, lanes=lanes),
        grid=(heads, H // 2 // lanes, pl.cdiv(T, rows)),
        out_shape=(jax.ShapeDtypeStruct((T, heads - 2 * K, H), qkv_TE.dtype), *pools),
        input_output_aliases={first_pool: 1, first_pool + 1: 2},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="rotate_write",
    )(qkv_TE, table, slots_T, k_pool_CKZH, v_pool_CKZH)


def _gate_up_kernel(
    x_ref: Any, norm_ref: Any, w_ref: Any, bias_ref: Any, y_ref: Any, *, eps: float, tile: Tile
) -> None:
    rows, F = y_ref.shape
    out = pl.program_id(1) * tile.out + lax.iota(jnp.int32, tile.out)
    outs = (out, F + out)
    y = products(x_ref, w_ref, outs, RmsNorm(norm_ref, eps), tile)
    gate, up = (plus_bias(part, bias_ref, o) for part, o in zip(y, outs, strict=True))
    row = tile.row()[:, None]
    mask = (row < rows) & (out < F)[None]
    result = gate * jax.nn.sigmoid(gate) * up
    plt.store(y_ref.at[row, out[None]], result.astype(y_ref.dtype), mask=mask)


def norm_gate_up(
    x_TD: jax.Array,
    norm: RmsNorm,
    gate_up_JD: jax.Array,
    bias_J: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """``silu(gate) * up`` of the norm of x, [T, F]; J = 2F, gate above up.

    Raises NotImplementedError for more than MAX_ROWS tokens or a dtype other than bfloat16.
    """
    check_bfloat16(x_TD=x_TD, gate_up_JD=gate_up_JD)
    T, F = x_TD.shape[0], gate_up_JD.shape[0] // 2
    tile = tile_for(T, out=16)
    return pl.pallas_call(
        partial(_gate_up_kernel, eps=norm.eps, tile=tile),
        grid=(pl.cdiv(T, tile.rows), pl.cdiv(F, tile.out)),
        out_shape=jax.ShapeDtypeStruct((T, F), x_TD.dtype),
        compiler_params=tile.compiler_params,
        interpret=interpret,
        name="norm_gate_up",
    )(x_TD, norm.weight_D, gate_up_JD, bias_J)


def _add_kernel(
    residual_ref: Any, x_ref: Any, w_ref: Any, bias_ref: Any, y_ref: Any, *, tile: Tile
) -> None:
    rows, D = y_ref.shape
    out = pl.program_id(1) * tile.out + lax.iota(jnp.int32, tile.out)
    (y,) = products(x_ref, w_ref, (out,), None, tile)
    row = tile.row()[:, None]
    at, mask = (row, out[None]), (row < rows) & (out < D)[None]
    y = plus_bias(y, bias_ref, out)
    y += plt.load(residual_ref.at[at], mask=mask, other=0.0).astype(jnp.float32)
    plt.store(y_ref.at[at], y.astype(y_ref.dtype), mask=mask)


def add_product(
    residual_TD: jax.Array,
    x_TI: jax.Array,
    w_DI: jax.Array,
    bias_D: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """``residual + x @ w.T + bias``, [T, D].

    Raises NotImplementedError for more than MAX_ROWS tokens or a dtype other than bfloat16.
    """
    check_bfloat16(residual_TD=residual_TD, x_TI=x_TI, w_DI=w_DI)
    T, D = residual_TD.shape
    tile = tile_for(T, out=16)
    return pl.pallas_call(
        partial(_add_kernel, tile=tile),
        grid=(pl.cdiv(T, tile.rows), pl.cdiv(D, tile.out)),
        out_shape=jax.ShapeDtypeStruct((T, D), residual_TD.dtype),
        compiler_params=tile.compiler_params,
        interpret=interpret,
        name="add_product",
    )(residual_TD, x_TI, w_DI, bias_D)
