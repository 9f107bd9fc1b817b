"""Admission, budget, blocks, preemption, watermark and ends, seen from the schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import ConfigError, EngineError, InvalidRequest
from jaxserve.sched.request import RequestState
from tests.sched_loop import Loop, Z, chunks_of


def test_requests_are_admitted_in_order_and_packed_until_the_budget_ends():
    loop = Loop(max_num_batched_tokens=32)
    for prompt in (10, 12, 20, 5):
        loop.add(prompt)
    assert chunks_of(loop.step()) == [("r0", 0, 10), ("r1", 0, 12), ("r2", 0, 10)]
    # Two rows decode now, one token each.
    assert chunks_of(loop.step()) == [("r2", 10, 20), ("r3", 0, 5)]


def test_decoding_rows_take_their_tokens_before_a_long_prompt_takes_the_rest():
    loop = Loop(max_num_batched_tokens=20)
    short = [loop.add(4), loop.add(4)]
    loop.step()
    loop.add(90)
    ends = []
    for _ in range(5):
        schedule = loop.step()
        assert schedule is not None
        assert schedule.decode == short
        assert schedule.num_tokens <= 20
        ends += [chunk.end for chunk in schedule.chunks]
    assert ends == [18, 36, 54, 72, 90]


def test_nothing_overtakes_the_head_of_the_queue():
    loop = Loop(num_blocks=1 + 6)
    loop.add(prompt=3 * Z, output=2 * Z)
    loop.step()
    head, small = loop.add(4 * Z, 1), loop.add(1, 1)
    for _ in range(2 * Z - 1):
        assert chunks_of(loop.step()) == []
    assert (head.state, small.state) == (RequestState.WAITING, RequestState.WAITING)
    assert chunks_of(loop.step()) == [("r1", 0, 32)]


def test_more_requests_than_rows_wait_for_a_row():
    loop = Loop(max_num_seqs=2)
    requests = [loop.add(1, 3) for _ in range(3)]
    loop.step()
    assert [r.state.name for r in requests] == ["DECODING", "DECODING", "WAITING"]
    loop.run()
    assert [r.finish_reason for r in requests] == ["length"] * 3


def test_a_finished_prompt_takes_the_row_after_those_that_decode():
    loop = Loop()
    first, second, third = loop.add(4, 2), loop.add(4, 50), loop.add(4, 50)
    schedule = loop.step()
    assert schedule is not None
    assert [chunk.row for chunk in schedule.chunks] == [0, 1, 2]
    loop.step()  # the last token of the first is dispatched, and its row is free
    assert first.row is None
    loop.add(4, 50)
    schedule = loop.step()
    assert schedule is not None
    assert schedule.permutation == [2, 1, -1, -1]
    assert schedule.decode == [third, second]
    assert [chunk.row for chunk in schedule.chunks] == [2]


def test_a_block_is_given_for_the_token_that_opens_it_and_not_before():
    loop = Loop()
    request = loop.add(Z, 2 * Z)
    loop.step()
    opened = []
    while request.state is RequestState.DECODING:
        opened.append(bool(loop.step().new_blocks))  # type: ignore[union-attr]
    # Decodes feed positions Z, Z + 1, ...: the block boundary comes at Z and at 2 Z.
    assert [i for i, new in enumerate(opened) if new] == [0, Z]


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_request_is_dispatched_exactly_as_often_as_its_length_needs(prompt, output):
    loop = Loop(max_num_batched_tokens=16)
    request = loop.add(prompt, output)
    prefilled = decoded = 0
    for _ in range(200):
        schedule = loop.step()
        if schedule is None:
            break
        prefilled += sum(chunk.end - chunk.start for chunk in schedule.chunks)
        decoded += len(schedule.decode)
    assert request.finish_reason == "length"
    # The first token comes with the prompt; the last is never fed.
    assert (prefilled, decoded) == (prompt, output - 1)


def test_the_youngest_is_preempted_first_and_waits_at_the_head():
    # 9 usable blocks: three requests of 3 blocks fill them, and the oldest needs a fourth.
    loop = Loop(num_blocks=1 + 9, max_num_batched_tokens=72)
    first, second, third = (loop.add(3 * Z, 30) for _ in range(3))
    fourth = loop.add(1, 1)
    loop.step()
    assert fourth.state is RequestState.WAITING
    schedule = loop.step()
    assert schedule is not None
    assert schedule.decode == [first, second]
    assert third.state is RequestState.PREEMPTED
    assert list(loop.scheduler.waiting.values()) == [third, fourth]
    assert loop.scheduler.num_preemptions == 1
    assert schedule.permutation == [0, 1, -1, -1]


def test_a_preempted_request_computes_prompt_and_output_again_and_keeps_its_output():
    loop = Loop(num_blocks=1 + 5, max_num_batched_tokens=72)
    first, second = loop.add(2 * Z - 2, 20), loop.add(2 * Z - 2, 20)
    # Decodes open the third block of both; one is left for two.
    loop.run(RequestState.PREEMPTED, second)
    before = list(second.output_token_ids)
    assert before
    schedule = None
    for _ in range(200):
        schedule = loop.step()
        if second.state is not RequestState.PREEMPTED:
            break
    assert schedule is not None
    assert first.state is not RequestState.DECODING
    assert chunks_of(schedule) == [("r1", 0, 2 * Z - 2 + len(before))]
    assert second.first_scheduled_at == 1.0
    loop.run()
    assert [len(r.output_token_ids) for r in (first, second)] == [20, 20]


@given(
    st.integers(6, 20),
    st.floats(0, 0.99),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=12),
    st.booleans(),
)
def test_a_watermark_delays_an_admission_and_never_excludes_one(
    num_blocks, watermark, sizes, caching
):
    loop = Loop(num_blocks=num_blocks, watermark=watermark, enable_prefix_caching=caching)
    requests = [loop.add(prompt, output) for prompt, output in sizes]
    share = watermark * (num_blocks - 1)
    for _ in range(2000):
        if not len(loop.scheduler):
            break
        preempted = loop.scheduler.num_preemptions
        before = set(loop.scheduler.running.values())
        schedule = loop.step()
        chunks = schedule.chunks if schedule else []
        admitted = [c.request for c in chunks if c.request not in before]
        held = {id(r) for r in loop.scheduler.running.values()}
        if admitted and held - {id(r) for r in admitted}:
            # They came on top of others, which hold something still.
            assert loop.scheduler.num_preemptions == preempted
            assert loop.scheduler.pool.num_free + 1 > share
    assert [r.finish_reason for r in requests] == ["length"] * len(requests)


def test_a_watermark_holds_a_request_back_while_another_runs():
    loop = Loop(num_blocks=1 + 10, watermark=0.5)
    loop.add(4 * Z, 3)
    loop.step()
    late = loop.add(2 * Z, 1)  # 6 free, 4 after it, 5 to keep
    loop.step()
    assert late.state is RequestState.WAITING
    loop.run()
    assert late.finish_reason == "length"


@given(
    st.integers(6, 12),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=12),
    st.booleans(),
)
def test_the_oldest_running_request_is_never_preempted_and_all_get_done(num_blocks, sizes, caching):
    loop = Loop(num_blocks=num_blocks, enable_prefix_caching=caching)
    requests = [loop.add(prompt, output) for prompt, output in sizes]
    for _ in range(2000):
        if not len(loop.scheduler):
            break
        oldest = next(iter(loop.scheduler.running.values()), None)
        loop.step()
        assert oldest is None or oldest.state is not RequestState.PREEMPTED
    assert [r.finish_reason for r in requests] == ["length"] * len(requests)


def test_a_preempted_request_is_not_starved_by_a_stream_of_newcomers():
    loop = Loop(num_blocks=1 + 6)
    loop.add(2 * Z, 20)
    victim = loop.add(2 * Z, 20)
    loop.run(RequestState.PREEMPTED, victim)
    for _ in range(60):
        loop.add(1, 4)
        loop.step()
    assert victim.finish_reason == "length"
    assert all(r.first_scheduled_at is None for r in loop.requests[-10:])


@pytest.mark.parametrize("state", ["WAITING", "PREFILLING", "DECODING", "DRAINING", "PREEMPTED"])
def test_an_abort_gives_everything_back_in_any_state(state):
    loop = Loop(num_blocks=1 + 8, max_num_seqs=2, max_num_batched_tokens=16)
    other = loop.add(2 * Z, 30)
    request = loop.add(4 * Z, 5 if state == "DRAINING" else 12)
    loop.run(RequestState[state], request)
    assert request.state is RequestState[state]
    loop.scheduler.finish(request, "abort")
    loop.audit()
    assert (request.block_ids, request.row) == ([], None)
    loop.run()
    assert (other.finish_reason, len(other.output_token_ids)) == ("length", 30)
    assert loop.scheduler.pool.num_free == 8
    assert len(request.output_token_ids) < request.max_output_tokens


def test_what_the_pool_can_never_hold_is_refused_with_both_numbers_and_the_knob():
    loop = Loop(num_blocks=1 + 3)
    loop.add(2 * Z, Z + 1)
    message = r"17 tokens with 9 to generate needs 4 KV blocks of 8 tokens, the pool has 3.*lower"
    with pytest.raises(InvalidRequest, match=message) as refusal:
        loop.add(2 * Z + 1, Z + 1)
    assert "--num-gpu-blocks-override" in str(refusal.value)
    loop.run()


def test_a_lone_request_that_finds_no_block_is_a_fault_that_names_it():
    loop = Loop(num_blocks=1 + 3)
    loop.add(Z, Z)
    loop.step()
    loop.scheduler.pool.allocate(2)  # a leak
    with pytest.raises(EngineError, match=r"r0 runs alone and finds no block: it holds 1, 0 of 3"):
        loop.scheduler.schedule(0.0)


def test_a_budget_that_could_not_decode_every_row_is_refused():
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 3 is below --max-num-seqs 4"):
        Loop(max_num_batched_tokens=3)
