"""What an answer shows besides its text: choices, log probabilities, echoes, ids, usage, forms."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve_fakes import ScriptedEngine, byte_level_tokenizer, client_of, scripted_logprobs

TOKENIZER = byte_level_tokenizer()
HELLO = [{"role": "user", "content": "hello"}]
VOCAB = TOKENIZER.get_vocab_size()
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TEXT = "grüße 😀 the fox"


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def token_bytes(token_id: int) -> bytes:
    """GPT-2's table the other way round, from the tokenizer's own alphabet."""
    token = TOKENIZER.id_to_token(token_id)
    if " " in token:
        return token.encode()
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in printable]
    table |= {chr(256 + i): b for i, b in enumerate(others)}
    return bytes(table[char] for char in token)


def events_of(body: str) -> list[dict[str, Any]]:
    assert body.endswith("data: [DONE]\n\n")
    lines = body.removesuffix("\n\n").split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def post(path: str, engine: ScriptedEngine, body: dict[str, Any], **parts: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(engine, **parts) as client:
            call = {"messages": HELLO} if path == CHAT else {"prompt": "fox"}
            return await client.post(path, json={**call, **body})

    return asyncio.run(run())


def both(path: str, engine: ScriptedEngine, body: dict[str, Any]):
    """The whole answer, and the chunks of the same one streamed."""

    async def run() -> tuple[httpx.Response, httpx.Response]:
        async with client_of(engine) as client:
            call = {**({"messages": HELLO} if path == CHAT else {"prompt": "fox"}), **body}
            return (
                await client.post(path, json=call),
                await client.post(path, json={**call, **STREAM}),
            )

    unary, stream = asyncio.run(run())
    assert unary.status_code == 200, unary.text
    return unary.json(), events_of(stream.text)


def whole(path: str, engine: ScriptedEngine, body: dict[str, Any], **parts: Any) -> dict[str, Any]:
    reply = post(path, engine, body, **parts)
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed(path: str, engine: ScriptedEngine, body: dict[str, Any], **parts: Any):
    """The chunks, the last of them the usage."""
    reply = post(path, engine, {**body, **STREAM}, **parts)
    assert reply.status_code == 200, reply.text
    return events_of(reply.text)


def saying(text: str = TEXT, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(script=ids_of(text), **options)


# Log probabilities.


def test_a_chats_logprobs_name_every_token_with_its_bytes_and_the_likeliest():
    script = ids_of(TEXT)
    body = {"logprobs": True, "top_logprobs": 3, "max_tokens": len(script)}
    choice = whole(CHAT, saying(), body)["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == TEXT
    for token_id, entry in zip(script, content, strict=True):
        expected = scripted_logprobs(token_id, 3)
        assert entry["logprob"] == expected.logprob
        assert bytes(entry["bytes"]) == token_bytes(token_id)
        likeliest = [(bytes(top["bytes"]), top["logprob"]) for top in entry["top_logprobs"]]
        assert likeliest == [(token_bytes(t) if t < VOCAB else b"", lp) for t, lp in expected.top]
    names = [entry["token"] for entry in content]
    assert any(name.startswith("\\x") for name in names), "no token of half a character"
    whole_names = [name for name in names if not re.search(r"\\x", name)]
    assert whole_names == [b.decode() for b in map(token_bytes, script) if not broken(b)]


def broken(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return False


def test_a_completions_logprobs_are_four_lists_that_hold_the_token_itself():
    script = ids_of(TEXT)
    body = {"logprobs": 2, "max_tokens": len(script)}
    choice = whole(COMPLETIONS, saying(), body)["choices"][0]
    logprobs = choice["logprobs"]
    assert {len(column) for column in logprobs.values()} == {len(script)}
    for i, token_id in enumerate(script):
        expected = scripted_logprobs(token_id, 2)
        name = logprobs["tokens"][i]
        assert logprobs["token_logprobs"][i] == expected.logprob
        assert logprobs["top_logprobs"][i][name] == expected.logprob
        assert len(logprobs["top_logprobs"][i]) == (2 if expected.rank == 1 else 3)
        assert max(logprobs["top_logprobs"][i].values()) == expected.top[0][1]
        data = token_bytes(token_id)
        assert name == (f"bytes:{as_escapes(data)}" if broken(data) else data.decode())
        assert choice["text"].startswith(name, logprobs["text_offset"][i]) or broken(data)


def as_escapes(data: bytes) -> str:
    return "".join(f"\\x{b:02x}" if b >= 0x80 else chr(b) for b in data)


@pytest.mark.parametrize(("path", "body"), [(CHAT, {}), (COMPLETIONS, {"max_tokens": 4})])
def test_logprobs_are_null_unless_asked(path, body):
    assert whole(path, saying(), body)["choices"][0]["logprobs"] is None
    assert all(c["logprobs"] is None for e in streamed(path, saying(), body) for c in e["choices"])


def test_no_top_tokens_are_listed_unless_asked():
    chat = whole(CHAT, saying(), {"logprobs": True, "max_tokens": 3})["choices"][0]["logprobs"]
    assert [entry["top_logprobs"] for entry in chat["content"]] == [[], [], []]
    body = {"logprobs": 0, "max_tokens": 3}
    top = whole(COMPLETIONS, saying(), body)["choices"][0]["logprobs"]["top_logprobs"]
    assert [len(entry) for entry in top] == [1, 1, 1]


def test_a_token_that_cannot_be_drawn_has_a_finite_logprob(monkeypatch):
    script = ids_of("fox")
    impossible = scripted_logprobs(script[0], 1)._replace(logprob=float("-inf"))
    monkeypatch.setattr("tests.serve_fakes.scripted_logprobs", lambda *_: impossible)
    choice = whole(COMPLETIONS, saying(), {"logprobs": 1, "max_tokens": 1})["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]


# Everything streamed is what the whole answer says.

requests = st.fixed_dictionaries(
    {
        "n": st.integers(1, 3),
        "stop": st.lists(st.text("abtheox \ufffd", min_size=1, max_size=3), max_size=2),
        "include_stop_str_in_output": st.booleans(),
        "return_token_ids": st.booleans(),
        "stop_token_ids": st.lists(st.integers(3, VOCAB), max_size=2),
        "skip_special_tokens": st.booleans(),
    }
)


def joined(path: str, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that a client puts together from a stream."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            empty = {"text": "", "logprobs": {}, "token_ids": [], "prompt": None, "end": None}
            choice = choices.setdefault(part["index"], empty)
            assert choice["end"] is None
            choice["end"] = part["finish_reason"]
            choice["text"] += (
                part["text"] if path == COMPLETIONS else part["delta"].get("content", "")
            )
            for name, values in (part["logprobs"] or {}).items():
                if isinstance(values, list):
                    choice["logprobs"].setdefault(name, []).extend(values)
            choice["token_ids"] += part.get("token_ids", [])
            choice["prompt"] = choice["prompt"] or part.get("prompt_token_ids")
            choice["prompt"] = choice["prompt"] or chunk.get("prompt_token_ids")
    return [choices[index] for index in sorted(choices)]


@given(
    path=st.sampled_from([COMPLETIONS, CHAT]),
    script=st.lists(st.integers(0, VOCAB), min_size=1, max_size=20),
    call=requests,
    top=st.none() | st.integers(0, 3),
    echo=st.booleans(),
)
@settings(max_examples=40)
def test_a_joined_stream_equals_the_whole_answer(path, script, call, top, echo):
    logprobs = {"logprobs": top} if path == COMPLETIONS else {}
    if path == CHAT and top is not None:
        logprobs = {"logprobs": True, "top_logprobs": top}
    body = {**call, **logprobs, "max_tokens": len(script)}
    if path == COMPLETIONS:
        body |= {"echo": echo, "prompt": ["the fox", "😀"]}
    answer, chunks = both(path, ScriptedEngine(script=script, eos_token_id=2), body)
    assert chunks[-1]["usage"] == answer["usage"]
    assert len(answer["choices"]) == call["n"] * (2 if path == COMPLETIONS else 1)
    for choice, parts in zip(answer["choices"], joined(path, chunks), strict=True):
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert parts["text"] == text
        assert parts["end"] == choice["finish_reason"]
        lists = {k: v for k, v in (choice["logprobs"] or {}).items() if isinstance(v, list) and v}
        assert parts["logprobs"] == lists
        assert parts["token_ids"] == choice.get("token_ids", [])
        prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        assert parts["prompt"] == prompt
    if top is not None and not echo:
        counted = sum(
            len(
                (c["logprobs"].get("content") if path == CHAT else c["logprobs"].get("tokens"))
                or []
            )
            for c in answer["choices"]
        )
        assert counted == answer["usage"]["completion_tokens"]


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
@settings(max_examples=40)
def test_an_echo_is_the_prompt_and_then_the_answer_with_offsets_into_both(text):
    script = ids_of(TEXT)
    body = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": len(script)}
    choice = whole(COMPLETIONS, saying(max_model_len=200), body)["choices"][0]
    assert choice["text"] == text + TEXT
    logprobs = choice["logprobs"]
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[len(ids_of(text))] == len(text)
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:] + logprobs["top_logprobs"][1:]
    for name, offset in zip(logprobs["tokens"], offsets, strict=True):
        if not name.startswith("bytes:"):
            assert choice["text"].startswith(name, offset)


@pytest.mark.parametrize("stream", [False, True])
def test_an_evaluation_harness_scores_a_prompt_without_drawing_a_token(stream):
    prompts = [ids_of("the quick fox"), ids_of("😀 dog")]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
    if stream:
        chunks = streamed(COMPLETIONS, saying(), body)
        usage = chunks[-1]["usage"]
        choices = [
            (c["text"], c["logprobs"]["token_logprobs"], c["end"])
            for c in joined(COMPLETIONS, chunks)
        ]
    else:
        answer = whole(COMPLETIONS, saying(), body)
        usage = answer["usage"]
        choices = [
            (c["text"], c["logprobs"]["token_logprobs"], c["finish_reason"])
            for c in answer["choices"]
        ]
    assert usage["completion_tokens"] == 0
    for prompt, (text, token_logprobs, reason) in zip(prompts, choices, strict=True):
        assert text == TOKENIZER.decode(prompt)
        assert token_logprobs == [None, *(scripted_logprobs(t, 1).logprob for t in prompt[1:])]
        assert reason == "length"


def test_prompt_logprobs_have_vllms_shape_on_both_routes():
    for path in (COMPLETIONS, CHAT):
        engine = saying()
        answer = whole(path, engine, {"prompt_logprobs": 2, "max_tokens": 2})
        shown = answer["choices"][0] if path == COMPLETIONS else answer
        prompt = engine.seen[0][0]
        assert shown["prompt_logprobs"][0] is None
        for token_id, entry in zip(prompt[1:], shown["prompt_logprobs"][1:], strict=True):
            expected = scripted_logprobs(token_id, 2)
            assert next(iter(entry)) == str(token_id)
            own = entry[str(token_id)]
            assert (own["logprob"], own["rank"]) == (expected.logprob, expected.rank)
            assert own["decoded_token"] == TOKENIZER.decode([token_id], skip_special_tokens=False)
            ranks = {str(t): rank for rank, (t, _) in enumerate(expected.top, start=1)}
            assert {t: e["rank"] for t, e in entry.items()} == {**ranks, str(token_id): own["rank"]}


def test_token_ids_are_returned_with_those_of_the_prompt():
    engine = saying()
    answer = whole(CHAT, engine, {"return_token_ids": True, "max_tokens": 3})
    assert answer["prompt_token_ids"] == engine.seen[0][0]
    assert answer["choices"][0]["token_ids"] == ids_of(TEXT)[:3]
    choice = whole(COMPLETIONS, engine, {"return_token_ids": True, "max_tokens": 3})["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids_of("fox"), ids_of(TEXT)[:3])
    assert "token_ids" not in whole(COMPLETIONS, engine, {"max_tokens": 3})["choices"][0]


# Several choices.


def test_choices_of_one_prompt_form_a_group_with_seeds_of_their_own():
    engine = saying()
    body = {"prompt": ["a", "b"], "n": 3, "seed": 2**63 - 2, "max_tokens": 2, "cache_salt": "s"}
    answer = whole(COMPLETIONS, engine, body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 12
    assert [prompt for prompt, _ in engine.seen] == [ids_of("a")] * 3 + [ids_of("b")] * 3
    seeds = [params.seed for _, params in engine.seen]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)] * 2
    assert {params.n for _, params in engine.seen} == {1}
    salts, groups = zip(*engine.options, strict=True)
    assert set(salts) == {"s"}
    assert len(set(groups[:3])) == len(set(groups[3:])) == 1
    assert groups[0] != groups[3]
    whole(COMPLETIONS, engine, {"max_tokens": 1})
    assert engine.options[-1] == ("", None)


async def test_a_client_that_leaves_ends_all_its_choices():
    engine = saying(gate=threading.Semaphore(3), max_model_len=1000)
    async with client_of(engine) as client:
        call = {"prompt": ["a", "b"], "n": 2, "max_tokens": 900, "stream": True}
        asking = asyncio.create_task(client.post(COMPLETIONS, json=call))
        async with asyncio.timeout(30):
            while len(engine.jobs) < 4:
                engine.gate.release()
                await asyncio.sleep(0.002)
            asking.cancel()
            while engine.jobs:
                engine.gate.release()
                await asyncio.sleep(0.002)
    assert len(engine.aborted) == 4


def test_cached_tokens_are_in_the_usage_where_the_operator_shows_them():
    engine = saying(cached=1)
    body = {"prompt": ["fox", "the"], "n": 2, "max_tokens": 1}
    assert "prompt_tokens_details" not in whole(COMPLETIONS, engine, body)["usage"]
    shown = {"enable_prompt_tokens_details": True}
    usage = whole(COMPLETIONS, engine, body, **shown)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert streamed(COMPLETIONS, engine, body, **shown)[-1]["usage"] == usage


# Ends.


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_request_that_fails_by_itself_is_a_500_or_an_event_and_the_engine_goes_on(path):
    async def run() -> list[httpx.Response]:
        async with client_of(engine) as client:
            call = {"messages": HELLO} if path == CHAT else {"prompt": "fox"}
            replies = [await client.post(path, json={**call, "max_tokens": 4, "n": 2})]
            replies.append(await client.post(path, json={**call, "max_tokens": 4, "stream": True}))
            engine.failing = None
            replies.append(await client.post(path, json={**call, "max_tokens": 4}))
            replies.append(await client.get("/metrics"))
            return replies

    engine = saying(failing="the grammar became too complex")
    unary, stream, after, metrics = asyncio.run(run())
    assert unary.status_code == 500
    assert unary.json()["error"]["message"] == "the grammar became too complex"
    assert events_of(stream.text)[-1]["error"]["message"] == "the grammar became too complex"
    assert after.status_code == 200
    assert 'finished_reason="error"' in metrics.text


def test_an_answer_longer_than_the_context_is_refused_and_a_default_is_cut():
    prompt = ids_of("the quick brown fox")
    room = 20 - len(prompt)
    for path, field in ((COMPLETIONS, "max_tokens"), (CHAT, "max_completion_tokens")):
        engine = saying(max_model_len=40 if path == CHAT else 20)
        reply = post(
            path, engine, {"prompt": prompt, field: 41} if path == COMPLETIONS else {field: 41}
        )
        error = reply.json()["error"]
        assert reply.status_code == 400
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
        assert f"{field}=41" in error["message"]
    assert room < 16
    answer = whole(COMPLETIONS, saying(max_model_len=20), {"prompt": prompt})
    assert answer["usage"]["completion_tokens"] == room
    reply = post(COMPLETIONS, saying(max_model_len=20), {"prompt": prompt, "max_tokens": room + 1})
    assert f"{len(prompt)} tokens of a context of 20, which leaves {room}" in reply.text


def test_a_request_id_of_the_body_names_the_answer():
    assert whole(COMPLETIONS, saying(), {"request_id": "my id"})["id"] == "cmpl-my id"
    assert whole(CHAT, saying(), {"request_id": "x"})["id"] == "chatcmpl-x"


# Structured output.

PERSON = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "maximum": 999, "minimum": 0},
        "ok": {"type": "boolean"},
    },
    "required": ["age", "ok"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_a_schema_is_json_of_it_for_every_choice(path, stream):
    engine = saying(max_model_len=600)
    body = {"response_format": SCHEMA, "n": 2, "max_tokens": 500}
    if stream:
        texts = [(c["text"], c["end"]) for c in joined(path, streamed(path, engine, body))]
    else:
        texts = [
            (c["text"] if path == COMPLETIONS else c["message"]["content"], c["finish_reason"])
            for c in whole(path, engine, body)["choices"]
        ]
    assert len(texts) == 2
    for text, reason in texts:
        value = json.loads(text)
        assert set(value) == {"age", "ok"}
        assert type(value["age"]) is int
        assert type(value["ok"]) is bool
        assert reason == "stop"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"structured_outputs": {"regex": "(fox|dog){2}[0-9]"}}, "(fox|dog){2}[0-9]"),
        ({"structured_outputs": {"choice": ["grüße", "the fox"]}}, "grüße|the fox"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"+ "c"'}}, "ab+c"),
    ],
)
def test_an_answer_with_a_pattern_matches_it(form, pattern):
    body = {**form, "max_tokens": 60}
    choice = whole(COMPLETIONS, saying(), body)["choices"][0]
    assert re.fullmatch(pattern, choice["text"])
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "y"}},
                }
            },
            "response_format",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ],
)
def test_a_form_that_cannot_be_is_a_400_that_says_why(form, field):
    reply = post(CHAT, saying(), form)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field
    assert len(reply.json()["error"]["message"]) > len(field) + 5


# Any fields together.

VALUES: dict[str, list[Any]] = {
    "n": [0, 1, 2, 129],
    "best_of": [1, 2],
    "max_tokens": [0, 1, 5, 64, 10**9],
    "max_completion_tokens": [0, 3],
    "min_tokens": [0, 2],
    "temperature": [0, 1.5],
    "seed": [-(2**63), 2**63 - 1],
    "logit_bias": [{}, {"5": -100}, {"٣": 1}, {"4294967296": 1}],
    "allowed_token_ids": [[], [5], [2**40], [-1]],
    "bad_words": [[], ["x", " \n"], ["é" * 50]],
    "stop": ["o", ["😀", "\ufffd"]],
    "logprobs": [True, False, 0, 3, 20],
    "top_logprobs": [0, 5, 20],
    "prompt_logprobs": [0, 3],
    "echo": [True, False],
    "return_token_ids": [True],
    "truncate_prompt_tokens": [-1, 1, 64, 65],
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "chat_template": ["{{ x }}"],
    "chat_template_kwargs": [{}, {"x": [None]}, {"messages": []}],
    "response_format": [{"type": "text"}, {"type": "json_object"}, SCHEMA],
    "structured_outputs": [
        {"regex": "a{2}"},
        {"regex": "["},
        {"json": "[]"},
        {"choice": ["", "a"]},
    ],
    "request_id": ["x" * 256, "\u2028"],
    "cache_salt": ["s"],
    "stream": [True],
    "stream_options": [{"include_usage": True}],
}
combinations = st.lists(st.sampled_from(sorted(VALUES)), max_size=5, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(VALUES[name]) for name in names})
)


@given(
    calls=st.lists(combinations, min_size=1, max_size=8), path=st.sampled_from([CHAT, COMPLETIONS])
)
@settings(max_examples=60)
def test_fields_in_any_combination_are_answered_or_refused_by_name(calls, path):
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": ["fox", "你"]}

    async def run() -> list[httpx.Response]:
        async with client_of(saying()) as client:
            return [await client.post(path, json={**prompt, **call}) for call in calls]

    for call, reply in zip(calls, asyncio.run(run()), strict=True):
        assert reply.status_code in (200, 400), reply.text
        if reply.status_code == 400:
            assert reply.json()["error"]["param"] in {*call, "response_format", "messages"}
        elif call.get("stream"):
            assert "error" not in events_of(reply.text)[-1]
        else:
            assert len(reply.json()["choices"]) == call.get("n", 1) * (1 if path == CHAT else 2)
