"""The allocator of KV blocks: who refers to each, what the full ones hold, which is given next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from jaxserve.errors import AuditFailed, EngineError
from jaxserve.plan.batch import NULL_BLOCK
from jaxserve.plan.units import cdiv


class BlockPool:
    """Blocks 1 .. C-1 of the KV pool, each free or referred to by one request or more.

    Block 0 is the null block: never free, never owned. A full block may be registered under a
    digest of what it holds; it can then be found and shared, and nobody writes to it again. A
    registered block that nobody refers to is free as well, but keeps what it holds for as long as
    it can: blocks without a digest are given out first (the one freed last before the others), then
    registered ones, those unused for longest first.
    """

    def __init__(self, num_blocks: int, block_size: int, *, keep_unused: bool = True) -> None:
        """``keep_unused``: False forgets a registered block as soon as nobody refers to it."""
        self.block_size = block_size
        self.num_usable = num_blocks - 1
        self._keep_unused = keep_unused
        self._num_refs = [0] * num_blocks
        self._empty = [b for b in reversed(range(num_blocks)) if b != NULL_BLOCK]
        self._unused: OrderedDict[int, None] = OrderedDict()  # registered; the next to go first
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks nobody refers to."""
        return len(self._empty) + len(self._unused)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return cdiv(num_tokens, self.block_size)

    def allocate(self, count: int) -> list[int]:
        """``count`` free blocks to write to; raises EngineError when there are fewer."""
        if count > self.num_free:
            raise EngineError(f"{count} KV blocks asked for, {self.num_free} are free")
        blocks = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block in blocks:
            self._num_refs[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Refer to registered ``blocks`` once more."""
        for block in blocks:
            if not self._num_refs[block]:
                del self._unused[block]
            self._num_refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each of a request's ``blocks``; raises AuditFailed where none is.

        The last goes first, so that of a sequence nobody uses the end is evicted before the start.
        """
        for block in reversed(blocks):
            refs = self._num_refs[block]
            if not refs:
                raise AuditFailed(f"block {block} was freed, but nobody owns it")
            self._num_refs[block] = refs - 1
            if refs > 1:
                continue
            if block not in self._digest_of:
                self._empty.append(block)
            elif self._keep_unused:
                self._unused[block] = None
            else:
                del self._block_of[self._digest_of.pop(block)]
                self._empty.append(block)

    def register(self, block: int, digest: bytes) -> None:
        """Let ``block``, which is full, be found; where another is, it stays and this one is not.

        The caller vouches that every step that could read the block runs after the one that fills
        it.
        """
        if self._block_of.setdefault(digest, block) == block:
            self._digest_of[block] = digest

    def find(self, digest: bytes) -> int | None:
        """The block registered under ``digest``."""
        return self._block_of.get(digest)

    def digest_of(self, block: int) -> bytes | None:
        """What ``block`` is registered under."""
        return self._digest_of.get(block)

    def num_unused(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks`` count as free."""
        return sum(not self._num_refs[block] for block in blocks)

    def forget(self) -> None:
        """Drop every digest: blocks keep their owners, and no block is found any more."""
        self._empty += reversed(self._unused)
        self._unused.clear()
        self._block_of.clear()
        self._digest_of.clear()

    def _evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        del self._block_of[self._digest_of.pop(block)]
        return block

    def audit(self, owners: Mapping[str, Sequence[int]]) -> None:
        """Raise AuditFailed unless references, free blocks and digests match ``owners``.

        ``owners`` maps each request to its blocks.
        """
        holders: dict[int, list[str]] = {}
        for owner, blocks in owners.items():
            for block in blocks:
                if block == NULL_BLOCK:
                    raise AuditFailed(f"request {owner} owns the null block")
                if not self._num_refs[block]:
                    raise AuditFailed(f"request {owner} owns block {block}, which is free")
                holders.setdefault(block, []).append(owner)
        for block, names in holders.items():
            if len(names) != self._num_refs[block]:
                raise AuditFailed(
                    f"block {block} counts {self._num_refs[block]} references, but the requests "
                    f"that hold it are {names}"
                )
        lost = [b for b, refs in enumerate(self._num_refs) if refs and b not in holders]
        if lost:
            raise AuditFailed(f"blocks {lost} belong to no request")
        self._audit_free(len(holders))
        self._audit_digests()

    def _audit_free(self, num_held: int) -> None:
        free = {*self._empty, *self._unused}
        if len(free) != self.num_free or any(self._num_refs[b] for b in free):
            raise AuditFailed(
                f"{self.num_free} blocks on the free lists, of which "
                f"{sum(not self._num_refs[b] for b in free)} are free"
            )
        if num_held + len(free) != self.num_usable:
            raise AuditFailed(f"{num_held} held and {len(free)} free of {self.num_usable} blocks")

    def _audit_digests(self) -> None:
        for digest, block in self._block_of.items():
            if self._digest_of.get(block) != digest:
                raise AuditFailed(f"a digest leads to block {block}, which is under another")
        if len(self._digest_of) != len(self._block_of):
            raise AuditFailed(
                f"{len(self._digest_of)} blocks have a digest, {len(self._block_of)} are found"
            )
        registered = {b for b in self._digest_of if not self._num_refs[b]}
        if registered != self._unused.keys():
            raise AuditFailed(
                f"blocks {sorted(registered)} are registered and unused, "
                f"{sorted(self._unused)} are listed so"
            )
