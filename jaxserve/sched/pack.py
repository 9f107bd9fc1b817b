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
    for x, request in enumerate(requests):
        params = request.params
        rows.temperature_X[x] = params.temperature
        rows.top_k_X[x] = max(params.top_k, 0)
        rows.top_p_X[x] = params.top_p
        rows.min_p_X[x] = params.min_p
        rows.keys_X2[x] = request.key
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
    batch = PrefillBatch(
        tokens_T=_full(specs.tokens_T),
        positions_T=_full(specs.positions_T),
        slots_T=_full(specs.slots_T, NULL_BLOCK * block_size),
        cu_query_lens_S1=_full(specs.cu_query_lens_S1),
        block_tables_SP=_full(specs.block_tables_SP, NULL_BLOCK),
        context_lens_S=_full(specs.context_lens_S),
        rows_S=_full(specs.rows_S, max_num_seqs),
        sampling=pack_sampling([chunk.request for chunk in chunks], specs.sampling),
    )
    first = 0
    for s, chunk in enumerate(chunks):
        last = first + chunk.end - chunk.start
        positions = np.arange(chunk.start, chunk.end, dtype=np.int32)
        blocks = np.array(chunk.block_ids, np.int32)
        batch.tokens_T[first:last] = chunk.request.tokens_between(chunk.start, chunk.end)
        batch.positions_T[first:last] = positions
        batch.slots_T[first:last] = (
            blocks[positions // block_size] * block_size + positions % block_size
        )
        batch.cu_query_lens_S1[s + 1 :] = last
        batch.block_tables_SP[s, : len(blocks)] = blocks
        batch.context_lens_S[s] = chunk.end
        if chunk.row is not None:
            batch.rows_S[s] = chunk.row
        first = last
    return batch
