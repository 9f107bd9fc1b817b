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


class SplitRule(NamedTuple):
    """How a decode row is cut into splits, whose sizes are in tiles of ``keys``.

    A split is a ``few_splits``-th of its row, between ``min_split`` and ``mid_split``, or as long
    as ``max_splits`` of them must be.
    """

    keys: int
    few_splits: int
    min_split: int
    mid_split: int
    max_splits: int

    def most(self, tokens: int) -> int:
        """Splits that a row which reads up to ``tokens`` may have."""
        tiles = -(-tokens // self.keys) + 1
        return min(self.max_splits, -(-tiles // self.min_split))


def split_rule(keys: int) -> SplitRule:
    """The rule of kernels that take ``keys`` in a trip.

    256 tokens at least, so that sums of a split are a hundredth of what it reads; 16 splits, which
    spread one row over a GPU; 1024 tokens before there are more, and 32 at most, since each is
    memory for every row of a step.
    """
    return SplitRule(keys, 16, max(1, 256 // keys), max(1, 1024 // keys), 32)


def programs_sharing(splits: int, pairs: int) -> int:
    """Programs that share the splits of one of ``pairs`` (row, kv head); it changes no result.

    About 1024 in all keep every multiprocessor busy however unlike the rows; more would start for
    splits that few rows have.
    """
    return max(1, min(splits, -(-1024 // pairs)))


class DecodePlan(NamedTuple):
    """How a program of the Triton decode kernel works; ``group`` query heads are multiplied."""

    rule: SplitRule
    group: int
    warps: int
    stages: int


def decode_plan(group: int, head_size: int, pool_bytes: int, operand_bytes: int) -> DecodePlan:
    """The plan for ``group`` query heads a kv head over a pool of ``pool_bytes`` a value.

    Products take operands of ``operand_bytes``. A trip takes up to 32 KiB of keys and values as
    multiplied, and five stages keep two trips of copies in flight (two more go to the lookup of
    blocks): 64 KiB a program, three programs a multiprocessor of a Hopper GPU, one of the
    smallest's. Larger trips spill registers, and so may a second one in flight where 8 bits are
    widened: there it is one. Tensor cores take at least 16 queries.
    """
    lanes = 1 << (head_size - 1).bit_length()
    queries = max(16, 1 << (group - 1).bit_length())
    return DecodePlan(
        rule=split_rule(min(64, 2**14 // (lanes * operand_bytes))),
        group=queries,
        warps=4 if queries * lanes * operand_bytes <= 2**13 else 8,
        stages=5 if pool_bytes > 1 else 4,
    )
