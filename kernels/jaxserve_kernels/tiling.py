"""How many keys and queries one trip of a streamed read takes."""

from __future__ import annotations

from typing import NamedTuple

# The fastest on XLA:CPU for heads of 64: above 32 keys a decode trip's products take a slower path
# there; 64 queries by 128 keys balance a prefill's causal waste against its trips.
_DECODE_KEYS = 32
_PREFILL_KEYS = 128
_PREFILL_QUERIES = 64


class PrefillTile(NamedTuple):
    """Queries and keys that one trip of a prefill multiplies."""

    queries: int
    keys: int


def _whole_blocks(keys: int, block_size: int, blocks_per_row: int) -> int:
    """``keys`` rounded down to whole blocks: at least one, at most the table's."""
    return max(1, min(keys // block_size, blocks_per_row)) * block_size


def decode_tile(block_size: int, blocks_per_row: int) -> int:
    """Keys that one trip of a decode read takes: whole blocks."""
    return _whole_blocks(_DECODE_KEYS, block_size, blocks_per_row)


def prefill_tile(tokens: int, block_size: int, blocks_per_row: int) -> PrefillTile:
    """Tile of a prefill of ``tokens`` packed tokens; its keys are whole blocks."""
    return PrefillTile(
        queries=min(_PREFILL_QUERIES, tokens),
        keys=_whole_blocks(_PREFILL_KEYS, block_size, blocks_per_row),
    )


class DecodePlan(NamedTuple):
    """How the GPU decode kernel cuts the rows of a step up; sizes of splits are in tiles.

    A row's splits are each a ``few_splits``-th of it, between ``min_split`` and ``mid_split``, or
    as long as ``max_splits`` of them must be. ``splits`` is the most any row of this width has,
    ``programs`` how many work on a row and kv head, which changes no result.
    """

    keys: int
    group: int
    warps: int
    stages: int
    few_splits: int
    min_split: int
    mid_split: int
    max_splits: int
    splits: int
    programs: int
    merge_warps: int


def decode_plan(
    pairs: int, width: int, group: int, head_size: int, compute_bytes: int
) -> DecodePlan:
    """The plan of a step of ``pairs`` (row, kv head) whose rows read up to ``width`` tokens.

    ``group`` query heads share a kv head; products take operands of ``compute_bytes``.
    """
    lanes = 1 << (head_size - 1).bit_length()
    keys = min(64, 2**14 // (lanes * compute_bytes))
    min_split, mid_split, max_splits = 256 // keys, 1024 // keys, 32
    tiles = -(-width // keys) + 1
    splits = min(max_splits, -(-tiles // min_split))
    return DecodePlan(
        keys=keys,
        group=max(16, 1 << (group - 1).bit_length()),
        warps=4,
        stages=5,
        few_splits=16,
        min_split=min_split,
        mid_split=mid_split,
        max_splits=max_splits,
        splits=splits,
        programs=max(1, min(splits, -(-1024 // pairs))),
        merge_warps=4,
    )
