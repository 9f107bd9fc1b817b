"""The Mosaic GPU kernel of the paged read of decode rows: TMA, wgmma, two warpgroups.

One warpgroup copies keys and values, a box of a block at a time, into rings of tiles in shared
memory; the other multiplies them. Keys lie on wgmma's M axis, which is 64 long, and queries on N,
which may be as short as 8: queries on M would fill 8 of 64 rows of every product, of the
exponentials and of the accumulator with a group of 8 heads, and the rest with padding.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from jaxserve_kernels.splits import FLOOR, LOG2_E, Span, Sums, cdiv, span_of
from jaxserve_kernels.tiling import SplitRule

plgpu: Any = mosaic_gpu  # its signatures differ between versions of jax

# Two programs share a multiprocessor's 228 KiB, and each keeps a few KiB beside its rings.
_RING_BYTES = 96 * 1024
_WGMMA = plgpu.Layout.WGMMA
_PER_QUERY = plgpu.Layout.WGMMA.reduce(0)


class Options(NamedTuple):
    """What is fixed when the kernel is made; ``programs`` share the splits of a (row, kv head)."""

    scale: float
    window: int | None
    soft_cap: float | None
    rule: SplitRule
    programs: int


class _Scratch(NamedTuple):
    """Shared memory of a program; X is the query group, rounded up to wgmma's 8.

    Rows of ``queries`` past the group hold anything: no column of a product sees another.
    """

    rows_XH: Any
    queries_XH: Any
    weights_XW: Any
    peak_X: Any
    total_X: Any
    values_XH: Any
    k_ring: Any
    v_ring: Any
    queries_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any


class _Place(NamedTuple):
    """Where a program is: its row's blocks and span, its kv head, its splits."""

    table_P: Any
    span: Span
    head: jax.Array
    program: jax.Array
    programs: int

    @property
    def splits(self) -> jax.Array:
        """How many of the row's splits are this program's."""
        return cdiv(self.span.splits - self.program, self.programs)

    def tiles(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First tile of the program's ``i``-th split, and the tile after its last."""
        start = self.span.start + (self.program + i * self.programs) * self.span.per_split
        return start, jnp.minimum(start + self.span.per_split, self.span.end)


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the one layout that TMA, wgmma and registers all take."""
    lanes = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _scratch(queries: int, keys: int, head_size: int, boxes: int, dtype: Any) -> _Scratch:
    X, W, H = queries, keys, head_size
    stages = max(2, _RING_BYTES // (2 * W * H * jnp.dtype(dtype).itemsize))
    full = plgpu.Barrier(num_barriers=stages, num_arrivals=boxes)
    free = plgpu.Barrier(num_barriers=stages)
    return _Scratch(
        rows_XH=plgpu.SMEM((X, H), dtype),
        queries_XH=_swizzled((X, H), dtype),
        weights_XW=_swizzled((X, W), dtype),
        peak_X=plgpu.SMEM((X,), jnp.float32),
        total_X=plgpu.SMEM((X,), jnp.float32),
        values_XH=_swizzled((X, H), jnp.float32),
        k_ring=_swizzled((stages, W, H), dtype),
        v_ring=_swizzled((stages, W, H), dtype),
        queries_full=plgpu.Barrier(),
        k_full=full,
        v_full=full,
        k_free=free,
        v_free=free,
    )


def _copy_tiles(k_ref: Any, v_ref: Any, place: _Place, scratch: _Scratch) -> None:
    """Fill the rings with the tiles of the program's splits, in order.

    Where a tile reaches past the row, its last box is copied again: table entries past a row's
    length are not read, and the copies a barrier waits for are as many in every tile.
    """
    Z = k_ref.shape[2]
    stages, W, _ = scratch.k_ring.shape
    box = min(Z, W)
    last = lax.div(place.span.length - 1, jnp.int32(box))

    def copy_tile(index: jax.Array, count: jax.Array) -> jax.Array:
        slot = lax.rem(count, jnp.int32(stages))
        boxes = [jnp.minimum(index * (W // box) + j, last) for j in range(W // box)]
        blocks = [place.table_P[lax.div(x, jnp.int32(Z // box))] for x in boxes]
        offsets = [lax.rem(x, jnp.int32(Z // box)) * box for x in boxes]
        for pool, ring, full, free in (
            (k_ref, scratch.k_ring, scratch.k_full, scratch.k_free),
            (v_ref, scratch.v_ring, scratch.v_full, scratch.v_free),
        ):
            pl.when(count >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
            for j, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
                plgpu.copy_gmem_to_smem(
                    pool.at[block, place.head, pl.ds(offset, box)],
                    ring.at[slot, pl.ds(j * box, box)],
                    full.at[slot],
                )
        return count + 1

    def copy_split(i: jax.Array, count: jax.Array) -> jax.Array:
        return lax.fori_loop(*place.tiles(i), copy_tile, count)

    def drain(slot: int) -> None:
        plgpu.barrier_wait(scratch.k_free.at[slot])
        plgpu.barrier_wait(scratch.v_free.at[slot])

    count = lax.fori_loop(0, place.splits, copy_split, jnp.int32(0))
    for slot in range(stages):  # a program ends when both warpgroups have seen every phase
        pl.when(slot < count)(partial(drain, slot))


def _silence(tile_WH: Any, first: jax.Array, end: jax.Array) -> None:
    """Zero the values of positions outside ``first`` to ``end - 1``: NaN times 0 is NaN."""
    W, H = tile_WH.shape
    for column in range(0, H, 64):  # few registers at a time
        part = tile_WH.at[:, pl.ds(column, 64)]
        position = plgpu.broadcasted_iota(jnp.int32, (W, 64), 0, layout=_WGMMA)
        values = plgpu.load(part, layout=_WGMMA)
        part[...] = jnp.where(
            (position >= first) & (position < end), values, jnp.zeros_like(values)
        )


def _across(x_X: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One value a query, for every key or lane of that query."""
    return lax.broadcast_in_dim(x_X, shape, (1,))


def _multiply(a: Any, b: Any) -> jax.Array:
    """a @ b in float32, of operands in shared memory."""

    def run(product: Any) -> jax.Array:
        plgpu.wgmma(product, a, b)
        return product[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


class _Walk(NamedTuple):
    """Softmax state of a split, and how many tiles the program took before; exponents are of 2.

    Totals are kept by place in the tile, to be summed across warps once a split.
    """

    peak_X: jax.Array
    total_WX: jax.Array
    values_HX: jax.Array
    count: jax.Array


def _fold_tile(
    index: jax.Array, walk: _Walk, *, span: Span, scratch: _Scratch, options: Options
) -> _Walk:
    """The state with the next tile of the rings in it."""
    stages, W, _ = scratch.k_ring.shape
    slot = lax.rem(walk.count, jnp.int32(stages))
    first, end = span.first - index * W, span.length - index * W

    plgpu.barrier_wait(scratch.k_full.at[slot])
    scores = _multiply(scratch.k_ring.at[slot], scratch.queries_XH.transpose((1, 0)))
    plgpu.barrier_arrive(scratch.k_free.at[slot])
    if options.soft_cap is None:
        scores *= options.scale * LOG2_E
    else:
        cap = options.soft_cap
        scores = jnp.tanh(scores * (options.scale / cap)) * (cap * LOG2_E)
    position = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=_WGMMA)
    seen = position < end
    if options.window is not None:
        seen &= position >= first
    scores = jnp.where(seen, scores, FLOOR)
    peak_X = jnp.maximum(walk.peak_X, jnp.max(scores, axis=0))
    keep_X = jnp.exp2(walk.peak_X - peak_X)
    weights = jnp.exp2(scores - _across(peak_X, scores.shape))
    # Each warp leaves its rows' weights as columns: wgmma reads both operands from shared memory.
    scratch.weights_XW.transpose((1, 0))[...] = plgpu.layout_cast(
        weights.astype(scratch.weights_XW.dtype), plgpu.Layout.WGMMA_TRANSPOSED
    )
    plgpu.barrier_wait(scratch.v_full.at[slot])
    tile_WH = scratch.v_ring.at[slot]
    pl.when((first > 0) | (end < W))(partial(_silence, tile_WH, first, end))
    plgpu.commit_smem()
    values_HX = _multiply(tile_WH.transpose((1, 0)), scratch.weights_XW.transpose((1, 0)))
    plgpu.barrier_arrive(scratch.v_free.at[slot])
    return _Walk(
        peak_X,
        _across(keep_X, weights.shape) * walk.total_WX + weights,
        _across(keep_X, values_HX.shape) * walk.values_HX + values_HX,
        walk.count + 1,
    )


def _attend(q_GH: Any, sums: Sums, place: _Place, scratch: _Scratch, options: Options) -> None:
    """Leave the sums of the program's splits in ``sums``, [S, X] twice and [S, X, H]."""
    G = q_GH.shape[0]
    (X, H), W = scratch.queries_XH.shape, scratch.k_ring.shape[1]
    plgpu.copy_gmem_to_smem(q_GH, scratch.rows_XH.at[pl.ds(0, G)], scratch.queries_full)
    plgpu.barrier_wait(scratch.queries_full)
    # TMA leaves rows of any number only unswizzled.
    scratch.queries_XH.transpose((1, 0))[...] = plgpu.load(
        scratch.rows_XH.transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False
    )
    plgpu.commit_smem()

    def attend_split(i: jax.Array, count: jax.Array) -> jax.Array:
        start = _Walk(
            plgpu.layout_cast(jnp.full((X,), FLOOR, jnp.float32), _PER_QUERY),
            plgpu.layout_cast(jnp.zeros((W, X), jnp.float32), _WGMMA),
            plgpu.layout_cast(jnp.zeros((H, X), jnp.float32), _WGMMA),
            count,
        )
        fold = partial(_fold_tile, span=place.span, scratch=scratch, options=options)
        walk = lax.fori_loop(*place.tiles(i), fold, start)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch.peak_X[...] = walk.peak_X
        scratch.total_X[...] = jnp.sum(walk.total_WX, axis=0)
        scratch.values_XH.transpose((1, 0))[...] = plgpu.layout_cast(
            walk.values_HX, plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()
        split = place.program + i * place.programs
        plgpu.copy_smem_to_gmem(scratch.peak_X, sums.peak_G.at[split])
        plgpu.copy_smem_to_gmem(scratch.total_X, sums.total_G.at[split])
        plgpu.copy_smem_to_gmem(scratch.values_XH, sums.values_GH.at[split])
        return walk.count

    lax.fori_loop(0, place.splits, attend_split, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _decode_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    tables_ref: Any,
    lengths_ref: Any,
    peak_ref: Any,
    total_ref: Any,
    values_ref: Any,
    scratch: _Scratch,
    *,
    options: Options,
) -> None:
    """Program (row, kv head, i): splits i, i + programs, ... of the row."""
    row, head, program = (lax.axis_index(axis) for axis in ("row", "head", "program"))
    G = q_ref.shape[1] // k_ref.shape[1]
    span = span_of(lengths_ref[row], options.rule, options.window)
    place = _Place(tables_ref.at[row], span, head, program, options.programs)
    copies = lax.axis_index("warpgroup") == 1
    sums = Sums(*(ref.at[row, head] for ref in (peak_ref, total_ref, values_ref)))
    q_GH = q_ref.at[row, pl.ds(head * G, G)]

    pl.when(copies)(partial(_copy_tiles, k_ref, v_ref, place, scratch))
    pl.when(jnp.logical_not(copies) & (place.splits > 0))(
        partial(_attend, q_GH, sums, place, scratch, options)
    )


def decode_sums(
    q_BNH: jax.Array,
    k_pool_CKZH: jax.Array,
    v_pool_CKZH: jax.Array,
    block_tables_BP: jax.Array,
    context_lens_B: jax.Array,
    *,
    splits: int,
    options: Options,
    interpret: bool,
) -> Sums:
    """What each split of each row leaves: [B, K, S, X] twice and [B, K, S, X, H], S ``splits``.

    X is the query group rounded up to 8; queries past the group, and splits that a row does not
    have, hold anything. Interpreted, it looks for races between the warpgroups and the copies.
    """
    (B, N, H), dtype = q_BNH.shape, q_BNH.dtype
    K, Z = k_pool_CKZH.shape[1:3]
    X, W = 8 * pl.cdiv(N // K, 8), options.rule.keys
    per_query = jax.ShapeDtypeStruct((B, K, splits, X), jnp.float32)
    sums = plgpu.kernel(
        partial(_decode_kernel, options=options),
        out_type=(per_query, per_query, jax.ShapeDtypeStruct((*per_query.shape, H), jnp.float32)),
        scratch_types=[_scratch(X, W, H, max(1, W // Z), dtype)],
        grid=(B, K, options.programs),
        grid_names=("row", "head", "program"),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="paged_decode",
        # The other semantics search for layouts, which takes minutes for this kernel.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )(q_BNH, k_pool_CKZH, v_pool_CKZH, block_tables_BP, context_lens_B)
    return Sums(*sums)
