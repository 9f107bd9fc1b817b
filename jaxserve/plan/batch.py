"""The arrays a step takes and gives back, described once.

Packing, lowering specs, warm-up zeros and shape assertions all derive from the ``*_specs``
functions here. Letters are those of config.py. The containers are NamedTuples, which JAX flattens
by itself, so this floor needs no jax.

Two conventions hold everywhere. Block 0 of the pool is the *null block*: nothing is ever read from
it, and padded rows and tokens write to it. A row with context length 0 is empty.

Masks say which tokens a row may draw: W = ceil(V / 32) words of 32 bits, bit t % 32 of word t // 32
for token t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxserve.config import MAX_LOGIT_BIAS
from jaxserve.plan.units import cdiv

NULL_BLOCK = 0
SIT_OUT = -1
"""In place of a new block: the row takes no part in this decode step and stays as it is."""

NO_TARGET = -1

NO_LOGPROBS, RAW_LOGPROBS, PROCESSED_LOGPROBS = 0, 1, 2

ALL_ALLOWED = 0xFFFF_FFFF
"""A word of a mask that bans nothing."""

IN_PROMPT = 0x8000
MOST_COUNTED = 0x7FFF
"""What a uint16 count holds: how often the row drew the token, and a bit if its prompt has it."""


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype name of one array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes the array takes."""
        n = {"uint16": 2, "int32": 4, "uint32": 4, "float32": 4, "bfloat16": 2, "float16": 2}[
            self.dtype
        ]
        for d in self.shape:
            n *= d
        return n


class SamplingRows(NamedTuple):
    """How each row draws its token; ``NEUTRAL_SAMPLING`` is greedy and asks for nothing.

    ``keys_X2`` is a threefry key, the two halves of the request's 64-bit seed; a draw folds the
    token's position into it, so a token depends on its own seed and position and on nothing else.
    ``logprobs_X`` says which log probabilities are reported, one of the three constants above.
    """

    temperature_X: Any  # float32
    top_k_X: Any  # int32
    top_p_X: Any  # float32
    min_p_X: Any  # float32
    keys_X2: Any  # uint32
    presence_X: Any  # float32
    frequency_X: Any  # float32
    repetition_X: Any  # float32
    logprobs_X: Any  # int32


NEUTRAL_SAMPLING = SamplingRows(
    temperature_X=0.0,
    top_k_X=0,
    top_p_X=1.0,
    min_p_X=0.0,
    keys_X2=0,
    presence_X=0.0,
    frequency_X=0.0,
    repetition_X=1.0,
    logprobs_X=NO_LOGPROBS,
)


class LogitBias(NamedTuple):
    """What is added to the logits of up to E tokens a row; unused entries add 0."""

    ids_XE: Any  # int32
    values_XE: Any  # float32


class DecodeState(NamedTuple):
    """Decode inputs that live on the device between steps, donated to each and given back.

    ``context_lens_B`` counts tokens whose K/V are in the pool; the token in ``last_tokens_B`` is
    the next to be fed, at that position. ``counts_BV`` is kept for rows with a penalty; in others
    it is garbage.
    """

    block_tables_BP: Any  # int32, entries past a row's length may hold garbage
    context_lens_B: Any  # int32, 0: an empty row
    last_tokens_B: Any  # int32
    sampling: SamplingRows
    bias: LogitBias
    counts_BV: Any  # uint16, see MOST_COUNTED


class PrefillBatch(NamedTuple):
    """Tokens of up to S requests packed end to end, sent by the host for one prefill step.

    Segment s owns tokens cu_query_lens[s] .. cu_query_lens[s + 1] - 1; unused segments are empty
    and tokens past cu_query_lens[S] are padding (token 0, position 0, slot in the null block).
    ``context_lens_S`` counts the segment's tokens with this chunk included. ``rows_S`` is the
    decode row a segment moves into after this chunk, or B (out of range) while its prompt is not
    done. ``targets_T`` is the prompt token after each token whose log probability is wanted, else
    NO_TARGET.

    The host may leave ``bias``, ``mask_SW`` and ``targets_T`` None where they are neutral: the
    runner has such arrays on the device.
    """

    tokens_T: Any  # int32
    positions_T: Any  # int32
    slots_T: Any  # int32, block * Z + offset: where the token's K/V go
    cu_query_lens_S1: Any  # int32, S + 1 entries
    block_tables_SP: Any  # int32
    context_lens_S: Any  # int32
    rows_S: Any  # int32
    sampling: SamplingRows
    bias: LogitBias | None
    mask_SW: Any  # uint32
    targets_T: Any  # int32


class Scores(NamedTuple):
    """Log probabilities (natural) of one token a row, its rank (1: likeliest), and the likeliest.

    The N likeliest come in order; where fewer may be drawn the rest are -inf. All is zeros where
    nobody asked.
    """

    logprobs_X: Any  # float32
    ranks_X: Any  # int32
    top_ids_XN: Any  # int32
    top_logprobs_XN: Any  # float32


class StepOutput(NamedTuple):
    """What a step drew: a token a row or segment, and their scores.

    ``prompt`` scores the targets of a prefill, a token of T each; None for a decode.
    """

    tokens_X: Any  # int32
    scores: Scores
    prompt: Scores | None = None


def sampling_specs(rows: int) -> SamplingRows:
    """Specs of the sampling settings of ``rows`` rows."""
    return SamplingRows(
        temperature_X=ArraySpec((rows,), "float32"),
        top_k_X=ArraySpec((rows,), "int32"),
        top_p_X=ArraySpec((rows,), "float32"),
        min_p_X=ArraySpec((rows,), "float32"),
        keys_X2=ArraySpec((rows, 2), "uint32"),
        presence_X=ArraySpec((rows,), "float32"),
        frequency_X=ArraySpec((rows,), "float32"),
        repetition_X=ArraySpec((rows,), "float32"),
        logprobs_X=ArraySpec((rows,), "int32"),
    )


def bias_specs(rows: int) -> LogitBias:
    """Specs of the logit biases of ``rows`` rows, E = MAX_LOGIT_BIAS each."""
    return LogitBias(
        ids_XE=ArraySpec((rows, MAX_LOGIT_BIAS), "int32"),
        values_XE=ArraySpec((rows, MAX_LOGIT_BIAS), "float32"),
    )


def mask_spec(rows: int, vocab_size: int) -> ArraySpec:
    """Spec of the masks of ``rows`` rows, [rows, W]."""
    return ArraySpec((rows, cdiv(vocab_size, 32)), "uint32")


def counts_spec(vocab_size: int) -> ArraySpec:
    """Spec of one row's token counts, [V]; see MOST_COUNTED."""
    return ArraySpec((vocab_size,), "uint16")


def targets_spec(tokens: int) -> ArraySpec:
    """Spec of the targets of a prefill of T = tokens."""
    return ArraySpec((tokens,), "int32")


def row_spec() -> ArraySpec:
    """Spec of a row's number, a scalar."""
    return ArraySpec((), "int32")


def decode_state_specs(max_num_seqs: int, blocks_per_row: int, vocab_size: int) -> DecodeState:
    """Specs of the persistent state: B = max_num_seqs rows of P = blocks_per_row blocks."""
    return DecodeState(
        block_tables_BP=ArraySpec((max_num_seqs, blocks_per_row), "int32"),
        context_lens_B=ArraySpec((max_num_seqs,), "int32"),
        last_tokens_B=ArraySpec((max_num_seqs,), "int32"),
        sampling=sampling_specs(max_num_seqs),
        bias=bias_specs(max_num_seqs),
        counts_BV=ArraySpec((max_num_seqs, vocab_size), "uint16"),
    )


def new_blocks_spec(rows: int) -> ArraySpec:
    """Spec of what the host sends to a decode step of ``rows`` rows.

    Entry b is the block that row b's token goes to when that token is the first of its block, else
    NULL_BLOCK, or SIT_OUT.
    """
    return ArraySpec((rows,), "int32")


def permutation_spec(max_num_seqs: int) -> ArraySpec:
    """Spec of a row permutation: entry b is the row whose state row b takes, -1 to empty it."""
    return ArraySpec((max_num_seqs,), "int32")


def prefill_batch_specs(
    tokens: int, segments: int, blocks_per_row: int, vocab_size: int
) -> PrefillBatch:
    """Specs of a prefill of T = tokens, S = segments, P = blocks_per_row."""
    return PrefillBatch(
        tokens_T=ArraySpec((tokens,), "int32"),
        positions_T=ArraySpec((tokens,), "int32"),
        slots_T=ArraySpec((tokens,), "int32"),
        cu_query_lens_S1=ArraySpec((segments + 1,), "int32"),
        block_tables_SP=ArraySpec((segments, blocks_per_row), "int32"),
        context_lens_S=ArraySpec((segments,), "int32"),
        rows_S=ArraySpec((segments,), "int32"),
        sampling=sampling_specs(segments),
        bias=bias_specs(segments),
        mask_SW=mask_spec(segments, vocab_size),
        targets_T=targets_spec(tokens),
    )


def kv_pool_spec(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: str
) -> ArraySpec:
    """Spec of one layer's K (or V) array, [C, K, Z, H]: a head's part of a block is contiguous."""
    return ArraySpec((num_blocks, num_kv_heads, block_size, head_dim), dtype)
