"""The matrix products of a decoder layer at few rows, each with what surrounds it in one kernel.

At few rows a product takes as long as reading its weights, and a small kernel between two products
about as long as starting it. So norms, rotary embedding, the write of keys and values, activations
and residual sums ride along: a layer is four of these kernels and its attention.

A norm's statistics are summed on the way and divided out at the end, since they are one number a
row: ``norm(x) @ w.T = (x * norm_weight) @ w.T / rms(x)``. Weights are [out, in] and read once, by
programs that take a few rows of them against all rows of x. No row of a result depends on another
row of x. Everything between the loads and the stores is float32, but for the products' operands.

Shape letters beyond those of the package: D model width, F ffn width, E = (N + 2K) * H.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

MAX_ROWS = 64
"""Most rows taken. With more, a program reads more of x than of the weights."""


class RmsNorm(NamedTuple):
    """Root-mean-square norm: a weight, and what is added to the mean square."""

    weight_D: Any
    eps: float


class _Tile(NamedTuple):
    """What a program multiplies in a trip: ``rows`` of x, ``out`` rows of w, ``inputs`` of both."""

    rows: int
    out: int
    inputs: int
    num_stages: int

    @property
    def compiler_params(self) -> plt.CompilerParams:
        return plt.CompilerParams(num_warps=4, num_stages=self.num_stages)


def _tile(rows: int, out: int) -> _Tile:
    """``out`` is how many rows of the weights suit 16 rows of x."""
    if rows > MAX_ROWS:
        raise NotImplementedError(f"{rows} rows, at most {MAX_ROWS}")
    rows = max(16, pl.next_power_of_2(rows))
    if rows == MAX_ROWS:
        return _Tile(rows, 2 * out, inputs=128, num_stages=3)
    return _Tile(rows, out, inputs=256 if rows == 16 else 128, num_stages=4)


def _lanes(head_size: int, most: int) -> int:
    """Pairs of a head that a program takes: the largest power of two that divides them."""
    if head_size % 16:
        raise NotImplementedError(f"head size {head_size} is no multiple of 16")
    return math.gcd(head_size // 2, most)


def _mask(holds: bool, mask: Any) -> dict[str, Any]:
    """Arguments of a load that reads zeros where ``mask`` is false, if it ``holds`` anywhere."""
    return {"mask": mask, "other": 0.0} if holds else {}


def _products(
    x_ref: Any, w_ref: Any, outs: Sequence[jax.Array], norm: RmsNorm | None, tile: _Tile
) -> tuple[jax.Array, ...]:
    """``norm(x) @ w[out].T`` for each of ``outs``, ``tile.out`` rows of w: float32 [rows, out].

    Rows of w past its last are read as zeros.
    """
    (rows, width), w_rows = x_ref.shape, w_ref.shape[0]
    row = lax.iota(jnp.int32, tile.rows)[:, None]
    exact = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
    ragged_width, ragged_out = width % tile.inputs != 0, w_rows % tile.out != 0

    def fold(step: jax.Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
        sums, squares = state
        lane = step * tile.inputs + lax.iota(jnp.int32, tile.inputs)
        inside = (lane < width)[None]
        x = plt.load(x_ref.at[row, lane[None]], **_mask(True, (row < rows) & inside))
        if norm is not None:
            x32 = x.astype(jnp.float32)
            squares += jnp.sum(x32 * x32, axis=1)
            weight = plt.load(norm.weight_D.at[lane], **_mask(ragged_width, lane < width))
            x = (x32 * weight.astype(jnp.float32)[None]).astype(x.dtype)

        def product(out: jax.Array) -> jax.Array:
            mask = (out[:, None] < w_rows) & inside
            w = plt.load(
                w_ref.at[out[:, None], lane[None]], **_mask(ragged_width or ragged_out, mask)
            )
            return plt.dot(x, w, trans_b=True, precision=exact)

        sums = tuple(acc + product(out) for acc, out in zip(sums, outs, strict=True))
        return sums, squares

    zero = jnp.zeros((tile.rows, tile.out), jnp.float32)
    sums, squares = lax.fori_loop(
        0,
        pl.cdiv(width, tile.inputs),
        fold,
        ((zero,) * len(outs), jnp.zeros((tile.rows,), jnp.float32)),
    )
    if norm is None:
        return sums
    scale = lax.rsqrt(squares / width + norm.eps)[:, None]
    return tuple(acc * scale for acc in sums)


def _plus_bias(y: jax.Array, bias_ref: Any | None, out: jax.Array) -> jax.Array:
    if bias_ref is None:
        return y
    inside = out < bias_ref.shape[0]
    return y + plt.load(bias_ref.at[out], mask=inside, other=0.0).astype(jnp.float32)[None]


def _store_head(
    halves: tuple[jax.Array, jax.Array],
    row: jax.Array,
    first: jax.Array,
    row_mask: jax.Array,
    table: Any,
    slots_ref: Any,
    refs: tuple[Any, Any, Any],
) -> None:
    """Rows ``row`` of head ``program_id(0)``: lanes ``first`` and those H / 2 further, float32.

    A query is turned and stored in q, a key turned and written to its slot, a value written.
    """
    q_ref, k_ref, v_ref = refs
    N, H = q_ref.shape[1:]
    K, Z = k_ref.shape[1:3]
    head, mask, second = pl.program_id(0), row_mask[:, None], first + H // 2
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
    tile: _Tile,
) -> None:
    """Program (head, i): pairs i * out to (i + 1) * out - 1 of a query, key or value head."""
    head, rows, H = pl.program_id(0), x_ref.shape[0], q_ref.shape[2]
    first = pl.program_id(1) * tile.out + lax.iota(jnp.int32, tile.out)
    second = first + H // 2
    outs = (head * H + first, head * H + second)
    y = _products(x_ref, w_ref, outs, RmsNorm(norm_ref, eps), tile)
    y1, y2 = (_plus_bias(part, bias_ref, out) for part, out in zip(y, outs, strict=True))

    row = lax.iota(jnp.int32, tile.rows)
    _store_head((y1, y2), row, first, row < rows, table, slots_ref, (q_ref, k_ref, v_ref))


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
    tokens or a head size that is no multiple of 16.
    """
    T, (_, K, _, H) = x_TD.shape[0], k_pool_CKZH.shape
    heads = qkv_ED.shape[0] // H
    tile = _tile(T, out=8)
    tile = tile._replace(out=_lanes(H, tile.out))
    pools = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool_CKZH, v_pool_CKZH)]
    first_pool = 5 + len(table) - (bias_E is None)
    return pl.pallas_call(
        partial(_qkv_kernel, eps=norm.eps, tile=tile),
        grid=(heads, H // 2 // tile.out),
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
    _store_head(halves, row, first, row_mask, table, slots_ref, (q_ref, k_ref, v_ref))


def rotate_write(
    qkv_TE: jax.Array,
    table: tuple[jax.Array, jax.Array],
    slots_T: jax.Array,
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What :func:`norm_qkv_write` does after the projection, for any number of tokens."""
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
    x_ref: Any, norm_ref: Any, w_ref: Any, bias_ref: Any, y_ref: Any, *, eps: float, tile: _Tile
) -> None:
    rows, F = y_ref.shape
    out = pl.program_id(0) * tile.out + lax.iota(jnp.int32, tile.out)
    outs = (out, F + out)
    y = _products(x_ref, w_ref, outs, RmsNorm(norm_ref, eps), tile)
    gate, up = (_plus_bias(part, bias_ref, o) for part, o in zip(y, outs, strict=True))
    row = lax.iota(jnp.int32, tile.rows)[:, None]
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

    Raises NotImplementedError for more than MAX_ROWS tokens.
    """
    T, F = x_TD.shape[0], gate_up_JD.shape[0] // 2
    tile = _tile(T, out=16)
    return pl.pallas_call(
        partial(_gate_up_kernel, eps=norm.eps, tile=tile),
        grid=(pl.cdiv(F, tile.out),),
        out_shape=jax.ShapeDtypeStruct((T, F), x_TD.dtype),
        compiler_params=tile.compiler_params,
        interpret=interpret,
        name="norm_gate_up",
    )(x_TD, norm.weight_D, gate_up_JD, bias_J)


def _add_kernel(
    residual_ref: Any, x_ref: Any, w_ref: Any, bias_ref: Any, y_ref: Any, *, tile: _Tile
) -> None:
    rows, D = y_ref.shape
    out = pl.program_id(0) * tile.out + lax.iota(jnp.int32, tile.out)
    (y,) = _products(x_ref, w_ref, (out,), None, tile)
    row = lax.iota(jnp.int32, tile.rows)[:, None]
    at, mask = (row, out[None]), (row < rows) & (out < D)[None]
    y = _plus_bias(y, bias_ref, out)
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

    Raises NotImplementedError for more than MAX_ROWS tokens.
    """
    T, D = residual_TD.shape
    tile = _tile(T, out=16)
    return pl.pallas_call(
        partial(_add_kernel, tile=tile),
        grid=(pl.cdiv(D, tile.out),),
        out_shape=jax.ShapeDtypeStruct((T, D), residual_TD.dtype),
        compiler_params=tile.compiler_params,
        interpret=interpret,
        name="add_product",
    )(residual_TD, x_TI, w_DI, bias_D)
