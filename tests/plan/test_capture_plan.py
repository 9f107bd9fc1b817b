import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import CaptureTooSmall, ConfigError
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape
from jaxserve.plan.capture import (
    plan_capture,
    pool_sharing_ratio,
    private_pool_bytes,
    shared_pool_bytes,
    streamed_score_cells,
    width_from_limit,
)
from jaxserve.plan.units import MIB

HEADS = 32
DEFAULT = DecodeBuckets(8, 2048)
STREAMED = DecodeBuckets(256, 8192, streamed=True, tile=32)

rectangles = st.builds(DecodeBuckets, st.integers(1, 64), st.integers(1, 3000))


@st.composite
def cases(draw):
    """A rectangle bucket set and bounds that leave it a list, so no plan here may be refused."""
    buckets = draw(rectangles)
    max_rows = draw(st.none() | st.integers(1, 80))
    rows = [r for r in buckets.rows if max_rows is None or r <= max_rows]
    narrowest, context = buckets.widths[0], buckets.max_model_len
    column = rows[-1] * 4 * 4  # float32 scores of 4 heads
    reserved = draw(st.integers(0, MIB))
    tokens = draw(st.none() | st.integers(narrowest, context + 200))
    return buckets, {
        "limit": draw(st.integers(len(rows), len(rows) * (len(buckets.widths) + 2))),
        "free_bytes": None if tokens is None else reserved + tokens * column,
        "reserved_bytes": reserved,
        "max_rows": max_rows,
        "max_width": draw(st.none() | st.integers(narrowest, context + 200)),
    }


def plan_of(buckets, bound):
    return plan_capture(buckets, num_heads=4, **bound)


@given(cases())
def test_a_plan_keeps_every_bound_and_the_bottom_of_both_axes(case):
    buckets, bound = case
    plan = plan_of(buckets, bound)
    assert plan.max_width in buckets.widths
    assert plan.max_rows in buckets.rows
    assert 1 <= plan.count <= bound["limit"]
    assert plan.count + plan.trimmed == plan.full_count == len(buckets.shapes)
    assert plan.shapes == tuple(
        s for s in buckets.shapes if s.rows <= plan.max_rows and s.width <= plan.max_width
    )
    assert plan.widest == plan.shapes[-1]
    if bound["max_width"] is not None:
        assert plan.max_width <= bound["max_width"]
    if bound["max_rows"] is not None:
        assert plan.max_rows <= bound["max_rows"]
    if bound["free_bytes"] is not None:
        assert plan.pool_bytes <= plan.budget_bytes == bound["free_bytes"] - bound["reserved_bytes"]


@given(cases())
def test_a_plan_stops_at_the_bound_it_names_and_not_before_it(case):
    buckets, bound = case
    plan = plan_of(buckets, bound)
    if plan.width_bound_by == "context":
        assert plan.max_width == buckets.max_model_len
        return
    wider = next(w for w in buckets.widths if w > plan.max_width)
    rows = [r for r in buckets.rows if r <= plan.max_rows]
    one_more_width_breaks = {
        "flag": bound["max_width"] is not None and wider > bound["max_width"],
        "budget": plan.budget_bytes is not None and rows[-1] * 4 * wider * 4 > plan.budget_bytes,
        "limit": len(rows) * sum(w <= wider for w in buckets.widths) > bound["limit"],
    }
    assert one_more_width_breaks[plan.width_bound_by]


@given(cases(), st.integers(0, 40 * MIB))
def test_more_budget_never_narrows(case, more):
    buckets, bound = case
    free = bound["free_bytes"]
    richer = bound | {"free_bytes": None if free is None else free + more}
    assert plan_of(buckets, richer).max_width >= plan_of(buckets, bound).max_width


@given(cases(), st.integers(0, 200))
def test_a_higher_limit_never_narrows(case, more):
    buckets, bound = case
    longer = bound | {"limit": bound["limit"] + more}
    assert plan_of(buckets, longer).max_width >= plan_of(buckets, bound).max_width


@given(rectangles, st.sampled_from([None, 16, 32]))
def test_one_arena_is_the_largest_member_and_private_ones_are_the_sum(buckets, tile):
    keys = {s: s.width if tile is None else min(tile, s.width) for s in buckets.shapes}
    held = [s.rows * HEADS * keys[s] * 4 for s in buckets.shapes]
    assert shared_pool_bytes(buckets.shapes, HEADS, tile) == max(held)
    assert private_pool_bytes(buckets.shapes, HEADS, tile) == sum(held)
    assert 1.0 <= pool_sharing_ratio(buckets.shapes, HEADS, tile) <= len(held)


def test_the_default_deployment_sits_exactly_on_the_limit():
    plan = plan_capture(DEFAULT, num_heads=HEADS)
    assert (plan.count, plan.limit, plan.trimmed) == (64, 64, 0)
    assert plan.width_bound_by == "context"


def test_16_slots_keep_60_of_80_and_name_the_limit():
    plan = plan_capture(DecodeBuckets(16, 2048), num_heads=HEADS)
    assert (plan.count, plan.full_count, plan.trimmed) == (60, 80, 20)
    assert (plan.max_rows, plan.max_width, plan.width_bound_by) == (16, 1536, "limit")


@pytest.mark.parametrize(
    ("bound", "width", "bound_by"),
    [
        ({}, 2048, "context"),
        ({"max_width": 2048}, 2048, "context"),  # a flag equal to the context did not bind
        ({"max_width": 9999}, 2048, "context"),
        ({"max_width": 300}, 256, "flag"),  # snapped to a bucket before it is reported
        ({"free_bytes": 8 * HEADS * 4 * 300}, 256, "budget"),
        ({"free_bytes": 8 * HEADS * 4 * 300, "max_width": 300}, 256, "flag"),  # a tie: the first
        ({"free_bytes": 8 * HEADS * 4 * 255, "max_width": 300}, 128, "budget"),
        ({"limit": 63}, 1920, "limit"),
        ({"limit": 8, "max_width": 384}, 256, "limit"),
        ({"limit": 12, "max_width": 384}, 384, "flag"),
    ],
)
def test_the_lowest_ceiling_bounds_the_width_and_is_named(bound, width, bound_by):
    plan = plan_capture(DEFAULT, num_heads=HEADS, **bound)
    assert (plan.max_width, plan.width_bound_by) == (width, bound_by)


def test_bytes_promised_to_the_pool_are_no_budget():
    free = 8 * HEADS * 4 * 1024
    assert plan_capture(DEFAULT, num_heads=HEADS, free_bytes=free).max_width == 1024
    plan = plan_capture(DEFAULT, num_heads=HEADS, free_bytes=free, reserved_bytes=free // 2)
    assert (plan.max_width, plan.budget_bytes) == (512, free // 2)


def test_a_row_flag_is_snapped_to_a_bucket_and_frees_width():
    plan = plan_capture(DecodeBuckets(16, 2048), num_heads=HEADS, max_rows=15)
    assert (plan.max_rows, plan.max_width, plan.count) == (8, 2048, 64)


def test_a_limit_as_a_width_is_the_limit_over_the_row_count():
    assert width_from_limit(64, (1, 2, 4, 8, 16), range(128, 2049, 128)) == 128 * (64 // 5)


def test_a_streamed_list_is_the_row_axis_and_the_read_bounds_it():
    plan = plan_capture(STREAMED, num_heads=HEADS)
    assert plan.count == plan.full_count == 9
    assert (plan.max_width, plan.width_bound_by) == (8192, "read")
    assert plan.pool_bytes == MIB
    assert plan.as_dict()["read_block"] == 32


def test_a_tile_is_held_once_and_never_beyond_the_context():
    assert streamed_score_cells(32, 8192) == 32
    assert streamed_score_cells(32, 4) == 4


def test_the_published_decision_has_its_ten_keys():
    assert plan_capture(DEFAULT, num_heads=HEADS, free_bytes=MIB).as_dict() == {
        "count": 32,
        "full_count": 64,
        "trimmed": 32,
        "max_rows": 8,
        "max_width": 1024,
        "width_bound_by": "budget",
        "limit": 64,
        "budget_bytes": MIB,
        "pool_bytes": MIB,
        "read_block": None,
    }


def refusal(error, buckets, **bound):
    with pytest.raises(error) as caught:
        plan_capture(buckets, num_heads=HEADS, **bound)
    return str(caught.value)


def test_a_width_flag_under_every_bucket_is_refused_with_one_that_works():
    assert "--warm-width 100" in refusal(CaptureTooSmall, DEFAULT, max_width=100)
    assert plan_capture(DEFAULT, num_heads=HEADS, max_width=128).max_width == 128


def test_a_budget_under_every_bucket_is_refused_with_both_numbers():
    need = 8 * HEADS * 4 * 128
    text = refusal(CaptureTooSmall, DEFAULT, free_bytes=need - 1)
    assert "width of 127" in text
    assert "128.00 KiB" in text
    assert "--warm-rows" in text
    assert plan_capture(DEFAULT, num_heads=HEADS, free_bytes=need).max_width == 128


def test_a_budget_already_promised_away_is_refused():
    text = refusal(CaptureTooSmall, DEFAULT, free_bytes=MIB, reserved_bytes=2 * MIB)
    assert "0 B left" in text


def test_a_limit_under_the_row_count_is_refused_with_the_rows_that_fit():
    text = refusal(CaptureTooSmall, DEFAULT, limit=3)
    assert "limit=3" in text
    assert "raise the limit to 4 or set --warm-rows 4" in text
    assert plan_capture(DEFAULT, num_heads=HEADS, limit=3, max_rows=4).count == 3


def test_no_limit_at_all_names_no_rows():
    assert "--warm-rows" not in refusal(CaptureTooSmall, DEFAULT, limit=0)


def test_a_streamed_limit_under_the_row_count_has_one_knob():
    text = refusal(CaptureTooSmall, STREAMED, limit=8)
    assert "max_rows is the only knob" in text
    assert "--warm-rows 128" in text
    assert plan_capture(STREAMED, num_heads=HEADS, limit=8, max_rows=128).count == 8


def test_a_streamed_budget_is_a_yes_or_no_about_one_tile():
    text = refusal(CaptureTooSmall, STREAMED, free_bytes=MIB - 1)
    assert "does not hold one 32-key tile at 256 rows, 1.00 MiB" in text
    assert "no width would help" in text
    plan = plan_capture(STREAMED, num_heads=HEADS, free_bytes=MIB)
    assert (plan.count, plan.max_width, plan.width_bound_by) == (9, 8192, "read")


def test_a_width_flag_on_the_streamed_arm_is_refused_by_name():
    assert "--warm-width 1024" in refusal(ConfigError, STREAMED, max_width=1024)


def test_a_row_flag_of_zero_is_refused_by_name():
    assert "--warm-rows 0" in refusal(ConfigError, DEFAULT, max_rows=0)


def test_the_line_of_a_trimmed_list_names_who_bound_it():
    line = plan_capture(DecodeBuckets(16, 2048), num_heads=HEADS).describe()
    assert "60 of 80 shapes" in line
    assert "16 rows x 1536 tokens (width bound by limit)" in line
    assert "3.00 MiB" in line


def test_widest_is_the_shape_that_sizes_the_arena():
    plan = plan_capture(DEFAULT, num_heads=HEADS)
    assert plan.widest == DecodeShape(8, 2048)
    assert plan.pool_bytes == shared_pool_bytes([plan.widest], HEADS)
