"""The block allocator against a set, and its audit against broken books."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import AuditFailed, EngineError
from jaxserve.sched.blocks import BlockPool


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_every_block_but_the_null_block_is_given_out_to_one_owner_at_a_time(num_blocks, moves):
    pool = BlockPool(num_blocks, 8)
    owned: dict[str, list[int]] = {}
    for i, (give_back, count) in enumerate(moves):
        if give_back and owned:
            pool.free(owned.pop(min(owned)))
        elif count <= pool.num_free:
            owned[f"r{i:02}"] = pool.allocate(count)
        else:
            with pytest.raises(EngineError, match=f"{count} KV blocks asked for"):
                pool.allocate(count)
        everything = [block for blocks in owned.values() for block in blocks]
        assert len(everything) == len(set(everything))
        assert set(everything) <= set(range(1, num_blocks))
        assert len(everything) + pool.num_free == pool.num_usable == num_blocks - 1
        pool.audit(owned)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_tokens_are_rounded_up_to_blocks(tokens, blocks):
    assert BlockPool(4, 8).blocks_for(tokens) == blocks


@pytest.mark.parametrize("block", [0, 3])
def test_freeing_a_block_that_nobody_owns_is_refused(block):
    pool = BlockPool(4, 8)
    with pytest.raises(AuditFailed, match=f"block {block} was freed, but nobody owns it"):
        pool.free([block])


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"a": [0], "b": [1, 2]}, "request a owns the null block"),
        ({"a": [1], "b": [1, 2]}, "request b and a both own block 1"),
        ({"a": [1], "b": [2, 3]}, "request b owns block 3, which is free"),
        ({"a": [1]}, r"blocks \[2\] belong to no request"),
    ],
)
def test_the_audit_names_who_holds_what_it_should_not(claims, message):
    pool = BlockPool(5, 8)
    assert pool.allocate(2) == [1, 2]
    pool.audit({"a": [1], "b": [2]})
    with pytest.raises(AuditFailed, match=message):
        pool.audit(claims)


def test_the_audit_sees_a_block_twice_on_the_free_list():
    pool = BlockPool(4, 8)
    pool._free.append(1)
    with pytest.raises(AuditFailed, match="4 blocks on the free list, 3 marked free"):
        pool.audit({})
