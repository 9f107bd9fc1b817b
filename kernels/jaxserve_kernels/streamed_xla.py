"""Paged attention streamed in plain JAX: each row walks the tiles of its own length.

Online softmax (Milakov and Gimelshein, 2018) with float32 accumulators; the largest intermediate
is one tile, so memory depends neither on the table's width nor on the pool's size. No step of a
row's walk looks at another row, so a row's result has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve_kernels import tiling
from jaxserve_kernels.arguments import Extras
from jaxserve_kernels.heads import finished, scaled_queries

# Below every score, and finite: a tile that shows a query nothing leaves exp(0), never NaN.
_FLOOR = float(jnp.finfo(jnp.float32).min)


class _Walk(NamedTuple):
    """Softmax state of X queries, and the tile last read, which the next read overwrites."""

    peak_KX: jax.Array
    total_KX: jax.Array
    values_KXH: jax.Array
    k_KWH: jax.Array
    v_KWH: jax.Array


def _cdiv(a: jax.Array, b: int) -> jax.Array:
    return lax.div(a + (b - 1), jnp.int32(b))


def _read_tile(
    walk: _Walk,
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    tables_XP: jax.Array,
    row: jax.Array,
    index: jax.Array,
    first: jax.Array,
    limit: jax.Array,
) -> _Walk:
    """Copy the blocks of tile ``index`` that hold positions ``first`` to ``limit - 1``.

    A block is one contiguous copy, many times faster on CPUs than a gather. Values outside the
    positions become zeros, since a softmax weight of zero does not silence a NaN; keys need no such
    care, their scores are replaced.
    """
    _, K, Z, H = k_pool_CKZH.shape
    W = walk.k_KWH.shape[1]
    blocks = W // Z
    lane = jnp.arange(Z, dtype=jnp.int32)

    def copy_block(j: jax.Array, tile: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        block = lax.dynamic_slice(tables_XP, (row, index * blocks + j), (1, 1))[0, 0]
        position = index * W + j * Z + lane
        seen = ((position >= first) & (position < limit))[None, :, None]
        at, size = (block, 0, 0, 0), (1, K, Z, H)
        k = lax.dynamic_slice(k_pool_CKZH, at, size)[0].astype(jnp.float32)
        v = lax.dynamic_slice(v_pool_CKZH, at, size)[0].astype(jnp.float32)
        return (
            lax.dynamic_update_slice(tile[0], k, (0, j * Z, 0)),
            lax.dynamic_update_slice(tile[1], jnp.where(seen, v, 0.0), (0, j * Z, 0)),
        )

    used = jnp.minimum(_cdiv(limit, Z) - index * blocks, blocks)
    k_KWH, v_KWH = lax.fori_loop(0, used, copy_block, (walk.k_KWH, walk.v_KWH))
    return walk._replace(k_KWH=k_KWH, v_KWH=v_KWH)


def _fold_tile(
    walk: _Walk, q_KXH: jax.Array, visible_XW: jax.Array, soft_cap: float | None
) -> _Walk:
    """The state with the scores and values of the tile last read folded in."""
    scores = lax.dot_general(q_KXH, walk.k_KWH, (((2,), (2,)), ((0,), (0,))), precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible_XW[None], scores, _FLOOR)
    peak = jnp.maximum(walk.peak_KX, jnp.max(scores, axis=-1))
    keep = jnp.exp(walk.peak_KX - peak)
    weights = jnp.where(visible_XW[None], jnp.exp(scores - peak[..., None]), 0.0)
    values = lax.dot_general(weights, walk.v_KWH, (((2,), (1,)), ((0,), (0,))), precision="highest")
    return walk._replace(
        peak_KX=peak,
        total_KX=keep * walk.total_KX + jnp.sum(weights, axis=-1),
        values_KXH=keep[..., None] * walk.values_KXH + values,
    )


def _attend(
    q_KXH: jax.Array,
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    tables_XP: jax.Array,
    row: jax.Array,
    first: jax.Array,
    limit: jax.Array,
    visible: Callable[[jax.Array], jax.Array],
    *,
    tile: int,
    soft_cap: float | None,
    sinks_N: jax.Array | None,
) -> jax.Array:
    """X scaled queries of one row over its positions ``first`` to ``limit - 1``: [K, X, H].

    ``visible`` maps the W positions of a tile to the mask [X or 1, W]. Queries that see nothing
    give zeros. X is a multiple of the heads a kv head, which vary fastest.
    """
    K, X, H = q_KXH.shape
    keys = jnp.zeros((K, tile, H), jnp.float32)
    peak, total = jnp.full((K, X), _FLOOR, jnp.float32), jnp.zeros((K, X), jnp.float32)
    if sinks_N is not None:  # as if a first key had that score, and a value of zero
        sinks_KG = sinks_N.reshape(K, -1)
        peak, total = jnp.tile(sinks_KG, X // sinks_KG.shape[1]), total + 1.0
    start = _Walk(peak, total, jnp.zeros((K, X, H), jnp.float32), keys, keys)

    def step(index: jax.Array, walk: _Walk) -> _Walk:
        walk = _read_tile(walk, k_pool_CKZH, v_pool_CKZH, tables_XP, row, index, first, limit)
        position = index * tile + jnp.arange(tile, dtype=jnp.int32)
        return _fold_tile(walk, q_KXH, visible(position), soft_cap)

    end = lax.fori_loop(lax.div(first, jnp.int32(tile)), _cdiv(limit, tile), step, start)
    total = end.total_KX[..., None]
    return end.values_KXH / jnp.where(total == 0.0, 1.0, total)


def paged_attention(
    q_BNH: jax.Array,
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    block_tables_BP: jax.Array,
    context_lens_B: jax.Array,
    extras: Extras,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """See :func:`jaxserve_kernels.paged_attention`."""
    B = q_BNH.shape[0]
    _, K, Z, _ = k_pool_CKZH.shape
    tile = tiling.decode_tile(Z, block_tables_BP.shape[1])
    q_BKGH = scaled_queries(q_BNH, scale, K, extras)

    def read_row(b: jax.Array, out_BKGH: jax.Array) -> jax.Array:
        length = context_lens_B[b]
        first = jnp.zeros_like(length) if window is None else jnp.maximum(length - window, 0)
        out = _attend(
            q_BKGH[b],
            k_pool_CKZH,
            v_pool_CKZH,
            block_tables_BP,
            b,
            first,
            length,
            lambda position: ((position >= first) & (position < length))[None],
            tile=tile,
            soft_cap=soft_cap,
            sinks_N=extras.sinks_N,
        )
        return lax.dynamic_update_index_in_dim(out_BKGH, out, b, axis=0)

    out = lax.fori_loop(0, B, read_row, jnp.zeros(q_BKGH.shape, jnp.float32))
    return finished(out, extras, q_BNH.dtype)


def paged_prefill(
    q_TNH: jax.Array,
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    block_tables_SP: jax.Array,
    context_lens_S: jax.Array,
    cu_query_lens_S1: jax.Array,
    extras: Extras,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """See :func:`jaxserve_kernels.paged_prefill`."""
    T, N, H = q_TNH.shape
    _, K, Z, _ = k_pool_CKZH.shape
    G = N // K
    Q, tile = tiling.prefill_tile(T, Z, block_tables_SP.shape[1])
    q_KTGH = scaled_queries(q_TNH, scale, K, extras).swapaxes(0, 1)
    # A tile more, so that a segment's last tile never runs off the end.
    q_KTGH = jnp.pad(q_KTGH, ((0, 0), (0, Q), (0, 0), (0, 0)))

    def read_segment(s: jax.Array, out_KTGH: jax.Array) -> jax.Array:
        start, end, context = cu_query_lens_S1[s], cu_query_lens_S1[s + 1], context_lens_S[s]

        def read_queries(i: jax.Array, out_KTGH: jax.Array) -> jax.Array:
            t = start + i * Q
            token = t + jnp.arange(Q, dtype=jnp.int32)
            last_key = context - end + token
            first_key = jnp.zeros_like(last_key)
            if window is not None:
                first_key = jnp.maximum(last_key - (window - 1), 0)
            member = token < end

            def visible(position: jax.Array) -> jax.Array:
                seen = (position[None] >= first_key[:, None]) & (
                    position[None] <= last_key[:, None]
                )
                return jnp.repeat(seen & member[:, None], G, axis=0)

            out = _attend(
                lax.dynamic_slice_in_dim(q_KTGH, t, Q, axis=1).reshape(K, Q * G, H),
                k_pool_CKZH,
                v_pool_CKZH,
                block_tables_SP,
                s,
                first_key[0],
                jnp.minimum(last_key[-1] + 1, context),
                visible,
                tile=tile,
                soft_cap=soft_cap,
                sinks_N=extras.sinks_N,
            )
            # Past the segment's end this writes zeros: the next segment's place, or padding.
            return lax.dynamic_update_slice_in_dim(out_KTGH, out.reshape(K, Q, G, H), t, axis=1)

        return lax.fori_loop(0, _cdiv(end - start, Q), read_queries, out_KTGH)

    out = lax.fori_loop(0, context_lens_S.shape[0], read_segment, jnp.zeros_like(q_KTGH))
    return finished(out[:, :T].swapaxes(0, 1), extras, q_TNH.dtype)
