"""A schedule as the arrays of plan/batch.py.

Every call returns fresh arrays: the device may read a host array in place, after the call that
passed it has returned.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.plan.batch import (
    NULL_BLOCK,
    ArraySpec,
    PrefillBatch,
    SamplingRows,
    new_blocks_spec,
    permutation_spec,
    prefill_batch_specs,
)
from jaxserve.sched.request import Request
from jaxserve.sched.scheduler import Chunk


def _full(spec: ArraySpec, value: int = 0) -> np.ndarray:
    return np.full(spec.shape, value, spec.dtype)


def pack_permutation(sources: Sequence[int]) -> np.ndarray:
    """int32 [B]: see ``permutation_spec``."""
    return np.array(sources, permutation_spec(len(sources)).dtype)


def pack_new_blocks(new_blocks: Sequence[tuple[int, int]], rows: int) -> np.ndarray:
    """int32 [rows] from (row, block) pairs: see ``new_blocks_spec``."""
    new_blocks_B = _full(new_blocks_spec(rows), NULL_BLOCK)
    for row, block in new_blocks:
        new_blocks_B[row] = block
    return new_blocks_B


def pack_sampling(requests: Sequence[Request], specs: SamplingRows) -> SamplingRows:
    """Sampling settings of ``requests``, then neutral ones up to the rows of ``specs``."""
    rows = SamplingRows(
        temperature_X=_full(specs.temperature_X),
        top_k_X=_full(specs.top_k_X),
        top_p_X=_full(specs.top_p_X, 1),
        min_p_X=_full(specs.min_p_X),
        keys_X2=_full(specs.keys_X2),
    )
    used = len(requests)
    rows.temperature_X[:used] = [request.params.temperature for request in requests]
    rows.top_k_X[:used] = [max(request.params.top_k, 0) for request in requests]
    rows.top_p_X[:used] = [request.params.top_p for request in requests]
    rows.min_p_X[:used] = [request.params.min_p for request in requests]
    rows.keys_X2[:used] = [request.key for request in requests]
    return rows


def pack_prefill(
    chunks: Sequence[Chunk],
    *,
    tokens: int,
    max_num_seqs: int,
    blocks_per_row: int,
    block_size: int,
) -> PrefillBatch:
    """``chunks`` end to end in a bucket of ``tokens`` tokens, with S = max_num_seqs segments."""
    specs = prefill_batch_specs(tokens, max_num_seqs, blocks_per_row)
    starts = np.array([chunk.start for chunk in chunks])
    ends = np.array([chunk.end for chunk in chunks])
    used, total = len(chunks), int((ends - starts).sum())

    cu_query_lens_S1 = _full(specs.cu_query_lens_S1, total)
    cu_query_lens_S1[0] = 0
    cu_query_lens_S1[1 : used + 1] = np.cumsum(ends - starts)
    segments = np.repeat(np.arange(used), ends - starts)
    positions = np.arange(total) + (starts - cu_query_lens_S1[:used])[segments]
    block_tables_SP = _full(specs.block_tables_SP, NULL_BLOCK)
    for s, chunk in enumerate(chunks):
        block_tables_SP[s, : len(chunk.block_ids)] = chunk.block_ids

    batch = PrefillBatch(
        tokens_T=_full(specs.tokens_T),
        positions_T=_full(specs.positions_T),
        slots_T=_full(specs.slots_T, NULL_BLOCK * block_size),
        cu_query_lens_S1=cu_query_lens_S1,
        block_tables_SP=block_tables_SP,
        context_lens_S=_full(specs.context_lens_S),
        rows_S=_full(specs.rows_S, max_num_seqs),
        sampling=pack_sampling([chunk.request for chunk in chunks], specs.sampling),
    )
    batch.tokens_T[:total] = [
        token for chunk in chunks for token in chunk.request.tokens_between(chunk.start, chunk.end)
    ]
    batch.positions_T[:total] = positions
    blocks = block_tables_SP[segments, positions // block_size]
    batch.slots_T[:total] = blocks * block_size + positions % block_size
    batch.context_lens_S[:used] = ends
    batch.rows_S[:used] = [max_num_seqs if c.row is None else c.row for c in chunks]
    return batch
