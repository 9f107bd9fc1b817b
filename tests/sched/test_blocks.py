"""The block allocator against a model that keeps every block's history, and its audit."""

from __future__ import annotations

import re

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxserve.errors import AuditFailed, EngineError
from jaxserve.sched.blocks import BlockPool

DIGESTS = [bytes([d]) for d in range(12)]


class PoolModel(RuleBasedStateMachine):
    """What a pool must do, from who holds what and when each block was last let go."""

    keep_unused = True

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, 8, keep_unused=self.keep_unused)
        self.held: dict[str, list[int]] = {}
        self.found: dict[bytes, int] = {}
        self.let_go = dict.fromkeys(range(1, 9), 0)
        self.now = 0

    def used(self) -> set[int]:
        return {block for blocks in self.held.values() for block in blocks}

    def unused(self) -> list[int]:
        """Registered blocks nobody holds, the next to be evicted first."""
        return sorted(set(self.found.values()) - self.used(), key=self.let_go.__getitem__)

    def hold(self, blocks: list[int]) -> None:
        self.now += 1
        self.held[f"r{self.now}"] = blocks

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        free = set(range(1, 9)) - self.used()
        if count > len(free):
            with pytest.raises(EngineError, match=f"{count} KV blocks asked for, {len(free)} are"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        empty = free - set(self.unused())
        evicted = self.unused()[: max(count - len(empty), 0)]
        assert set(blocks) <= empty | set(evicted)
        assert set(evicted) <= set(blocks)
        self.found = {d: b for d, b in self.found.items() if b not in evicted}
        self.hold(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        self.pool.free(blocks)
        for block in reversed(blocks):
            self.now += 1
            self.let_go[block] = self.now
        if not self.keep_unused:
            self.found = {d: b for d, b in self.found.items() if b in self.used()}

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.used())))
        digest = data.draw(st.sampled_from(DIGESTS))
        if block in self.found.values():
            return  # full blocks are never written to, so never hashed again
        self.pool.register(block, digest)
        self.found.setdefault(digest, block)

    @rule(digests=st.lists(st.sampled_from(DIGESTS), unique=True, max_size=4))
    def share(self, digests: list[bytes]) -> None:
        blocks = [block for d in digests if (block := self.pool.find(d)) is not None]
        assert self.pool.num_unused(blocks) == len(set(blocks) - self.used())
        self.pool.share(blocks)
        self.hold(blocks)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.found = {}

    @invariant()
    def everything_is_found_where_it_is(self) -> None:
        assert {d: self.pool.find(d) for d in DIGESTS} == {d: self.found.get(d) for d in DIGESTS}
        by_block = {block: digest for digest, block in self.found.items()}
        assert all(self.pool.digest_of(b) == by_block.get(b) for b in range(9))

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        assert self.pool.num_free + len(self.used()) == self.pool.num_usable == 8
        self.pool.audit(self.held)


class ForgetfulPoolModel(PoolModel):
    keep_unused = False

    @invariant()
    def nothing_outlives_its_users(self) -> None:
        assert not self.unused()


TestPool = PoolModel.TestCase
TestForgetfulPool = ForgetfulPoolModel.TestCase
TestPool.settings = TestForgetfulPool.settings = settings(stateful_step_count=40)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_tokens_are_rounded_up_to_blocks(tokens, blocks):
    assert BlockPool(4, 8).blocks_for(tokens) == blocks


@pytest.mark.parametrize("block", [0, 3])
def test_freeing_a_block_that_nobody_owns_is_refused(block):
    pool = BlockPool(4, 8)
    with pytest.raises(AuditFailed, match=f"block {block} was freed, but nobody owns it"):
        pool.free([block])


def test_a_block_without_a_digest_is_given_out_before_any_cached_one():
    pool = BlockPool(5, 8)
    cached, plain = pool.allocate(1), pool.allocate(1)
    pool.register(cached[0], b"x")
    pool.free(plain)
    pool.free(cached)
    assert set(pool.allocate(3)) == {2, 3, 4}
    assert pool.find(b"x") == 1
    assert pool.allocate(1) == [1]
    assert pool.find(b"x") is None


def test_the_end_of_a_sequence_is_evicted_before_its_start_and_the_longest_unused_first():
    pool = BlockPool(7, 8)
    old, new = pool.allocate(3), pool.allocate(3)
    for block in (*old, *new):
        pool.register(block, bytes([block]))
    pool.free(old)
    pool.free(new)
    pool.share(old[:1])  # used again
    pool.free(old[:1])
    assert pool.allocate(6) == [old[2], old[1], new[2], new[1], new[0], old[0]]


def test_the_second_block_of_a_digest_is_not_found_and_is_empty_once_it_is_free():
    pool = BlockPool(4, 8)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.register(first[0], b"x")
    pool.register(second[0], b"x")
    assert (pool.find(b"x"), pool.digest_of(second[0])) == (first[0], None)
    pool.free(second)
    pool.free(first)
    assert set(pool.allocate(2)) == {2, 3}


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"a": [0], "b": [1, 2]}, "request a owns the null block"),
        ({"a": [1], "b": [1, 2]}, "block 1 counts 1 references, but the requests that hold it are"),
        ({"a": [1, 1], "b": [2]}, "block 1 counts 1 references, but the requests that hold it are"),
        ({"a": [1], "b": [2, 3]}, "request b owns block 3, which is free"),
        ({"a": [1]}, "blocks [2] belong to no request"),
    ],
)
def test_the_audit_names_who_holds_what_it_should_not(claims, message):
    pool = BlockPool(5, 8)
    assert pool.allocate(2) == [1, 2]
    pool.audit({"a": [1], "b": [2]})
    with pytest.raises(AuditFailed, match=re.escape(message)):
        pool.audit(claims)


def lose_a_reference(pool):
    pool._num_refs[1] -= 1


def list_twice(pool):
    pool._empty.append(4)


def list_a_held_one(pool):
    pool._empty.append(1)


def drop_a_free_one(pool):
    pool._empty.pop()


def find_another(pool):
    pool._block_of[b"held"] = 3


def keep_a_digest(pool):
    del pool._block_of[b"unused"]


def unlist_a_cached_one(pool):
    pool._empty.append(pool._unused.popitem()[0])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_reference, "counts 1 references, but the requests that hold it are ['a', 'b']"),
        (list_twice, "5 blocks on the free lists, of which 4 are free"),
        (list_a_held_one, "5 blocks on the free lists, of which 4 are free"),
        (drop_a_free_one, "1 held and 3 free of 5 blocks"),
        (find_another, "a digest leads to block 3, which is under another"),
        (keep_a_digest, "2 blocks have a digest, 1 are found"),
        (unlist_a_cached_one, "blocks [2] are registered and unused, [] are listed so"),
    ],
)
def test_the_audit_finds_a_broken_book(damage, message):
    pool = BlockPool(6, 8)
    held, unused = pool.allocate(1), pool.allocate(1)
    pool.register(held[0], b"held")
    pool.register(unused[0], b"unused")
    pool.share(held)
    pool.free(unused)
    owners = {"a": held, "b": held}
    pool.audit(owners)
    damage(pool)
    with pytest.raises(AuditFailed, match=re.escape(message)):
        pool.audit(owners)
