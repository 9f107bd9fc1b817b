import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import ConfigError
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape, PrefillBuckets

sizes = st.integers(1, 300)
lengths = st.integers(1, 5000)


@st.composite
def bucket_sets(draw):
    tile = draw(st.none() | st.sampled_from([16, 32, 48, 128]))
    return DecodeBuckets(
        max_num_seqs=draw(sizes),
        max_model_len=draw(lengths),
        width_multiple=draw(st.sampled_from([1, 16, 100, 128])),
        streamed=tile is not None,
        tile=tile,
    )


@st.composite
def steps(draw):
    buckets = draw(bucket_sets())
    rows = draw(st.integers(1, buckets.max_num_seqs))
    width = draw(st.integers(1, buckets.max_model_len))
    return buckets, rows, width


@given(steps())
def test_a_shape_covers_the_step_and_no_smaller_one_does(step):
    buckets, rows, width = step
    shape = buckets.shape_for(rows, width)
    covering = [s for s in buckets.shapes if s.rows >= rows and s.width >= width]
    assert shape == min(covering)
    assert shape.rows == min(s.rows for s in covering)
    assert shape.width == min(s.width for s in covering)


@given(bucket_sets())
def test_a_bucket_set_is_sorted_distinct_and_ends_at_what_is_served(buckets):
    assert list(buckets.shapes) == sorted(set(buckets.shapes))
    assert buckets.shapes[-1] == DecodeShape(buckets.max_num_seqs, buckets.max_model_len)
    assert buckets.count == len(buckets.shapes)


@given(bucket_sets())
def test_rows_less_than_double_from_bucket_to_bucket(buckets):
    assert buckets.rows[0] == 1
    for small, large in zip(buckets.rows, buckets.rows[1:], strict=False):
        assert small < large <= 2 * small


@given(steps())
def test_the_read_touches_at_least_what_was_asked(step):
    buckets, rows, width = step
    assert buckets.padded_cells(rows, width) >= 0
    assert 0.0 <= buckets.waste(rows, width) < 1.0


@given(steps())
def test_cells_are_the_rectangle_or_the_tiles_walked(step):
    buckets, rows, width = step
    if buckets.tile is None:
        shape = buckets.shape_for(rows, width)
        expected = sum(1 for _ in range(shape.rows) for _ in range(shape.width))
    else:
        expected = 0
        for _ in range(rows):
            first_key = 0
            while first_key < width:
                expected += buckets.tile
                first_key += buckets.tile
    assert buckets.cells_for(rows, width) == expected


def test_256_rows_of_8192_tokens_are_576_shapes_or_9_streamed():
    rectangle = DecodeBuckets(256, 8192)
    streamed = DecodeBuckets(256, 8192, streamed=True, tile=32)
    assert (len(rectangle.rows), len(rectangle.widths), rectangle.count) == (9, 64, 576)
    assert streamed.widths == (8192,)
    assert streamed.count == 9


def test_a_four_token_row_under_a_32_key_tile_is_a_whole_tile_of_work():
    buckets = DecodeBuckets(8, 8192, streamed=True, tile=32)
    assert buckets.cells_for(1, 4) == 32
    assert buckets.waste(1, 4) == 28 / 32


def test_a_padded_row_of_a_streamed_set_costs_nothing():
    buckets = DecodeBuckets(8, 8192, streamed=True, tile=32)
    assert buckets.row_bucket(3) == 4
    assert buckets.cells_for(3, 64) == 3 * 64


def test_a_row_maximum_that_is_no_power_of_two_is_a_bucket():
    assert DecodeBuckets(12, 128).rows == (1, 2, 4, 8, 12)


def test_a_context_that_is_no_multiple_is_the_last_width():
    assert DecodeBuckets(1, 300).widths == (128, 256, 300)


@pytest.mark.parametrize(
    ("rows", "width", "words"),
    [
        (0, 1, "0 rows"),
        (9, 1, "9 rows.*--max-num-seqs"),
        (1, 0, "0 tokens"),
        (1, 2049, "2049 tokens of context.*2048.*--max-model-len"),
    ],
)
def test_a_step_outside_the_set_is_refused(rows, width, words):
    with pytest.raises(ValueError, match=words):
        DecodeBuckets(8, 2048).shape_for(rows, width)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_seqs": 0},
        {"max_model_len": 0},
        {"width_multiple": 0},
        {"streamed": True},
        {"streamed": True, "tile": 0},
        {"tile": 32},
    ],
)
def test_a_bucket_set_that_cannot_be_is_refused(fields):
    with pytest.raises(ConfigError, match=next(reversed(fields))):
        DecodeBuckets(**({"max_num_seqs": 8, "max_model_len": 2048} | fields))


@given(st.integers(1, 10_000), st.data())
def test_a_token_bucket_covers_the_tokens_and_no_smaller_one_does(most, data):
    buckets = PrefillBuckets(most)
    tokens = data.draw(st.integers(1, most))
    assert buckets.token_bucket(tokens) == min(b for b in buckets.tokens if b >= tokens)


@pytest.mark.parametrize(
    ("most", "tokens"),
    [(512, (32, 64, 128, 256, 512)), (500, (32, 64, 128, 256, 500)), (32, (32,)), (20, (20,))],
)
def test_token_buckets_are_powers_of_two_and_the_maximum(most, tokens):
    assert PrefillBuckets(most).tokens == tokens


def test_more_prefill_tokens_than_the_budget_are_refused():
    with pytest.raises(ValueError, match=r"513 prefill tokens.*512.*--max-num-batched-tokens"):
        PrefillBuckets(512).token_bucket(513)
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 0"):
        PrefillBuckets(0)
