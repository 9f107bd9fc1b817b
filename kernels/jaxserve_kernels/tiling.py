"""How many keys and queries one trip of a streamed read takes."""

from __future__ import annotations

from typing import NamedTuple

# Keys a trip reads: enough to pay for the trip, few enough that a short row wastes little.
_DECODE_KEYS = 128
_PREFILL_KEYS = 256
_PREFILL_QUERIES = 64


class PrefillTile(NamedTuple):
    """Queries and blocks of keys that one trip of a prefill multiplies."""

    queries: int
    blocks: int


def decode_tile_blocks(block_size: int, blocks_per_row: int) -> int:
    """Blocks that one trip of a decode read takes, at least 1 and at most the table's width."""
    return max(1, min(_DECODE_KEYS // block_size, blocks_per_row))


def prefill_tile(tokens: int, block_size: int, blocks_per_row: int) -> PrefillTile:
    """Tile of a prefill of ``tokens`` packed tokens."""
    return PrefillTile(
        queries=min(_PREFILL_QUERIES, tokens),
        blocks=max(1, min(_PREFILL_KEYS // block_size, blocks_per_row)),
    )
