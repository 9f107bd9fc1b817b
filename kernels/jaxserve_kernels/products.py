"""A tile of a product of few rows: weights streamed past rows of x, and the norm before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

FEW_ROWS = 64
"""Up to so many rows a product takes as long as reading its weights."""

MAX_ROWS = 256
"""Most rows taken; tensor cores set the pace of more than FEW_ROWS."""


class RmsNorm(NamedTuple):
    """Root-mean-square norm: a weight, and what is added to the mean square."""

    weight_D: Any
    eps: float


class Tile(NamedTuple):
    """What a program multiplies in a trip: ``rows`` of x, ``out`` rows of w, ``inputs`` of both."""

    rows: int
    out: int
    inputs: int
    num_stages: int
    num_warps: int = 4

    @property
    def compiler_params(self) -> plt.CompilerParams:
        """What is passed to the compiler."""
        return plt.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages)

    def row(self) -> jax.Array:
        """The rows of x that this program takes; programs beside each other differ in them."""
        return pl.program_id(0) * self.rows + lax.iota(jnp.int32, self.rows)


def tile_for(rows: int, out: int) -> Tile:
    """The tile for ``rows`` rows of x; ``out`` is how many rows of the weights suit 16 of them.

    Raises NotImplementedError for more than MAX_ROWS.
    """
    if rows > MAX_ROWS:
        raise NotImplementedError(f"{rows} rows, at most {MAX_ROWS}")
    if rows > FEW_ROWS:  # the largest that does not spill, in the 99 KiB that an L40 has
        return Tile(128, 64, inputs=64, num_stages=3, num_warps=8)
    rows = max(16, pl.next_power_of_2(rows))
    if rows == FEW_ROWS:
        return Tile(rows, 2 * out, inputs=128, num_stages=3)
    return Tile(rows, out, inputs=256 if rows == 16 else 128, num_stages=4)


def check_bfloat16(**arrays: jax.Array) -> None:
    """Raise NotImplementedError naming the array that has another dtype."""
    for name, array in arrays.items():
        if array.dtype != jnp.bfloat16:
            raise NotImplementedError(f"{name} is {array.dtype}, must be bfloat16")


def _mask(holds: bool, mask: Any) -> dict[str, Any]:
    """Arguments of a load that reads zeros where ``mask`` is false, if it ``holds`` anywhere."""
    return {"mask": mask, "other": 0.0} if holds else {}


def products(
    x_ref: Any, w_ref: Any, outs: Sequence[jax.Array], norm: RmsNorm | None, tile: Tile
) -> tuple[jax.Array, ...]:
    """``norm(x) @ w[out].T`` for each of ``outs``, ``tile.out`` rows of w: float32 [rows, out].

    Rows of w past its last are read as zeros.
    """
    (rows, width), w_rows = x_ref.shape, w_ref.shape[0]
    row = tile.row()[:, None]
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
            return plt.dot(x, w, trans_b=True)

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


def plus_bias(y: jax.Array, bias_ref: Any | None, out: jax.Array) -> jax.Array:
    """``y`` and entries ``out`` of the bias, if there is one; those past its last are zeros."""
    if bias_ref is None:
        return y
    inside = out < bias_ref.shape[0]
    return y + plt.load(bias_ref.at[out], mask=inside, other=0.0).astype(jnp.float32)[None]
