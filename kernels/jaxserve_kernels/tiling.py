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
