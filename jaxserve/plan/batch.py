"""The arrays a step takes and gives back, described once.

Packing, lowering specs, warm-up zeros and shape assertions all derive from the ``*_specs``
functions here. Letters are those of config.py. The containers are NamedTuples, which JAX flattens
by itself, so this floor needs no jax.

Two conventions hold everywhere. Block 0 of the pool is the *null block*: nothing is ever read from
it, and padded rows and tokens write to it. A row with context length 0 is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

NULL_BLOCK = 0


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype name of one array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes the array takes."""
        n = {"int32": 4, "uint32": 4, "float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        for d in self.shape:
            n *= d
        return n


class SamplingRows(NamedTuple):
    """How each row draws its token; neutral values are 0 (greedy), 0 (all), 1 (all), 0 (all).

    ``keys_X2`` is a threefry key, the two halves of the request's 64-bit seed; a draw folds the
    token's position into it, so a token depends on its own seed and position and on nothing else.
    """

    temperature_X: Any  # float32
    top_k_X: Any  # int32
    top_p_X: Any  # float32
    min_p_X: Any  # float32
    keys_X2: Any  # uint32


class DecodeState(NamedTuple):
    """Decode inputs that live on the device between steps, donated to each and given back.

    ``context_lens_B`` counts tokens whose K/V are in the pool; the token in ``last_tokens_B`` is
    the next to be fed, at that position.
    """

    block_tables_BP: Any  # int32, entries past a row's length may hold garbage
    context_lens_B: Any  # int32, 0: an empty row
    last_tokens_B: Any  # int32
    sampling: SamplingRows


class PrefillBatch(NamedTuple):
    """Tokens of up to S requests packed end to end, sent by the host for one prefill step.

    Segment s owns tokens cu_query_lens[s] .. cu_query_lens[s + 1] - 1; unused segments are empty
    and tokens past cu_query_lens[S] are padding (token 0, position 0, slot in the null block).
    ``context_lens_S`` counts the segment's tokens with this chunk included. ``rows_S`` is the
    decode row a segment moves into after this chunk, or B (out of range) while its prompt is not
    done.
    """

    tokens_T: Any  # int32
    positions_T: Any  # int32
    slots_T: Any  # int32, block * Z + offset: where the token's K/V go
    cu_query_lens_S1: Any  # int32, S + 1 entries
    block_tables_SP: Any  # int32
    context_lens_S: Any  # int32
    rows_S: Any  # int32
    sampling: SamplingRows


def sampling_specs(rows: int) -> SamplingRows:
    """Specs of the sampling settings of ``rows`` rows."""
    return SamplingRows(
        temperature_X=ArraySpec((rows,), "float32"),
        top_k_X=ArraySpec((rows,), "int32"),
        top_p_X=ArraySpec((rows,), "float32"),
        min_p_X=ArraySpec((rows,), "float32"),
        keys_X2=ArraySpec((rows, 2), "uint32"),
    )


def decode_state_specs(max_num_seqs: int, blocks_per_row: int) -> DecodeState:
    """Specs of the persistent state: B = max_num_seqs rows of P = blocks_per_row blocks."""
    return DecodeState(
        block_tables_BP=ArraySpec((max_num_seqs, blocks_per_row), "int32"),
        context_lens_B=ArraySpec((max_num_seqs,), "int32"),
        last_tokens_B=ArraySpec((max_num_seqs,), "int32"),
        sampling=sampling_specs(max_num_seqs),
    )


def new_blocks_spec(rows: int) -> ArraySpec:
    """Spec of what the host sends to a decode step of ``rows`` rows.

    Entry b is the block that row b's token goes to when that token is the first of its block, else
    NULL_BLOCK.
    """
    return ArraySpec((rows,), "int32")


def permutation_spec(max_num_seqs: int) -> ArraySpec:
    """Spec of a row permutation: entry b is the row whose state row b takes, -1 to empty it."""
    return ArraySpec((max_num_seqs,), "int32")


def prefill_batch_specs(tokens: int, segments: int, blocks_per_row: int) -> PrefillBatch:
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
    )


def kv_pool_spec(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: str
) -> ArraySpec:
    """Spec of one layer's K (or V) array, [C, K, Z, H]: a head's part of a block is contiguous."""
    return ArraySpec((num_blocks, num_kv_heads, block_size, head_dim), dtype)
