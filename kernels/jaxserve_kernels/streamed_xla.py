"""Paged attention streamed in plain JAX: each row walks the tiles of its own length.

Online softmax (Milakov and Gimelshein, 2018) with float32 accumulators; the largest intermediate
is one tile, so memory depends neither on the table's width nor on the pool's size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve_kernels import tiling


class _Softmax(NamedTuple):
    """Running maximum, sum of weights and weighted values of X queries."""

    peak_KX: jax.Array
    total_KX: jax.Array
    values_KXH: jax.Array


def _empty(K: int, X: int, H: int) -> _Softmax:
    # A finite floor instead of -inf: a tile that shows a query nothing leaves exp(0) harmless.
    floor = jnp.full((K, X), jnp.finfo(jnp.float32).min, jnp.float32)
    return _Softmax(floor, jnp.zeros((K, X), jnp.float32), jnp.zeros((K, X, H), jnp.float32))


def _read_tile(pool_CKZH: jax.Array, ids: jax.Array, blocks: int) -> jax.Array:
    """Blocks ``ids`` side by side, [K, blocks * Z, H] in float32."""
    _, K, Z, H = pool_CKZH.shape
    parts = [lax.dynamic_slice(pool_CKZH, (ids[i], 0, 0, 0), (1, K, Z, H)) for i in range(blocks)]
    return jnp.concatenate(parts, axis=2)[0].astype(jnp.float32)


def _fold_tile(
    state: _Softmax,
    q_KXH: jax.Array,
    k_KWH: jax.Array,
    v_KWH: jax.Array,
    visible_XW: jax.Array,
    soft_cap: float | None,
) -> _Softmax:
    """The softmax state with one tile of W keys folded in."""
    scores = lax.dot_general(q_KXH, k_KWH, (((2,), (2,)), ((0,), (0,))), precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible_XW, scores, jnp.finfo(jnp.float32).min)
    peak = jnp.maximum(state.peak_KX, jnp.max(scores, axis=-1))
    keep = jnp.exp(state.peak_KX - peak)
    weights = jnp.where(visible_XW, jnp.exp(scores - peak[..., None]), 0.0)
    # A weight of zero does not silence a NaN: values no query of the tile sees are replaced.
    v_KWH = jnp.where(jnp.any(visible_XW, axis=0)[:, None], v_KWH, 0.0)
    values = lax.dot_general(weights, v_KWH, (((2,), (1,)), ((0,), (0,))), precision="highest")
    return _Softmax(
        peak,
        keep * state.total_KX + jnp.sum(weights, axis=-1),
        keep[..., None] * state.values_KXH + values,
    )


def _finish(state: _Softmax) -> jax.Array:
    """Weighted mean of the values, [K, X, H]; zeros for a query that saw nothing."""
    total = state.total_KX[..., None]
    return state.values_KXH / jnp.where(total == 0.0, 1.0, total)


def _pad_table(block_tables_XP: jax.Array, multiple: int) -> jax.Array:
    extra = -block_tables_XP.shape[1] % multiple
    return jnp.pad(block_tables_XP, ((0, 0), (0, extra)))


def _tile_ids(
    table_XP: jax.Array, row: jax.Array, tile: jax.Array, blocks: int, used: jax.Array, C: int
) -> jax.Array:
    """Block ids of one tile of a row; those past its ``used`` blocks become the null block."""
    ids = lax.dynamic_slice(table_XP, (row, tile * blocks), (1, blocks))[0]
    index = tile * blocks + jnp.arange(blocks, dtype=jnp.int32)
    return jnp.clip(jnp.where(index < used, ids, 0), 0, C - 1)


def paged_attention(
    q_BNH: jax.Array,
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    block_tables_BP: jax.Array,
    context_lens_B: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """See :func:`jaxserve_kernels.paged_attention`."""
    B, N, H = q_BNH.shape
    C, K, Z, _ = k_pool_CKZH.shape
    G = N // K
    blocks = tiling.decode_tile_blocks(Z, block_tables_BP.shape[1])
    W = blocks * Z
    tables_BP = _pad_table(block_tables_BP, blocks)
    q_BKGH = q_BNH.reshape(B, K, G, H).astype(jnp.float32) * scale

    def read_row(row: jax.Array, out_BKGH: jax.Array) -> jax.Array:
        length = context_lens_B[row]
        first = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
        q_KGH = lax.dynamic_index_in_dim(q_BKGH, row, 0, keepdims=False)

        def fold(tile: jax.Array, state: _Softmax) -> _Softmax:
            ids = _tile_ids(tables_BP, row, tile, blocks, -(-length // Z), C)
            position = tile * W + jnp.arange(W, dtype=jnp.int32)
            visible = (position >= first) & (position < length)
            return _fold_tile(
                state,
                q_KGH,
                _read_tile(k_pool_CKZH, ids, blocks),
                _read_tile(v_pool_CKZH, ids, blocks),
                visible[None, :],
                soft_cap,
            )

        state = lax.fori_loop(first // W, -(-length // W), fold, _empty(K, G, H))
        return lax.dynamic_update_index_in_dim(out_BKGH, _finish(state), row, 0)

    out = lax.fori_loop(0, B, read_row, jnp.zeros((B, K, G, H), jnp.float32))
    return out.reshape(B, N, H).astype(q_BNH.dtype)


def paged_prefill(
    q_TNH: jax.Array,
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    block_tables_SP: jax.Array,
    context_lens_S: jax.Array,
    cu_query_lens_S1: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """See :func:`jaxserve_kernels.paged_prefill`."""
    T, N, H = q_TNH.shape
    C, K, Z, _ = k_pool_CKZH.shape
    G = N // K
    tile = tiling.prefill_tile(T, Z, block_tables_SP.shape[1])
    W, Q = tile.blocks * Z, tile.queries
    tables_SP = _pad_table(block_tables_SP, tile.blocks)
    # Padded by a tile, so that a segment's last tile never runs off the end.
    q_KTGH = jnp.pad(
        q_TNH.reshape(T, K, G, H).transpose(1, 0, 2, 3).astype(jnp.float32) * scale,
        ((0, 0), (0, Q), (0, 0), (0, 0)),
    )
    query = jnp.arange(Q, dtype=jnp.int32)

    def read_segment(s: jax.Array, out_KTGH: jax.Array) -> jax.Array:
        start, end = cu_query_lens_S1[s], cu_query_lens_S1[s + 1]
        context = context_lens_S[s]

        def read_tile(i: jax.Array, out_KTGH: jax.Array) -> jax.Array:
            t = start + i * Q
            position = context - end + t + query
            limit = jnp.minimum(context, position[-1] + 1)
            first = jnp.int32(0) if window is None else jnp.maximum(position[0] - window + 1, 0)
            member = t + query < end
            q = lax.dynamic_slice_in_dim(q_KTGH, t, Q, axis=1).reshape(K, Q * G, H)

            def fold(j: jax.Array, state: _Softmax) -> _Softmax:
                ids = _tile_ids(tables_SP, s, j, tile.blocks, -(-limit // Z), C)
                key = j * W + jnp.arange(W, dtype=jnp.int32)
                visible = member[:, None] & (key <= position[:, None])
                if window is not None:
                    visible &= key > position[:, None] - window
                return _fold_tile(
                    state,
                    q,
                    _read_tile(k_pool_CKZH, ids, tile.blocks),
                    _read_tile(v_pool_CKZH, ids, tile.blocks),
                    jnp.repeat(visible, G, axis=0),
                    soft_cap,
                )

            state = lax.fori_loop(first // W, -(-limit // W), fold, _empty(K, Q * G, H))
            # Past the segment's end this writes zeros: padding, or what the next segment fills.
            return lax.dynamic_update_slice_in_dim(
                out_KTGH, _finish(state).reshape(K, Q, G, H), t, axis=1
            )

        return lax.fori_loop(0, -(-(end - start) // Q), read_tile, out_KTGH)

    out = lax.fori_loop(
        0, block_tables_SP.shape[0], read_segment, jnp.zeros((K, T + Q, G, H), jnp.float32)
    )
    return out[:, :T].transpose(1, 0, 2, 3).reshape(T, N, H).astype(q_TNH.dtype)
