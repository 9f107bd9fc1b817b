"""The row table against a device that applies its permutations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.rows import RowTable
from tests.fakes import make_request

ROWS = 6


@given(st.lists(st.tuples(st.lists(st.integers(0, ROWS - 1)), st.integers(0, ROWS)), max_size=10))
def test_the_table_and_a_device_that_follows_it_hold_the_same_requests_without_gaps(rounds):
    table = RowTable(ROWS)
    device: list[str | None] = [None] * ROWS
    arrivals = 0
    for leaving, joining in rounds:
        before = table.active()
        gone = {before[row].request_id: before[row] for row in leaving if row < len(before)}
        for request in gone.values():
            table.vacate(request)
            assert request.row is None
        sources = table.compact()
        if not gone:
            assert sources is None
        else:
            assert sources is not None
            assert len(sources) == ROWS
            kept = len(before) - len(gone)
            moves = sum(source != row for row, source in enumerate(sources[:kept]))
            assert moves == sum(r.request_id in gone for r in before[:kept])
            device = [None if source < 0 else device[source] for source in sources]
        for _ in range(min(joining, ROWS - table.num_active)):
            request = make_request(arrivals)
            arrivals += 1
            device[table.append(request)] = request.request_id
        active = table.active()
        assert table.num_active == len(active)
        assert [r.request_id for r in active] == device[: len(active)]
        assert device[len(active) :] == [None] * (ROWS - len(active))
        assert [r.row for r in active] == list(range(len(active)))
        assert [table.at(b) for b in range(ROWS)] == active + [None] * (ROWS - len(active))


def test_a_gap_is_closed_by_a_row_from_the_end():
    table = RowTable(5)
    requests = [make_request(i) for i in range(4)]
    for request in requests:
        table.append(request)
    table.vacate(requests[1])
    assert table.compact() == [0, 3, 2, -1, -1]
    assert table.compact() is None
