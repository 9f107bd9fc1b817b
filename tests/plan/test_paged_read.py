"""The counters of the paged read, and what their quotient is worth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.plan.buckets import DecodeShape
from jaxserve.plan.gates import DecodeRead
from jaxserve.plan.report import PagedRead

counts = st.integers(1, 10_000)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), counts), min_size=1, max_size=6))
def test_under_a_streamed_list_the_saving_is_the_width_over_the_tile_however_long_it_ran(steps):
    read = PagedRead.of(DecodeRead(tile=128), {DecodeShape(rows, 2048): n for rows, n in steps})
    assert read.saving == 2048 / 128


def test_a_growing_rectangle_is_weighed_by_its_steps():
    replays = {DecodeShape(2, 256): 3, DecodeShape(1, 512): 1}
    read = PagedRead.of(DecodeRead(tile=128), replays)
    assert (read.calls, read.score_cells, read.held_cells) == (
        4,
        3 * 2 * 256 + 512,
        3 * 2 * 128 + 128,
    )
    assert read.saving == pytest.approx(2048 / 896)


def test_a_tile_wider_than_the_context_holds_no_more_than_the_context():
    assert PagedRead.of(DecodeRead(tile=128), {DecodeShape(4, 64): 1}).saving == 1.0


def test_the_rectangle_saves_nothing():
    read = PagedRead.of(DecodeRead(tile=None), {DecodeShape(8, 1024): 5})
    assert read.saving == 1.0
    assert read.as_dict()["note"] == "each call holds what it is charged"


def test_nothing_was_saved_before_the_first_call():
    assert PagedRead.of(DecodeRead(tile=128), {}).saving == 1.0


def test_the_streamed_saving_is_published_with_its_warning():
    said = PagedRead.of(DecodeRead(tile=128), {DecodeShape(1, 2048): 1}).as_dict()
    assert said["saving"] == 16
    assert "one width" in said["note"]
