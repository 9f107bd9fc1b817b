"""Each kind of broken book is found, and the request is named."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import AuditFailed
from jaxserve.sched.audit import audit_scheduler
from jaxserve.sched.request import RequestState
from jaxserve.sched.scheduler import Scheduler
from tests.fakes import make_request


def healthy():
    """r0 and r1 decode, r2 prefills, r3 drains, r4 waits; returns the audit's arguments."""
    config = EngineConfig(max_num_seqs=5, max_num_batched_tokens=20, block_size=8, watermark=0.0)
    scheduler = Scheduler(config, 30)
    for arrival, (prompt, output) in enumerate([(4, 5), (4, 5), (3, 1), (40, 5), (4, 5)]):
        scheduler.add(make_request(arrival, [1] * prompt, max_output_tokens=output))
    schedule = scheduler.schedule(0.0)
    assert schedule is not None
    in_flight = Counter(c.request.request_id for c in schedule.chunks if c.samples)
    return scheduler, [f"r{i}" for i in range(5)], in_flight


def find(scheduler: Scheduler, request_id: str):
    request = scheduler.find(request_id)
    assert request is not None
    return request


def forget(scheduler, live, in_flight):
    del scheduler.waiting["r4"]


def keep_a_finished_one(scheduler, live, in_flight):
    live.remove("r4")


def list_twice(scheduler, live, in_flight):
    scheduler.waiting["r2"] = scheduler.draining["r2"]


def misplace(scheduler, live, in_flight):
    scheduler.waiting["r2"] = scheduler.draining.pop("r2")


def wrong_state(scheduler, live, in_flight):
    find(scheduler, "r0").state = RequestState.PREEMPTED


def share_a_block(scheduler, live, in_flight):
    find(scheduler, "r1").block_ids = find(scheduler, "r0").block_ids


def lose_a_block(scheduler, live, in_flight):
    find(scheduler, "r3").block_ids.pop()


def free_too_early(scheduler, live, in_flight):
    scheduler.pool.free(find(scheduler, "r3").block_ids)


def leak(scheduler, live, in_flight):
    scheduler.pool.allocate(1)


def hold_while_waiting(scheduler, live, in_flight):
    find(scheduler, "r4").block_ids = scheduler.pool.allocate(1)


def sit_while_draining(scheduler, live, in_flight):
    find(scheduler, "r2").row = 1


def lose_the_row(scheduler, live, in_flight):
    find(scheduler, "r1").row = None


def swap_rows(scheduler, live, in_flight):
    first, second = find(scheduler, "r0"), find(scheduler, "r1")
    first.row, second.row = second.row, first.row


def seat_a_prefilling_one(scheduler, live, in_flight):
    scheduler.rows.append(find(scheduler, "r3"))


def lose_a_flight(scheduler, live, in_flight):
    in_flight["r0"] = 0


def miscount_tokens(scheduler, live, in_flight):
    find(scheduler, "r1").num_computed += 1


def drain_with_tokens_left(scheduler, live, in_flight):
    find(scheduler, "r2").max_output_tokens += 1


def overtake(scheduler, live, in_flight):
    scheduler.running.move_to_end("r0")


def test_healthy_books_pass():
    scheduler, live, in_flight = healthy()
    audit_scheduler(scheduler, live, in_flight)
    states = [find(scheduler, f"r{i}").state.name for i in range(5)]
    assert states == ["DECODING", "DECODING", "DRAINING", "PREFILLING", "WAITING"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (forget, "requests ['r4'] are lost or should be gone"),
        (keep_a_finished_one, "requests ['r4'] are lost or should be gone"),
        (list_twice, "request r2 (DRAINING) is"),
        (misplace, "request r2 (DRAINING) is listed as waiting"),
        (wrong_state, "request r0 (PREEMPTED) is listed as running"),
        (share_a_block, "counts 1 references, but the requests that hold it are ['r0', 'r1']"),
        (lose_a_block, "request r3 (PREFILLING) holds 1 blocks, its tokens need 2"),
        (free_too_early, "request r3 owns block"),
        (leak, "belong to no request"),
        (hold_while_waiting, "request r4 (WAITING) holds blocks"),
        (sit_while_draining, "request r2 (DRAINING) sits in row 1"),
        (lose_the_row, "request r1 (DECODING) claims row None"),
        (swap_rows, "request r0 (DECODING) claims row 1"),
        (seat_a_prefilling_one, "request r3 (PREFILLING) sits in a row but is not decoding"),
        (lose_a_flight, "request r0 (DECODING) counts 1 tokens in flight, the steps 0"),
        (miscount_tokens, "request r1 (DECODING) has 5 tokens computed, 4 known and 1 in flight"),
        (drain_with_tokens_left, "request r2 (DRAINING) has 1 tokens left to generate"),
        (overtake, "out of their order of arrival: [1, 3, 0, 4]"),
    ],
)
def test_damaged_books_are_found_and_the_request_is_named(damage, message):
    scheduler, live, in_flight = healthy()
    damage(scheduler, live, in_flight)
    with pytest.raises(AuditFailed, match=re.escape(message)):
        audit_scheduler(scheduler, live, in_flight)
