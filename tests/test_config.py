"""What a request may ask for, refused by field."""

import pytest

from jaxserve.config import MAX_STOP_CHARACTERS, SamplingParams
from jaxserve.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("max_tokens", 0, "max_tokens=0"),
        ("temperature", -0.1, "temperature=-0.1"),
        ("temperature", float("nan"), "temperature=nan"),
        ("top_k", -2, "top_k=-2"),
        ("top_p", 0.0, "top_p=0.0"),
        ("min_p", 1.1, "min_p=1.1"),
        ("seed", 2**63, "64-bit"),
        ("stop", ("",), "empty string"),
        ("stop", ("a",) * 17, "17 strings, at most 16"),
        ("stop", ("a" * (MAX_STOP_CHARACTERS + 1),), f"{MAX_STOP_CHARACTERS + 1} characters"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_the_name_of_its_field(field, value, says):
    with pytest.raises(InvalidRequest, match=says) as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.param == field


def test_the_longest_stop_string_allowed_is_taken():
    assert SamplingParams(stop=("a" * MAX_STOP_CHARACTERS,)).stop
