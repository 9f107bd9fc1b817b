import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.plan.report import format_table
from jaxserve.plan.units import GIB, MIB, cdiv, format_bytes, format_seconds, round_down, round_up


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_rounding_brackets_a_value_between_neighbouring_multiples(value, multiple):
    low, high = round_down(value, multiple), round_up(value, multiple)
    assert low <= value <= high
    assert low % multiple == high % multiple == 0
    assert high - low == (0 if value % multiple == 0 else multiple)
    assert cdiv(value, multiple) * multiple == high


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * MIB // 2, "1.50 MiB"),
        (141 * GIB, "141.00 GiB"),
        (2048 * GIB, "2048.00 GiB"),
    ],
)
def test_bytes_read_in_binary_units(n, text):
    assert format_bytes(n) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (0.00035, "350 us"),
        (0.0125, "12.5 ms"),
        (3.2, "3.20 s"),
        (125.4, "2 min 05 s"),
    ],
)
def test_seconds_read_in_the_unit_that_fits(seconds, text):
    assert format_seconds(seconds) == text


def test_a_table_is_aligned_to_the_right_under_its_heads():
    table = format_table(("a", "bytes"), [("100", "1"), ("2", "22")])
    assert table.splitlines() == ["  a  bytes", "100      1", "  2     22"]
