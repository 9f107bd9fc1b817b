"""The routes: OpenAI's shapes, its errors, and streams that equal the whole answers."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve_fakes import ScriptedEngine, byte_level_tokenizer, client_of

TOKENIZER = byte_level_tokenizer()
HELLO = [{"role": "user", "content": "hello"}]
ANSWER = "grüße 😀 the quick brown fox 你好"


def script(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def engine_saying(text: str = ANSWER, **options) -> ScriptedEngine:
    """An engine whose every answer is the text and then an eos."""
    eos = TOKENIZER.token_to_id("<|im_end|>")
    return ScriptedEngine(script=[*script(text), eos], eos_token_id=eos, **options)


def events_of(body: str) -> list[dict]:
    """The JSON of a stream of server-sent events, checked to be whole and ended."""
    assert body.endswith("data: [DONE]\n\n")
    lines = body.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_completion_has_openais_shape():
    async with client_of(engine_saying()) as client:
        reply = await client.post("/v1/completions", json={"prompt": "fox", "max_tokens": 60})
    assert reply.status_code == 200
    body = reply.json()
    count = len(script(ANSWER)) + 1
    assert body.pop("id").startswith("cmpl-")
    assert body == {
        "object": "text_completion",
        "created": 1234,
        "model": "tiny",
        "choices": [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": len(script("fox")),
            "completion_tokens": count,
            "total_tokens": len(script("fox")) + count,
        },
    }


async def test_a_chat_answer_has_openais_shape_and_runs_to_the_end_of_the_context():
    engine = engine_saying(max_model_len=32)
    async with client_of(engine) as client:
        reply = await client.post(
            "/v1/chat/completions",
            json={"model": "tiny-alias", "messages": HELLO, "ignore_eos": True},
        )
    body = reply.json()
    prompt = len(engine.seen[0][0])
    assert body["usage"]["total_tokens"] == 32
    assert body["usage"]["prompt_tokens"] == prompt
    content = body["choices"][0]["message"].pop("content")
    assert content.startswith("grüße")
    assert body.pop("id").startswith("chatcmpl-")
    del body["usage"]
    assert body == {
        "object": "chat.completion",
        "created": 1234,
        "model": "tiny-alias",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
    }


async def test_a_chat_stream_starts_with_the_role_and_ends_with_a_reason():
    async with client_of(engine_saying()) as client:
        reply = await client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    chunks = events_of(reply.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == ANSWER


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_comes_once_in_a_last_chunk_without_choices(path):
    call = {"messages": HELLO} if "chat" in path else {"prompt": "fox", "max_tokens": 60}
    async with client_of(engine_saying()) as client:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events_of((await client.post(path, json={**call, **options})).text)
        whole = (await client.post(path, json=call)).json()
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["object"] == chunks[0]["object"]


@pytest.mark.parametrize("more", [{}, {"n": 2, "logprobs": 1, "return_token_ids": True}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_every_chunk_carries_the_usage_so_far_where_it_is_asked_for(path, more):
    call = {"messages": HELLO, "max_tokens": 12} if "chat" in path else {"prompt": "fox"}
    if "chat" in path and more:
        more = {**more, "logprobs": True}
    usage = {"include_usage": True}
    async with client_of(engine_saying()) as client:
        plain, counted = [
            events_of((await client.post(path, json={**call, **more, **options})).text)
            for options in (
                {"stream": True, "stream_options": usage},
                {"stream": True, "stream_options": {**usage, "continuous_usage_stats": True}},
            )
        ]

    def but_for_the_usage(chunks: list[dict]) -> list[str]:  # choices come in any order
        return sorted(json.dumps(chunk | {"id": "", "usage": None}) for chunk in chunks)

    assert but_for_the_usage(counted) == but_for_the_usage(plain)
    assert counted[-1]["usage"] == plain[-1]["usage"]
    so_far = [chunk["usage"]["completion_tokens"] for chunk in counted]
    assert so_far == sorted(so_far)
    assert so_far[0] <= 1 < so_far[-1]
    totals = {chunk["usage"]["total_tokens"] - n for chunk, n in zip(counted, so_far, strict=True)}
    assert totals == {plain[-1]["usage"]["prompt_tokens"]}


@given(
    ids=st.lists(st.integers(3, TOKENIZER.get_vocab_size() - 1), min_size=1, max_size=30),
    stop=st.lists(st.text("abtheox \ufffd", min_size=1, max_size=3), max_size=2),
    include=st.booleans(),
)
@settings(max_examples=40)
def test_a_joined_stream_equals_the_whole_answer_byte_for_byte(ids, stop, include):
    async def both() -> tuple[dict, list[dict]]:
        call = {
            "prompt": "fox",
            "max_tokens": len(ids),
            "stop": stop,
            "include_stop_str_in_output": include,
        }
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with client_of(ScriptedEngine(script=ids)) as client:
            whole = (await client.post("/v1/completions", json=call)).json()
            stream = await client.post("/v1/completions", json={**call, **options})
        return whole, events_of(stream.text)

    whole, chunks = asyncio.run(both())
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"]


async def test_a_stop_string_ends_the_answer_and_the_request_in_the_engine():
    engine = engine_saying(gate=threading.Semaphore(len(script(ANSWER))))
    async with client_of(engine) as client:
        stop = ["k bro", "zzz"]
        call = {"prompt": "fox", "max_tokens": 60, "stop": stop, "ignore_eos": True}
        body = (await client.post("/v1/completions", json=call)).json()
        assert body["choices"][0]["text"] == ANSWER[: ANSWER.index("k bro")]
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] < len(script(ANSWER))
        metrics = (await client.get("/metrics")).text
        engine.gate.release()
        async with asyncio.timeout(30):
            while engine.jobs:
                await asyncio.sleep(0.002)
    assert len(engine.aborted) == 1
    assert 'finished_reason="stop",model_name="tiny"} 1.0' in metrics


async def test_the_text_of_a_stop_token_is_never_shown():
    engine = ScriptedEngine(script=script("the quick brown fox"))
    stop_id = script("the quick brown fox")[3]
    async with client_of(engine) as client:
        call = {"prompt": "fox", "stop_token_ids": [stop_id], "skip_special_tokens": False}
        body = (await client.post("/v1/completions", json=call)).json()
    assert body["choices"][0]["text"] == TOKENIZER.decode(engine.script[:3])
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_answered_as_indexed_choices(stream):
    engine = ScriptedEngine(script=script("the quick brown fox"))
    prompts = ["a", "the fox", "你"]
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with client_of(engine) as client:
        call = {"prompt": prompts, "max_tokens": 4, **options}
        reply = await client.post("/v1/completions", json=call)
    texts, reasons = ["", "", ""], ["", "", ""]
    body = events_of(reply.text) if stream else [reply.json()]
    for choice in (choice for chunk in body for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [TOKENIZER.decode(engine.script[:4])] * 3
    assert reasons == ["length"] * 3
    num_prompt = sum(len(script(prompt)) for prompt in prompts)
    assert body[-1]["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 12,
        "total_tokens": num_prompt + 12,
    }


async def test_one_refused_prompt_of_several_refuses_the_call_and_ends_the_others():
    engine = ScriptedEngine(script=[5], gate=threading.Semaphore(0), max_model_len=10_000)
    async with client_of(engine) as client:
        call = {"prompt": [[1], [2], []], "max_tokens": 9000}
        asking = asyncio.create_task(client.post("/v1/completions", json=call))
        async with asyncio.timeout(30):
            while len(engine.aborted) < 2:
                engine.gate.release()
                await asyncio.sleep(0.002)
        reply = await asking
    assert reply.status_code == 400
    assert "0 tokens" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "call", "status", "param", "said"),
    [
        ("/v1/completions", {"model": "gpt", "prompt": "x"}, 404, "model", "'gpt' is not served"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt", "0 tokens"),
        ("/v1/completions", {"prompt": [99999]}, 400, "prompt", "vocabulary"),
        ("/v1/completions", {"prompt": [-1]}, 400, "prompt", "vocabulary"),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens", "at least 0"),
        ("/v1/completions", {"prompt": "x", "n": 65}, 400, "n", "65 requests, at most 64"),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [{}]}, 400, "tools", "not supported"),
        ("/v1/completions", {"prompt": "x", "best": 3}, 400, "best", "unknown field"),
        ("/v1/completions", {"prompt": ["a"] * 65}, 400, "prompt", "65 requests, at most 64"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages", "at least 1"),
        ("/v1/chat/completions", {"messages": "hi"}, 400, "messages", "valid list"),
        ("/v1/chat/completions", {"messages": HELLO * 9}, 400, "messages", "the context 64"),
        ("/tokenize", {}, 400, "prompt", "either"),
        ("/tokenize", {"prompt": "x", "foo": 1}, 400, "foo", "unknown field"),
        ("/detokenize", {"tokens": [10**12]}, 400, "tokens", "not in the vocabulary"),
        ("/detokenize", {"tokens": [5] * (2**18 + 1)}, 400, "tokens", "at most 262144"),
        ("/v1/nothing", {}, 404, None, "/v1/nothing"),
        ("/health", {}, 405, None, "Method Not Allowed"),
    ],
)
async def test_errors_have_openais_shape_and_the_server_goes_on(path, call, status, param, said):
    async with client_of(engine_saying()) as client:
        reply = await client.post(path, json=call)
        after = await client.post("/v1/completions", json={"prompt": "fox"})
    assert reply.status_code == status
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert said in error["message"]
    assert after.status_code == 200


async def test_a_model_is_found_by_a_name_with_a_slash_and_an_unknown_one_is_a_404():
    async with client_of(engine_saying(), served_names=("owner/name",)) as client:
        for path in ("owner/name", "owner%2Fname"):
            assert (await client.get(f"/v1/models/{path}")).json()["id"] == "owner/name"
        reply = await client.get("/v1/models/gpt")
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'gpt' is not served here; served: owner/name" in error["message"]


async def test_a_stream_that_is_refused_is_an_error_and_no_stream():
    async with client_of(engine_saying()) as client:
        reply = await client.post("/v1/completions", json={"prompt": "", "stream": True})
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"


async def test_bodies_that_are_too_large_are_refused_announced_or_not():
    async def pieces():
        for _ in range(10):
            yield b"x" * 1000

    async with client_of(engine_saying(), max_body_bytes=5000) as client:
        announced = await client.post("/v1/completions", content=b"x" * 6000)
        chunked = await client.post("/v1/completions", content=pieces())
    for reply in (announced, chunked):
        assert reply.status_code == 413
        assert "5000 bytes" in reply.json()["error"]["message"]


async def test_a_full_queue_is_a_429_that_says_when_to_come_back():
    engine = ScriptedEngine(script=[5], gate=threading.Semaphore(0))
    async with client_of(engine) as client:
        calls = [
            asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
            for _ in range(70)
        ]
        async with asyncio.timeout(30):
            while sum(call.done() for call in calls) < 6:
                await asyncio.sleep(0.002)
        engine.gate.release(10_000)
        replies = await asyncio.gather(*calls)
    statuses = [reply.status_code for reply in replies]
    assert (statuses.count(200), statuses.count(429)) == (64, 6)
    full = replies[statuses.index(429)]
    assert int(full.headers["retry-after"]) >= 1
    assert full.json()["error"]["type"] == "rate_limit_error"


async def test_a_full_server_refuses_before_it_reads_a_prompt_or_a_form():
    engine = ScriptedEngine(script=[5], gate=threading.Semaphore(0))
    form = {"structured_outputs": {"regex": "("}}  # a 400 as soon as it is compiled
    async with client_of(engine) as client:
        calls = [
            asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
            for _ in range(64)
        ]
        async with asyncio.timeout(30):
            while (
                await client.post("/v1/completions", json={"prompt": "x", **form})
            ).status_code == 400:
                await asyncio.sleep(0.002)
        refused = await client.post("/v1/completions", json={"prompt": [10**9], **form})
        assert refused.status_code == 429
        engine.gate.release(10_000)
        assert {reply.status_code for reply in await asyncio.gather(*calls)} == {200}
        asked = await client.post("/v1/completions", json={"prompt": "x", **form})
    assert asked.status_code == 400


async def test_an_engine_that_dies_ends_calls_with_a_500_streams_with_an_error_and_its_health():
    gate = threading.Semaphore(0)
    engine = ScriptedEngine(script=script("fox fox"), gate=gate, max_model_len=10**9)
    async with client_of(engine) as client:
        assert (await client.get("/health")).status_code == 200
        call = {"prompt": "x", "max_tokens": 10**8}
        unary = asyncio.create_task(client.post("/v1/completions", json=call))
        engine.gate.release()
        stream = asyncio.create_task(client.post("/v1/completions", json={**call, "stream": True}))
        async with asyncio.timeout(30):
            while len(engine.jobs) < 2:
                engine.gate.release()
                await asyncio.sleep(0.002)
        engine.fault = RuntimeError("secret path /root/x")
        engine.gate.release(10)
        reply, streamed = await asyncio.gather(unary, stream)
        health, ready = await client.get("/health"), await client.get("/ready")
        ping = await client.get("/ping")
        after = await client.post("/v1/completions", json=call)
    assert reply.status_code == after.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert events_of(streamed.text)[-1]["error"]["type"] == "server_error"
    assert "secret" not in reply.text + streamed.text + after.text
    assert (health.status_code, ready.status_code, ping.status_code) == (503, 503, 503)


async def test_health_says_alive_with_the_boot_decision_and_ready_says_ready():
    async with client_of(engine_saying()) as client:
        health, ready = await client.get("/health"), await client.get("/ready")
        ping = await client.get("/ping")
    assert (ping.status_code, ping.content) == (200, b"")
    assert health.status_code == ready.status_code == 200
    assert health.json()["status"] == "alive"
    assert health.json()["capture"] == {"count": 3}
    assert ready.json() == {"status": "ready"}


async def test_models_version_and_the_tokenizer_can_be_asked():
    async with client_of(engine_saying()) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [
            ("tiny", 64),
            ("tiny-alias", 64),
        ]
        for card in cards:
            assert (await client.get(f"/v1/models/{card['id']}")).json() == card
            assert (card["root"], card["parent"]) == ("owner/tiny", None)
        assert (await client.get("/version")).json() == {"version": "0.0.test"}
        tokens = (await client.post("/tokenize", json={"prompt": ANSWER})).json()
        assert tokens == {
            "count": len(script(ANSWER)),
            "max_model_len": 64,
            "tokens": script(ANSWER),
        }
        text = await client.post("/detokenize", json={"tokens": tokens["tokens"]})
        assert text.json() == {"prompt": ANSWER}
        chat = (await client.post("/tokenize", json={"messages": HELLO})).json()
        assert TOKENIZER.decode(chat["tokens"], skip_special_tokens=False).endswith("assistant\n")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        ("Basic key-one", 401),
        ("Bearer key-one", 200),
        ("bearer key-two", 200),
        ("Bearer key-öne".encode(), 401),
    ],
)
async def test_api_keys_guard_everything_but_probes(header, status):
    async with client_of(engine_saying(), api_keys=("key-one", "key-two")) as client:
        headers = {} if header is None else {"Authorization": header}
        for path in ("/v1/models", "/openapi.json"):
            reply = await client.get(path, headers=headers)
            assert reply.status_code == status
        reply = await client.post("/tokenize", json={"prompt": "x"}, headers=headers)
        assert reply.status_code == status
        if status == 401:
            assert reply.json()["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/ping", "/ready", "/is_sleeping", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200


async def test_the_openapi_document_resolves_every_reference():
    async with client_of(engine_saying()) as client:
        document = (await client.get("/openapi.json")).json()
    names = set(document["components"]["schemas"])
    references = {part.split('"')[0] for part in json.dumps(document).split("/schemas/")[1:]}
    assert references
    assert references <= names
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]
    assert "prompt" in body["content"]["application/json"]["schema"]["properties"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FIELDS = """prompt messages max_tokens temperature top_p top_k min_p seed stop stream n model user
    stream_options stop_token_ids ignore_eos tokens logprobs max_completion_tokens"""
fields = st.sampled_from(FIELDS.split())
bodies = (
    st.binary(max_size=30)
    | st.dictionaries(fields, json_values, max_size=4).map(lambda b: json.dumps(b).encode())
    | st.tuples(st.just({"prompt": "fox", "messages": HELLO, "tokens": [1]}), fields, json_values)
    .map(lambda drawn: {**drawn[0], drawn[1]: drawn[2]})
    .map(lambda b: json.dumps(b).encode())
)


@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]),
    sent=st.lists(bodies, min_size=1, max_size=8),
)
@settings(max_examples=40)
def test_no_body_is_a_500(path, sent):
    async def replies() -> list[httpx.Response]:
        async with client_of(engine_saying()) as client:
            return [await client.post(path, content=body) for body in sent]

    for reply in asyncio.run(replies()):
        assert reply.status_code in (200, 400, 404)
        if reply.status_code != 200:
            assert reply.json()["error"]["message"]
