"""Which blocks requests share: what is found, for whom, for how long, and what is counted."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import SamplingParams
from jaxserve.errors import AuditFailed
from jaxserve.sched import prefix
from jaxserve.sched.blocks import BlockPool
from jaxserve.sched.request import Request, RequestState
from tests.fakes import make_request
from tests.sched_loop import Loop, Z, chunks_of


def caching(num_blocks: int = 100, **changes: Any) -> Loop:
    return Loop(num_blocks, **{"enable_prefix_caching": True} | changes)


def tokens(count: int, first: int = 0) -> list[int]:
    """Tokens that tell positions apart."""
    return list(range(first, first + count))


def counts(loop: Loop) -> tuple[int, int]:
    """Tokens looked up, tokens found."""
    cache = loop.scheduler.prefix_cache
    return cache.num_queries, cache.num_hits


def start_of(loop: Loop, request: Request) -> int:
    """Step until ``request`` has its first chunk; the token it begins at."""
    for _ in range(200):
        schedule = loop.step()
        for chunk in schedule.chunks if schedule else ():
            if chunk.request is request:
                return chunk.start
    raise AssertionError(f"{request.request_id} was not scheduled in 200 steps")


def test_a_prompt_seen_before_is_computed_from_the_end_of_its_cached_blocks():
    loop = caching()
    first = loop.add(tokens(20), 1)
    loop.run()
    second = loop.add(tokens(20), 5)
    assert chunks_of(loop.step()) == [("r1", 16, 20)]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    assert counts(loop) == (40, 16)


def test_requests_of_one_iteration_share_the_blocks_that_this_iteration_fills():
    loop = caching()
    first, second = loop.add(tokens(20)), loop.add([*tokens(20), 99])
    assert chunks_of(loop.step()) == [("r0", 0, 20), ("r1", 16, 21)]
    assert first.block_ids[:2] == second.block_ids[:2]
    assert first.block_ids[2] != second.block_ids[2]
    # Two shared, one each: counted once.
    assert loop.scheduler.pool.num_free == loop.scheduler.pool.num_usable - 4


def test_blocks_of_a_prompt_that_is_cut_are_found_as_far_as_they_are_computed():
    loop = caching(max_num_batched_tokens=20)
    loop.add(tokens(60))
    twin = loop.add(tokens(60))
    starts = [chunks_of(loop.step()) for _ in range(4)]
    assert starts == [[("r0", 0, 20)], [("r0", 20, 40)], [("r0", 40, 60)], [("r1", 56, 60)]]
    assert twin.num_cached_tokens == 56


def test_a_prompt_found_to_its_end_computes_its_last_block_again_into_a_block_of_its_own():
    loop = caching()
    first = loop.add(tokens(2 * Z))
    loop.step()
    second = loop.add(tokens(2 * Z))
    assert chunks_of(loop.step()) == [("r1", Z, 2 * Z)]
    assert first.block_ids[0] == second.block_ids[0]
    assert first.block_ids[1] != second.block_ids[1]
    loop.scheduler.finish(first, "abort")
    loop.audit()
    third = loop.add(tokens(2 * Z + 1))
    loop.step()
    # The copy is not found: the first of its kind is, although nobody uses it now.
    assert third.num_cached_tokens == 2 * Z
    assert third.block_ids[1] not in second.block_ids


def test_the_next_turn_of_a_conversation_finds_the_answer_before_it():
    loop = caching()
    turn = loop.add(tokens(10), 30)
    loop.run()
    said = turn.prompt_token_ids + turn.output_token_ids
    # 39 of the 40 tokens were fed; the last block that they fill ends at 32.
    assert start_of(loop, loop.add([*said, 50, 51])) == 32


def test_a_block_that_the_token_which_ends_an_answer_fills_is_found_too():
    loop = caching()
    turn = loop.add(tokens(2 * Z - 1, 50), stop_token_ids=frozenset({7}))
    loop.run(RequestState.FINISHED_STOPPED, turn)
    said = turn.prompt_token_ids + turn.output_token_ids
    assert len(said) == 2 * Z
    assert start_of(loop, loop.add([*said, 1])) == 2 * Z


def test_an_answer_that_is_still_going_on_is_found_block_by_block():
    loop = caching()
    long = loop.add(tokens(4), 60)
    loop.run(RequestState.DECODING, long)
    while long.num_computed < 3 * Z + 2:
        loop.step()
    known = long.prompt_token_ids + long.output_token_ids
    assert start_of(loop, loop.add([*known, 1])) == 3 * Z


@pytest.mark.parametrize(
    ("salts", "start"), [(("", ""), 16), (("a", "a"), 16), (("a", "b"), 0), (("", "a"), 0)]
)
def test_requests_share_blocks_only_under_one_salt(salts, start):
    loop = caching()
    loop.add(tokens(20), cache_salt=salts[0])
    loop.step()
    assert start_of(loop, loop.add(tokens(20), cache_salt=salts[1])) == start


LABELS = st.tuples(st.integers(0, 3), st.text(max_size=3), st.none() | st.text(max_size=3))


@given(LABELS, LABELS)
def test_roots_are_equal_only_where_weights_salt_and_group_are(one, other):
    cache = prefix.PrefixCache(BlockPool(4, Z), enabled=False)

    def root(version: int, salt: str, group: str | None) -> bytes:
        cache.weight_version = version
        return cache._root(make_request(cache_salt=salt, group=group))

    assert (root(*one) == root(*other)) == (one == other)


def test_a_salt_that_is_no_text_utf8_knows_is_a_salt_like_any_other():
    loop = caching()
    loop.add(tokens(20), cache_salt="\ud800")
    loop.step()
    assert start_of(loop, loop.add(tokens(20), cache_salt="\ud800")) == 16
    assert start_of(loop, loop.add(tokens(20), cache_salt="\ud801")) == 0


@given(*[st.lists(st.sampled_from([0, 1, 256]), max_size=40)] * 2)
def test_chains_agree_exactly_as_far_as_whole_blocks_of_tokens_do(one, other):
    loop = caching(num_blocks=200, max_num_batched_tokens=200)
    first, second = (loop.add([7, *prompt]).chain for prompt in (one, other))
    loop.step()
    agree = takewhile(lambda pair: pair[0] == pair[1], zip([7, *one], [7, *other], strict=False))
    whole = len(list(agree)) // Z
    same = [a == b for a, b in zip(first, second, strict=False)]  # the roots, then the blocks
    assert same == [True] * (1 + whole) + [False] * (len(same) - 1 - whole)


def test_a_process_hashes_under_a_secret_of_its_own():
    chains = []
    for _ in range(2):
        loop = caching()
        request = loop.add(tokens(2 * Z))
        loop.step()
        chains.append(set(request.chain))
    assert len(chains[0]) == len(chains[1]) == 3
    assert not chains[0] & chains[1]


def test_a_request_that_reports_its_prompts_log_probabilities_computes_all_and_gives_all():
    loop = caching()
    loop.add(tokens(20))
    loop.step()
    params = SamplingParams(prompt_logprobs=1)
    scored = loop.add(tokens(30), params=params)
    assert start_of(loop, scored) == 0
    assert counts(loop) == (20, 0)
    assert start_of(loop, loop.add(tokens(30))) == 24


@pytest.mark.parametrize("prompt_logprobs", [None, 2])  # reported with the first token
def test_a_preempted_request_finds_its_own_blocks_and_that_is_no_hit_to_anyone(prompt_logprobs):
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    loop = caching(num_blocks=1 + 6, max_num_batched_tokens=72)
    loop.add(tokens(2 * Z - 2), 20, params=params)
    victim = loop.add(tokens(2 * Z - 2, 50), 20, params=params)
    loop.run(RequestState.PREEMPTED, victim)
    looked_up = counts(loop)
    assert looked_up == (0 if prompt_logprobs else 2 * (2 * Z - 2), 0)
    # The older one takes two blocks more, the victim's last two of three.
    assert start_of(loop, victim) == Z
    assert counts(loop) == looked_up
    assert victim.num_cached_tokens == 0
    loop.run()
    assert [r.finish_reason for r in loop.requests] == ["length", "length"]


def test_without_caching_a_request_of_no_group_is_never_hashed(monkeypatch):
    def refuse(content: bytes) -> bytes:
        raise AssertionError("hashed")

    monkeypatch.setattr(prefix, "_digest", refuse)
    loop = Loop(num_blocks=1 + 9)
    requests = [loop.add(20, 30) for _ in range(3)]
    loop.run()
    assert [r.finish_reason for r in requests] == ["length"] * 3
    assert loop.scheduler.num_preemptions > 0
    assert [r.chain for r in requests] == [[]] * 3
    assert counts(loop) == (0, 0)
    loop.add(20, group="g")
    with pytest.raises(AssertionError, match="hashed"):
        loop.step()


def test_without_caching_a_group_shares_its_prompt_while_one_of_it_runs_and_no_longer():
    loop = Loop()
    first, second = loop.add(tokens(20), group="g"), loop.add(tokens(20), group="g")
    loop.add(tokens(20), group="other")
    loop.add(tokens(20))
    assert chunks_of(loop.step()) == [("r0", 0, 20), ("r1", 16, 20), ("r2", 0, 8)]
    assert first.block_ids[:2] == second.block_ids[:2]
    loop.scheduler.finish(first, "abort")
    assert start_of(loop, loop.add(tokens(20), group="g")) == 16
    loop.run()
    assert loop.scheduler.pool.num_free == loop.scheduler.pool.num_usable
    assert start_of(loop, loop.add(tokens(20), group="g")) == 0


def test_with_caching_a_group_finds_what_others_computed():
    loop = caching()
    loop.add(tokens(20))
    loop.step()
    assert start_of(loop, loop.add(tokens(20), group="g")) == 16


def test_what_was_used_last_is_evicted_last():
    loop = caching(num_blocks=1 + 8)
    for prompt in (tokens(2 * Z, 100), tokens(2 * Z, 200), [*tokens(2 * Z, 100), 0]):
        loop.add(prompt, 1)
        loop.run()
    loop.add(tokens(6 * Z, 300), 1)  # takes the empty blocks and two more
    loop.run()
    assert start_of(loop, loop.add(tokens(2 * Z + 1, 100), 1)) == 2 * Z
    assert start_of(loop, loop.add(tokens(2 * Z + 1, 200), 1)) == 0


def test_a_prompt_loses_its_end_first():
    loop = caching(num_blocks=1 + 8)
    loop.add(tokens(6 * Z, 100), 1)
    loop.run()
    loop.add(tokens(4 * Z, 200), 1)  # two blocks are empty, two of the six have to go
    loop.run()
    assert start_of(loop, loop.add(tokens(6 * Z, 100), 1)) == 4 * Z


def test_blocks_that_are_shared_are_needed_once_when_a_request_is_admitted():
    loop = caching(num_blocks=1 + 6, max_num_batched_tokens=64)
    loop.add(tokens(4 * Z + 1), 5)
    loop.step()
    loop.add(tokens(4 * Z + 1), 5)  # alone it would need 5 of 6 blocks
    assert chunks_of(loop.step()) == [("r1", 4 * Z, 4 * Z + 1)]
    assert loop.scheduler.pool.num_free == 0


def test_a_cached_block_about_to_be_shared_is_not_free_for_the_rest_of_its_prompt():
    loop = caching(num_blocks=1 + 6, max_num_batched_tokens=64)
    loop.add(tokens(3 * Z), 1)
    loop.run()
    other = loop.add(tokens(2 * Z, 50), 4)
    loop.step()
    late = loop.add([*tokens(3 * Z), *tokens(2 * Z, 80)], 1)  # 3 cached and 2 new, 4 are free
    loop.step()
    assert late.state is RequestState.WAITING
    loop.run(RequestState.FINISHED_LENGTH, late)
    assert (other.finish_reason, late.num_cached_tokens) == ("length", 3 * Z)


@pytest.mark.parametrize("weight_version", [None, 1])
def test_after_a_reset_nothing_computed_before_it_is_shared(weight_version):
    loop = caching()
    done = loop.add(tokens(20), 1)
    running = loop.add(tokens(20), 60)
    loop.step()
    held = list(running.block_ids)
    loop.scheduler.reset_prefix_cache(weight_version)
    loop.audit()
    assert running.block_ids == held
    assert loop.scheduler.prefix_cache.weight_version == (weight_version or 0)
    for _ in range(20):  # fills blocks that build on the old ones
        loop.step()
    known = running.prompt_token_ids + running.output_token_ids
    assert start_of(loop, loop.add(known)) == 0
    assert start_of(loop, loop.add(known)) == (len(known) - 1) // Z * Z
    assert done.finish_reason == "length"


def test_a_request_that_is_preempted_after_a_reset_shares_again():
    loop = caching(num_blocks=1 + 5, max_num_batched_tokens=72)
    loop.add(tokens(2 * Z - 2), 20)
    victim = loop.add(tokens(2 * Z - 2, 50), 20)
    loop.step()
    loop.scheduler.reset_prefix_cache(1)
    loop.run(RequestState.PREEMPTED, victim)
    assert start_of(loop, victim) == 0
    assert start_of(loop, loop.add(tokens(2 * Z - 2, 50), 1)) == Z


def test_blocks_of_other_weights_would_not_be_found_even_if_they_were_kept(monkeypatch):
    monkeypatch.setattr(BlockPool, "forget", lambda pool: None)
    loop = caching()
    loop.add(tokens(20), 1)
    loop.run()
    assert start_of(loop, loop.add(tokens(20), 1)) == 16
    loop.run()
    loop.scheduler.reset_prefix_cache(1)
    assert start_of(loop, loop.add(tokens(20), 1)) == 0


def test_the_audit_finds_a_chain_that_is_not_of_its_tokens():
    loop = caching()
    request = loop.add(tokens(20))
    loop.step()
    request.prompt_token_ids[3] = 77
    with pytest.raises(AuditFailed, match="request r0: its chain is not that of its tokens"):
        loop.audit()


def test_the_audit_finds_a_chain_of_another_salt():
    loop = caching()
    request = loop.add(tokens(20))
    loop.step()
    request.cache_salt = "other"
    with pytest.raises(AuditFailed, match="request r0: its chain is not that of its tokens"):
        loop.audit()


def test_the_audit_finds_a_block_that_holds_other_tokens_than_it_is_registered_under():
    loop = caching()
    first, _ = loop.add(tokens(20)), loop.add(tokens(20, 50))
    loop.step()
    first.block_ids[:2] = reversed(first.block_ids[:2])
    message = f"request r0: its block 0, {first.block_ids[0]} of the pool, is registered under"
    with pytest.raises(AuditFailed, match=re.escape(message)):
        loop.audit()


@st.composite
def family(draw: Any) -> list[tuple[list[int], int, str, int]]:
    """Prompts that begin alike or not, their output, salt and arrival."""
    stems = [draw(st.lists(st.integers(0, 1), min_size=1, max_size=40)) for _ in range(3)]
    members = []
    for _ in range(draw(st.integers(2, 12))):
        stem = draw(st.sampled_from(stems))
        tail = draw(st.lists(st.integers(0, 1), max_size=12))
        cut = stem[: draw(st.integers(1, len(stem)))]
        salt = draw(st.sampled_from(["", "", "s"]))
        members.append((cut + tail, draw(st.integers(1, 30)), salt, draw(st.integers(0, 40))))
    return members


@given(family(), st.integers(12, 30), st.floats(0, 0.99), st.booleans(), st.sampled_from([8, 32]))
def test_any_traffic_ends_balanced_with_every_request_done(
    members, num_blocks, watermark, enabled, budget
):
    loop = Loop(
        num_blocks,
        watermark=watermark,
        enable_prefix_caching=enabled,
        max_num_batched_tokens=budget,
    )
    for now in range(41):
        for prompt, output, salt, arrival in members:
            if arrival == now:
                loop.add(prompt, output, cache_salt=salt, group=None if enabled else salt)
        loop.step()
    loop.run()
    assert [r.finish_reason for r in loop.requests] == ["length"] * len(members)
    assert loop.scheduler.pool.num_free == loop.scheduler.pool.num_usable
    queries, hits = counts(loop)
    assert queries == sum(len(prompt) for prompt, *_ in members)
    assert hits == sum(r.num_cached_tokens for r in loop.requests) < queries
