"""A body is a checked record or a 400 that names the field."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import SamplingParams
from jaxserve.errors import InvalidRequest
from jaxserve.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_request,
)

HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps({"prompt": "x", **fields}).encode())


def chat(**fields) -> ChatRequest:
    return parse_request(ChatRequest, json.dumps({"messages": HELLO, **fields}).encode())


def test_every_sampling_field_reaches_the_engine():
    asked = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": -3,
        "stop": ["a", "b"],
        "stop_token_ids": [4, 5],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    expected = SamplingParams(**{**asked, "stop": ("a", "b"), "stop_token_ids": (4, 5)})
    assert completion(**asked).sampling_params() == expected
    assert chat(**asked).sampling_params() == expected


def test_defaults_are_openais():
    assert completion().sampling_params() == SamplingParams(max_tokens=16, temperature=1.0)
    assert chat().sampling_params() == SamplingParams(max_tokens=None, temperature=1.0)
    assert chat(max_tokens=5, max_completion_tokens=3).sampling_params().max_tokens == 3
    assert completion(stop="x").sampling_params().stop == ("x",)


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "n", "stop", "stream", "logprobs"])
def test_null_stands_for_an_absent_field(field):
    assert completion(**{field: None}) == completion()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("x", ["x"]),
        (["x", "y"], ["x", "y"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], [[]]),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_a_list_of_either(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"prompt": None}, "prompt", "is required"),
        ({"prompt": 5}, "prompt", "must be a string"),
        ({"prompt": ["a", 1]}, "prompt", "must be a string"),
        ({"prompt": [1, True]}, "prompt", "must be a string"),
        ({"prompt": [1, 2.0]}, "prompt", "must be a string"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens=-1"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": -0.1}, "temperature", "temperature=-0.1"),
        ({"temperature": 10**400}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "top_p=0"),
        ({"top_k": -2}, "top_k", "top_k=-2"),
        ({"min_p": 1.5}, "min_p", "min_p=1.5"),
        ({"seed": 2**70}, "seed", "64-bit"),
        ({"stop": ""}, "stop", "empty"),
        ({"stop": ["a", 5]}, "stop", r"stop\[1\]"),
        ({"stop_token_ids": "x"}, "stop_token_ids", "list"),
        ({"n": 2}, "n", "n is not supported"),
        ({"n": True}, "n", "n is not supported"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options", r"stream_options\.x"),
        ({"best_off": 1}, "best_off", "unknown field 'best_off'"),
        ({"messages": HELLO}, "messages", "unknown field"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"frequency_penalty": False}, "frequency_penalty", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"logprobs": 0}, "logprobs", "not supported"),
        ({"echo": True}, "echo", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ],
)
def test_a_bad_field_is_refused_by_name(fields, param, said):
    with pytest.raises(InvalidRequest, match=said) as refused:
        completion(**fields).sampling_params()
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0},
        {"presence_penalty": 0.0, "frequency_penalty": 0},
        {"repetition_penalty": 1.0, "min_tokens": 0, "best_of": 1, "n": 1},
        {"logit_bias": {}, "echo": False, "suffix": None, "tools": [], "logprobs": False},
        {"response_format": {"type": "text"}},
        {"user": "me", "metadata": {"a": 1}},
    ],
)
def test_unimplemented_fields_pass_when_they_would_change_nothing(fields):
    assert completion(**fields) == completion()


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"role": "user"}, r"messages\[0\]\.content: is required"),
        ({"role": "tool", "content": "x"}, r"messages\[0\]\.role"),
        ({"role": "user", "content": 5}, r"messages\[0\]\.content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[0\]\.content\[0\]"),
        ({"role": "user", "content": "x", "tool_calls": [1]}, r"messages\[0\]\.tool_calls"),
        (5, r"messages\[0\]"),
    ],
)
def test_a_bad_message_is_refused_with_its_path(message, path):
    with pytest.raises(InvalidRequest, match=path) as refused:
        chat(messages=[message])
    assert refused.value.param == "messages"


def test_an_answer_can_be_sent_back_as_the_client_got_it():
    message = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None}
    assert chat(messages=[message]).messages[0].for_template() == {
        "role": "assistant",
        "content": "hi",
    }


def test_text_parts_are_lines_of_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "name": "bo"}
    assert chat(messages=[message]).messages[0].for_template() == {
        "role": "user",
        "content": "a\nb",
        "name": "bo",
    }


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": NaN}', "NaN"),
        (b'{"prompt": "x", "temperature": Infinity}', "Infinity"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "nested"),
        (b"1" * 10_000, "not JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body, said):
    with pytest.raises(InvalidRequest, match=said):
        parse_request(CompletionRequest, body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
field_names = st.sampled_from(
    [*CompletionRequest.model_fields, *ChatRequest.model_fields, "n", "logprobs", "user", "tokens"]
) | st.text(max_size=8)


@pytest.mark.parametrize(
    "kind", [CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest]
)
@given(body=st.dictionaries(field_names, json_values, max_size=6))
@settings(max_examples=80)
def test_any_object_is_a_record_or_an_invalid_request(kind, body):
    with contextlib.suppress(InvalidRequest):  # anything else fails the test
        call = parse_request(kind, json.dumps(body).encode())
        assert isinstance(call, kind)
        if isinstance(call, CompletionRequest | ChatRequest):
            assert isinstance(call.sampling_params(), SamplingParams)


@given(body=st.binary(max_size=40))
@settings(max_examples=80)
def test_any_bytes_are_refused_or_a_record(body):
    with pytest.raises(InvalidRequest):
        parse_request(CompletionRequest, body)
