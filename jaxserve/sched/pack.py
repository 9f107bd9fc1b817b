"""A schedule as the arrays of plan/batch.py.

Every call returns fresh arrays: the device may read a host array in place, after the call that
passed it has returned.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.plan.batch import (
    IN_PROMPT,
    MOST_COUNTED,
    NEUTRAL_SAMPLING,
    NO_TARGET,
    NULL_BLOCK,
    PROCESSED_LOGPROBS,
    RAW_LOGPROBS,
    SIT_OUT,
    ArraySpec,
    LogitBias,
    PrefillBatch,
    SamplingRows,
    bias_specs,
    counts_spec,
    new_blocks_spec,
    permutation_spec,
    prefill_batch_specs,
)
from jaxserve.sched.request import Request
from jaxserve.sched.scheduler import Chunk


def _full(spec: ArraySpec, value: float = 0) -> np.ndarray:
    return np.full(spec.shape, value, spec.dtype)


def pack_permutation(sources: Sequence[int]) -> np.ndarray:
    """int32 [B]: see ``permutation_spec``."""
    return np.array(sources, permutation_spec(len(sources)).dtype)


def pack_new_blocks(
    new_blocks: Sequence[tuple[int, int]], decode: Sequence[Request | None], rows: int
) -> np.ndarray:
    """int32 [rows] from (row, block) pairs and who decodes: see ``new_blocks_spec``."""
    new_blocks_B = _full(new_blocks_spec(rows), NULL_BLOCK)
    for row, block in new_blocks:
        new_blocks_B[row] = block
    if None in decode:
        new_blocks_B[[row for row, request in enumerate(decode) if request is None]] = SIT_OUT
    return new_blocks_B


def pack_sampling(chunks: Sequence[Chunk], specs: SamplingRows) -> SamplingRows:
    """Sampling settings of ``chunks``, then neutral ones up to the rows of ``specs``.

    A chunk whose token does not count is neutral too: nothing is computed for it.
    """
    rows = SamplingRows(*map(_full, specs, NEUTRAL_SAMPLING))
    for s, chunk in enumerate(chunks):
        if not chunk.samples:
            continue
        params = chunk.request.params
        rows.temperature_X[s] = params.temperature
        rows.top_k_X[s] = max(params.top_k, 0)
        rows.top_p_X[s] = params.top_p
        rows.min_p_X[s] = params.min_p
        rows.keys_X2[s] = chunk.request.key
        rows.presence_X[s] = params.presence_penalty
        rows.frequency_X[s] = params.frequency_penalty
        rows.repetition_X[s] = params.repetition_penalty
        if params.logprobs is not None:
            raw = params.logprobs_mode == "raw_logprobs"
            rows.logprobs_X[s] = RAW_LOGPROBS if raw else PROCESSED_LOGPROBS
    return rows


def pack_bias(chunks: Sequence[Chunk], segments: int) -> LogitBias | None:
    """Logit biases of ``chunks``; None where no request has any."""
    if not any(chunk.request.params.logit_bias for chunk in chunks):
        return None
    bias = LogitBias(*map(_full, bias_specs(segments)))
    for s, chunk in enumerate(chunks):
        if chunk.request.params.logit_bias:
            ids, values = zip(*chunk.request.params.logit_bias, strict=True)
            bias.ids_XE[s, : len(ids)] = ids
            bias.values_XE[s, : len(ids)] = values
    return bias


def pack_targets(chunks: Sequence[Chunk], spec: ArraySpec) -> np.ndarray | None:
    """The prompt token after each token of a request that wants it scored; None if none does."""
    if not any(chunk.request.scores_prompt for chunk in chunks):
        return None
    targets_T = _full(spec, NO_TARGET)
    start = 0
    for chunk in chunks:
        if chunk.request.scores_prompt:
            following = chunk.request.prompt_token_ids[chunk.start + 1 : chunk.end + 1]
            targets_T[start : start + len(following)] = following
        start += chunk.end - chunk.start
    return targets_T


def pack_counts(request: Request, vocab_size: int) -> np.ndarray:
    """uint16 [V]: see ``counts_spec``; a request's known tokens."""
    drawn_V = np.bincount(request.output_token_ids, minlength=vocab_size)
    counts_V = np.minimum(drawn_V, MOST_COUNTED).astype(counts_spec(vocab_size).dtype)
    counts_V[request.prompt_token_ids] |= IN_PROMPT
    return counts_V


def pack_prefill(
    chunks: Sequence[Chunk],
    *,
    tokens: int,
    max_num_seqs: int,
    blocks_per_row: int,
    block_size: int,
    vocab_size: int,
    mask_SW: np.ndarray | None = None,
) -> PrefillBatch:
    """``chunks`` end to end in a bucket of ``tokens`` tokens, with S = max_num_seqs segments."""
    specs = prefill_batch_specs(tokens, max_num_seqs, blocks_per_row, vocab_size)
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
        sampling=pack_sampling(chunks, specs.sampling),
        bias=pack_bias(chunks, max_num_seqs),
        mask_SW=mask_SW,
        targets_T=pack_targets(chunks, specs.targets_T),
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
