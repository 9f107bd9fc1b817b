"""The allocator of KV blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxserve.errors import AuditFailed, EngineError
from jaxserve.plan.batch import NULL_BLOCK
from jaxserve.plan.units import cdiv


class BlockPool:
    """Blocks 1 .. C-1 of the KV pool, each free or owned by one request.

    Block 0 is the null block: never free, never owned. The block freed last is given out first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_usable = num_blocks - 1
        self._free = [b for b in reversed(range(num_blocks)) if b != NULL_BLOCK]
        self._is_free = bytearray(b"\1") * num_blocks
        self._is_free[NULL_BLOCK] = False

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return cdiv(num_tokens, self.block_size)

    def allocate(self, count: int) -> list[int]:
        """``count`` free blocks; raises EngineError when there are fewer."""
        if count > len(self._free):
            raise EngineError(f"{count} KV blocks asked for, {len(self._free)} are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._is_free[block] = False
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give ``blocks`` back; raises AuditFailed for one that is free or the null block."""
        for block in blocks:
            if block == NULL_BLOCK or self._is_free[block]:
                raise AuditFailed(f"block {block} was freed, but nobody owns it")
            self._is_free[block] = True
            self._free.append(block)

    def audit(self, owners: Mapping[str, Sequence[int]]) -> None:
        """Raise AuditFailed unless every block is free or in exactly one of ``owners``.

        ``owners`` maps each request to its blocks.
        """
        holder: dict[int, str] = {}
        for owner, blocks in owners.items():
            for block in blocks:
                if block == NULL_BLOCK:
                    raise AuditFailed(f"request {owner} owns the null block")
                if block in holder:
                    raise AuditFailed(f"request {owner} and {holder[block]} both own block {block}")
                if self._is_free[block]:
                    raise AuditFailed(f"request {owner} owns block {block}, which is free")
                holder[block] = owner
        if len(set(self._free)) != len(self._free) or len(self._free) != sum(self._is_free):
            raise AuditFailed(
                f"{len(self._free)} blocks on the free list, {sum(self._is_free)} marked free"
            )
        if len(holder) + len(self._free) != self.num_usable:
            lost = [
                b
                for b, free in enumerate(self._is_free)
                if not free and b not in holder and b != NULL_BLOCK
            ]
            raise AuditFailed(
                f"{len(holder)} owned and {len(self._free)} free of {self.num_usable} blocks; "
                f"blocks {lost} belong to no request"
            )
