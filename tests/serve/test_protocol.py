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
)
from jaxserve.serve.records import parse_request
from jaxserve.serve.responses import AnswerOptions
from jaxserve.serve.structured import Constraint

HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps({"prompt": "x", **fields}).encode())


def chat(**fields) -> ChatRequest:
    return parse_request(ChatRequest, json.dumps({"messages": HELLO, **fields}).encode())


SAMPLING = {
    "n": 3,
    "max_tokens": 7,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.25,
    "min_p": 0.125,
    "seed": -3,
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.5,
    "allowed_token_ids": [1, 2],
    "bad_words": ["x"],
    "stop": ["a", "b"],
    "stop_token_ids": [4, 5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "prompt_logprobs": 4,
}


def test_every_sampling_field_reaches_the_engine():
    asked = {**SAMPLING, "logit_bias": {"5": 1, "70": -2.5}}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in SAMPLING.items()}
    expected = SamplingParams(**values, logit_bias=((5, 1.0), (70, -2.5)))
    assert completion(**asked).sampling_params() == expected
    assert chat(**asked).sampling_params() == expected


def test_log_probabilities_are_asked_for_in_the_way_of_each_route():
    options = {"return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
    asked = completion(logprobs=3, **options)
    assert asked.sampling_params().logprobs == 3
    shown = AnswerOptions(logprobs=3, return_token_ids=True, include_usage=True)
    assert asked.answer_options() == shown
    for top, count in (({}, 0), ({"top_logprobs": 5}, 5)):
        call = chat(logprobs=True, **top)
        assert call.sampling_params().logprobs == call.answer_options().logprobs == count
    call = chat(logprobs=False)
    assert call.sampling_params().logprobs is call.answer_options().logprobs is None


@pytest.mark.parametrize(
    ("fields", "engine", "shown"),
    [
        ({"echo": True}, None, None),
        ({"echo": True, "logprobs": 2}, 2, None),
        ({"logprobs": 2}, None, None),
        ({"echo": True, "logprobs": 0, "prompt_logprobs": 3}, 3, 3),
        ({"echo": True, "logprobs": 5, "prompt_logprobs": 3}, 5, 3),
    ],
)
def test_an_echo_with_logprobs_asks_for_those_of_the_prompt(fields, engine, shown):
    call = completion(**fields)
    assert call.sampling_params().prompt_logprobs == engine
    assert call.answer_options().prompt_logprobs == shown


SCHEMA = {"type": "object", "properties": {"a": {"const": None}}}


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("json_schema", {"type": "object"})),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": None},
                }
            },
            ("json_schema", SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, ("json_schema", SCHEMA)),
        ({"structured_outputs": {"json": "{}"}}, ("json_schema", "{}")),
        ({"structured_outputs": {"json_object": True}}, ("json_schema", {"type": "object"})),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ("choice", ["a", "b"])),
        ({"structured_outputs": {"grammar": "start: x"}}, ("grammar", "start: x")),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            ("regex", "a"),
        ),
    ],
)
def test_the_form_of_an_answer_is_asked_for_in_openais_or_vllms_way(fields, constraint):
    field = next((name for name in ("structured_outputs", "response_format") if name in fields), "")
    expected = None if constraint is None else (field, Constraint(*constraint))
    assert completion(**fields).constraint() == chat(**fields).constraint() == expected


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
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "max_tokens=8"),
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
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options", r"stream_options\.x"),
        ({"best_off": 1}, "best_off", "unknown field 'best_off'"),
        ({"messages": HELLO}, "messages", "unknown field"),
        ({"n": 0}, "n", "n=0"),
        ({"n": 129}, "n", "n=129"),
        ({"n": True}, "n", "valid integer"),
        ({"n": 2, "best_of": 3}, "best_of", "best_of=3 is not n=2"),
        ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty=2.5"),
        ({"frequency_penalty": False}, "frequency_penalty", "valid number"),
        ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty=0"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is no token id"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1' is no token id"),
        ({"logit_bias": {"5": "a"}}, "logit_bias", r"logit_bias\.5: .*valid number"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "101"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "twice"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
        ({"bad_words": [""]}, "bad_words", "empty"),
        ({"logprobs": 21}, "logprobs", "logprobs=21"),
        ({"logprobs": True}, "logprobs", "valid integer"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs=-1"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "without stream"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options",
            "only with include_usage",
        ),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
        ({"priority": 1}, "priority", "priority=1"),
        ({"request_id": ""}, "request_id", "at least 1"),
        ({"request_id": "a\n"}, "request_id", "unprintable"),
        ({"cache_salt": ""}, "cache_salt", "at least 1"),
        ({"guided_json": {}}, "guided_json", 'use structured_outputs {"json": ...}'),
        ({"guided_choice": ["a"]}, "guided_choice", 'structured_outputs {"choice"'),
        ({"tools": [{"type": "function"}]}, "tools", "tools is not supported here"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice is not supported here"),
        ({"response_format": {"type": "xml"}}, "response_format", r"response_format\.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}},
            "response_format",
            "json_schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "0 constraints"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "2 con"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least 1"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "send one",
        ),
    ],
)
def test_a_bad_field_is_refused_by_name(fields, param, said):
    with pytest.raises(InvalidRequest, match=said) as refused:
        completion(**fields).sampling_params()
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"top_logprobs": 3}, "top_logprobs", "only with logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"logprobs": 1}, "logprobs", "valid boolean"),
        ({"echo": True}, "echo", "echo is not supported"),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "valid dictionary"),
    ],
)
def test_a_bad_field_of_a_conversation_is_refused_by_name(fields, param, said):
    with pytest.raises(InvalidRequest, match=said) as refused:
        chat(**fields).sampling_params()
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1},
        {"min_tokens": 0, "n": 1, "priority": 0, "best_of": None},
        {"logit_bias": {}, "echo": False, "suffix": None, "tools": [], "tool_choice": "none"},
        {"user": "me", "metadata": {"a": 1}, "store": True},
        {"use_beam_search": False, "length_penalty": 1, "spaces_between_special_tokens": True},
        {"add_special_tokens": True},
    ],
)
def test_fields_that_change_nothing_pass(fields):
    assert completion(**fields) == completion()


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"role": "user"}, r"messages\[0\]\.content: is required"),
        ({"role": "tool", "content": "x"}, r"messages\[0\]\.role"),
        ({"role": "user", "content": "x", "type": "image"}, r"messages\[0\]\.type"),
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
    message = {"role": "user", "content": parts, "name": "bo", "type": "text"}
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
