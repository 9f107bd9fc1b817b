"""A request's states, seeds, tokens and times."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import IllegalTransition
from jaxserve.sched.request import RequestState, seed_key
from tests.fakes import make_request

LEGAL = """
WAITING    -> PREFILLING FINISHED_ABORTED
PREFILLING -> DECODING DRAINING PREEMPTED FINISHED_ABORTED
DECODING   -> DRAINING PREEMPTED FINISHED_STOPPED FINISHED_ABORTED FINISHED_ERROR
DRAINING   -> FINISHED_STOPPED FINISHED_LENGTH FINISHED_ABORTED FINISHED_ERROR
PREEMPTED  -> PREFILLING FINISHED_STOPPED FINISHED_ABORTED FINISHED_ERROR
"""
EDGES = {
    (line.split("->")[0].strip(), target)
    for line in LEGAL.strip().splitlines()
    for target in line.split("->")[1].split()
}


@pytest.mark.parametrize(("start", "end"), list(itertools.product(RequestState, repeat=2)))
def test_a_request_moves_along_the_edges_of_the_table_and_no_others(start, end):
    request = make_request(7)
    request.state = start
    if (start.name, end.name) in EDGES:
        request.move_to(end)
        assert request.state is end
    else:
        with pytest.raises(IllegalTransition, match=f"r7: {start.name} -> {end.name}"):
            request.move_to(end)
        assert request.state is start


def test_a_seed_is_split_into_its_two_halves_high_first():
    assert seed_key(0, 99, 99) == (0, 0)
    assert seed_key(7, 99, 99) == (0, 7)
    assert seed_key(2**32 + 5, 99, 99) == (1, 5)
    assert seed_key(-1, 99, 99) == (2**32 - 1, 2**32 - 1)
    assert seed_key(-(2**63), 99, 99) == (2**31, 0)


def test_without_a_seed_the_key_depends_on_the_engine_seed_and_the_arrival_alone():
    keys = [seed_key(None, seed, arrival) for seed in (0, 1, -1) for arrival in range(50)]
    assert keys == [seed_key(None, seed, arrival) for seed in (0, 1, -1) for arrival in range(50)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= half < 2**32 for key in keys for half in key)


@given(st.data(), st.integers(1, 6), st.integers(0, 6))
def test_known_tokens_are_the_prompt_then_the_output(data, num_prompt, num_output):
    request = make_request(7, range(num_prompt))
    request.output_token_ids = list(range(100, 100 + num_output))
    everything = [*range(num_prompt), *range(100, 100 + num_output)]
    start = data.draw(st.integers(0, len(everything)))
    end = data.draw(st.integers(start, len(everything)))
    assert list(request.tokens_between(start, end)) == everything[start:end]


def test_a_stop_token_ends_a_request_and_is_named_before_length():
    request = make_request(7, max_output_tokens=2, stop_token_ids=frozenset({9}))
    request.num_in_flight = 2
    assert request.commit(4, 0.0) is None
    assert request.commit(9, 0.0) == "stop"
    assert request.output_token_ids == [4, 9]
    other = make_request(7, max_output_tokens=1)
    other.num_in_flight = 1
    assert other.commit(4, 0.0) == "length"
    assert other.num_in_flight == 0


def test_times_split_at_first_scheduled_and_first_token():
    request = make_request(7, arrived_at=10.0)
    request.first_scheduled_at = 12.0
    request.num_in_flight = 2
    request.commit(1, 15.0)
    request.commit(1, 21.0)
    times = request.timings(22.0)
    assert (times.queue_s, times.prefill_s, times.decode_s) == (2.0, 3.0, 6.0)


def test_a_phase_cut_short_ends_at_the_end_and_later_ones_are_zero():
    queued = make_request(7, arrived_at=10.0).timings(14.0)
    assert (queued.queue_s, queued.prefill_s, queued.decode_s) == (4.0, 0.0, 0.0)
    request = make_request(7, arrived_at=10.0)
    request.first_scheduled_at = 12.0
    cut = request.timings(14.0)
    assert (cut.queue_s, cut.prefill_s, cut.decode_s) == (2.0, 2.0, 0.0)
