"""What a request may ask for, refused by field."""

from pathlib import Path

import pytest

import jaxserve
from jaxserve.config import MAX_STOP_CHARACTERS, BootConfig, SamplingParams
from jaxserve.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("n", 0, "n=0"),
        ("n", 129, "n=129"),
        ("max_tokens", -1, "max_tokens=-1"),
        ("min_tokens", -1, "min_tokens=-1"),
        ("min_tokens", 17, "min_tokens=17 is above max_tokens=16"),
        ("temperature", -0.1, "temperature=-0.1"),
        ("temperature", float("nan"), "temperature=nan"),
        ("top_k", -2, "top_k=-2"),
        ("top_p", 0.0, "top_p=0.0"),
        ("min_p", 1.1, "min_p=1.1"),
        ("seed", 2**63, "64-bit"),
        ("stop", ("",), "empty string"),
        ("stop", ("a",) * 17, "17 entries, at most 16"),
        ("stop", ("a" * (MAX_STOP_CHARACTERS + 1),), f"{MAX_STOP_CHARACTERS + 1} characters"),
        ("stop_token_ids", (3,) * 4097, "4097 entries, at most 4096"),
        ("presence_penalty", 2.1, "presence_penalty=2.1"),
        ("presence_penalty", float("nan"), "presence_penalty=nan"),
        ("frequency_penalty", -2.1, "frequency_penalty=-2.1"),
        ("repetition_penalty", 0.0, "repetition_penalty=0.0"),
        ("repetition_penalty", float("inf"), "repetition_penalty=inf"),
        ("logit_bias", ((3, 100.5),), "token 3=100.5"),
        ("logit_bias", ((3, 1.0), (3, 2.0)), "twice"),
        ("logit_bias", tuple((i, 0.0) for i in range(301)), "301 entries, at most 300"),
        ("allowed_token_ids", (), "no token could be drawn"),
        ("allowed_token_ids", (3,) * (2**18 + 1), "262145 entries, at most 262144"),
        ("bad_words", ("a", ""), "empty string"),
        ("bad_words", ("a",) * 1025, "1025 entries, at most 1024"),
        ("bad_words", ("ab", "a" * (2**14 - 1)), "16385 characters in all, at most 16384"),
        ("bad_words_token_ids", ((1,), ()), "0 tokens"),
        ("logprobs", 21, "logprobs=21"),
        ("logprobs", -1, "logprobs=-1"),
        ("prompt_logprobs", 21, "prompt_logprobs=21"),
        ("logprobs_mode", "raw", "logprobs_mode='raw'"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_the_name_of_its_field(field, value, says):
    with pytest.raises(InvalidRequest, match=says) as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.param == field


def test_the_longest_stop_string_allowed_is_taken():
    assert SamplingParams(stop=("a" * MAX_STOP_CHARACTERS,)).stop


def test_a_request_may_ask_for_its_prompt_alone_and_for_every_neutral_value():
    assert SamplingParams(max_tokens=0).max_tokens == 0
    assert SamplingParams(max_tokens=None, min_tokens=5).min_tokens == 5
    assert SamplingParams(logprobs=0, prompt_logprobs=20).prompt_logprobs == 20


def test_a_cache_directory_may_be_a_string():
    assert BootConfig(compile_cache_dir="/tmp/steps").compile_cache_dir == Path("/tmp/steps")


def test_the_packages_names_are_found_before_they_are_imported():
    assert "LLM" in dir(jaxserve)
    assert all(getattr(jaxserve, name) for name in dir(jaxserve))
