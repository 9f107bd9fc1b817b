"""The clients people have, over a socket, against a tiny model: what each asks and how it reads."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
from typing import Any

import httpx
import jax
import numpy as np
import openai
import pytest
from flax import nnx
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from tests.tiny_server import TOKENIZER, tiny_llm, tiny_server

HELLO: list[Any] = [{"role": "user", "content": "the quick brown fox"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}


class Place(BaseModel):
    """An answer's form, as users of the openai package write one."""

    code: int = Field(ge=0, le=99)
    capital: bool


@pytest.fixture(scope="module")
def url():
    with tiny_server() as url:
        yield url


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_client_streams_what_it_gets_whole(client):
    asked = {"model": "tiny", "messages": HELLO, "seed": 3, "n": 2, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    said = ["", ""]
    for chunk in client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == [choice.message.content for choice in whole.choices]
    assert chunk.usage.completion_tokens == whole.usage.completion_tokens
    assert chunk.usage.completion_tokens == sum(len(c.logprobs.content) for c in whole.choices)


def test_the_openai_client_parses_an_answer_into_its_form(client):
    answer = client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Place, seed=1
    )
    place = answer.choices[0].message.parsed
    assert isinstance(place, Place)
    assert place == Place.model_validate_json(answer.choices[0].message.content)


def test_the_openai_client_sends_other_engines_fields_in_its_extra_body(client):
    asked = {"model": "tiny", "prompt": "the lazy dog", "max_tokens": 8}
    greedy = client.completions.create(**asked, temperature=0, extra_body={"ignore_eos": True})
    extra = {
        "top_k": 1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    answer = client.completions.create(**asked, temperature=1.0, extra_body=extra)
    ids = answer.choices[0].token_ids
    assert len(ids) == 8
    assert answer.choices[0].text == TOKENIZER.decode(ids, skip_special_tokens=False)
    assert TOKENIZER.decode(ids) == greedy.choices[0].text


def test_the_openai_client_is_told_by_name_that_tools_are_not_served(client):
    for asked in ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="tiny", messages=HELLO, **asked)
        assert refused.value.param in asked
        assert refused.value.code == "unsupported_field"
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, tools=[], tool_choice="none", max_tokens=2
    )
    assert answer.choices[0].message.tool_calls is None


async def test_the_async_openai_client_runs_more_streams_than_there_are_rows(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def stream(seed):
            chunks = await client.completions.create(
                model="tiny",
                prompt=["fox", "dog"],
                seed=seed,
                max_tokens=10,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            texts = ["", ""]
            async for chunk in chunks:
                texts[chunk.choices[0].index] += chunk.choices[0].text
            return texts

        told = await asyncio.gather(*(stream(i % 3) for i in range(9)))
    assert told[:3] == told[3:6] == told[6:]
    assert told[0] != told[1]


def test_raw_server_sent_events_are_framed_as_the_standard_says(url):
    body = {"messages": HELLO, "max_tokens": 5, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in reply.headers
        frames = "".join(reply.iter_text()).split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    events = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert len({event["id"] for event in events}) == 1
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 5


def curl(*args: str) -> str:
    found = shutil.which("curl")
    if found is None:
        pytest.skip("NOT CHECKED: there is no curl on this machine")
    done = subprocess.run(
        [found, "--silent", "--show-error", "--max-time", "60", *args],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_curl_gets_models_a_completion_and_a_stream(url):
    assert [card["id"] for card in json.loads(curl(f"{url}/v1/models"))["data"]] == ["tiny"]
    body = {"model": "tiny", "prompt": ["fox", "dog"], "max_tokens": 4, "temperature": 0}
    asked = ["-H", "Content-Type: application/json", f"{url}/v1/completions", "-d"]
    whole = json.loads(curl(*asked, json.dumps(body)))
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    streamed = curl("--no-buffer", *asked, json.dumps({**body, "stream": True}))
    lines = streamed.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    texts = ["", ""]
    for line in lines[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    status = ["--output", "/dev/null", "--write-out", "%{http_code}"]
    assert curl(*status, *asked, '{"prompt": "x", "top_kk": 1}') == "400"


def loglikelihoods(answer: dict[str, Any], context_lens: list[int]) -> list[tuple[float, bool]]:
    """As lm-eval's local-completions reads an answer: the last token is the one generated."""
    read = []
    for choice, context in zip(answer["choices"], context_lens, strict=True):
        values = choice["logprobs"]["token_logprobs"][context:-1]
        tops = choice["logprobs"]["top_logprobs"][context:-1]
        greedy = all(v == max(top.values()) for v, top in zip(values, tops, strict=True))
        read.append((sum(values), greedy))
    return read


def own_logprobs(sequences: list[list[int]]) -> np.ndarray:
    """float32 [sequences, tokens, V] of the module's whole forward, without engine or pool."""
    module = tiny_llm()[1]
    longest = max(map(len, sequences))
    padded = [sequence + [0] * (longest - len(sequence)) for sequence in sequences]
    forward = nnx.jit(lambda module, tokens: jax.nn.log_softmax(module(tokens), axis=-1))
    return np.asarray(forward(module, np.asarray(padded, np.int32)))


def test_an_evaluation_harness_reads_the_models_own_loglikelihoods(url):
    completions = f"{url}/v1/completions"
    context = TOKENIZER.encode("again and again").ids
    drawn = {"prompt": context, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
    greedy = httpx.post(completions, json=drawn, timeout=60).json()["choices"][0]["token_ids"]
    pairs = [(context, greedy), (context, [50, 60, 70]), (context[:2], [9]), (greedy, context)]
    asked = {
        "model": "tiny",
        "prompt": [context + rest for context, rest in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = httpx.post(completions, json=asked, timeout=60).json()
    got = loglikelihoods(answer, [len(context) for context, _ in pairs])
    own = own_logprobs(asked["prompt"])
    for (context, rest), logprobs, (value, is_greedy) in zip(pairs, own, got, strict=True):
        rows = logprobs[len(context) - 1 :][: len(rest)]
        assert value == pytest.approx(float(rows[range(len(rest)), rest].sum()), abs=2e-4)
        assert is_greedy == (rows.argmax(axis=1).tolist() == rest)
    assert [is_greedy for _, is_greedy in got][:2] == [True, False]
    alone = httpx.post(completions, json={**asked, "max_tokens": 0}, timeout=60).json()
    for with_one, without in zip(answer["choices"], alone["choices"], strict=True):
        values = with_one["logprobs"]["token_logprobs"][:-1]
        assert without["logprobs"]["token_logprobs"][1:] == pytest.approx(values[1:], abs=2e-4)


# What other projects' scripts send, field by field: lm-eval's local clients, vLLM's bench and its
# examples. Each is answered as it is.
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
EVERY_USAGE = {"stream": True, "stream_options": {**USAGE["stream_options"]}}
EVERY_USAGE["stream_options"]["continuous_usage_stats"] = True
PARTS = [{"role": "user", "content": [{"type": "text", "text": "the quick"}]}]
SENT = {
    "lm-eval generates": {
        **{"prompt": [[50, 60, 70]], "model": "tiny", "max_tokens": 8, "temperature": 0},
        **{"stop": ["\n\n", "."], "seed": 1234},
    },
    "lm-eval chats": {
        "messages": [{"role": "user", "content": "the quick", "type": "text"}],
        **{"model": "tiny", "max_tokens": 8, "temperature": 0, "stop": ["\n"], "seed": 1234},
    },
    "vllm bench completes": {
        **{"model": "tiny", "prompt": "the quick", "repetition_penalty": 1.0, "max_tokens": 8},
        **{"logprobs": None, **USAGE, "ignore_eos": True, "temperature": 0.0, "top_p": 1.0},
    },
    "an older vllm bench completes": {
        **{"model": "tiny", "prompt": "the quick", "temperature": 0.0, "best_of": 1},
        **{"max_tokens": 8, "logprobs": None, **EVERY_USAGE, "ignore_eos": True},
    },
    "vllm bench chats": {
        **{"model": "tiny", "messages": PARTS, "max_completion_tokens": 8},
        **{**EVERY_USAGE, "ignore_eos": True, "temperature": 0.0},
    },
    "vllm's completion example": {
        **{"model": "tiny", "prompt": "A robot may not", "echo": False, "n": 2},
        **{"stream": True, "logprobs": 3},
    },
    "vllm's chat page example": {
        **{"model": "tiny", "messages": HELLO, "temperature": 0.8, "stream": True},
        **{"max_tokens": 8, "repetition_penalty": 1, "stop_token_ids": []},
    },
}


@pytest.mark.parametrize("script", SENT)
def test_what_the_scripts_of_other_projects_send_is_answered(url, script):
    body = SENT[script]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = httpx.post(url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        assert len(reply.json()["choices"]) == 1
        return
    frames = reply.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert {c["index"] for chunk in chunks for c in chunk["choices"]} == set(
        range(body.get("n", 1))
    )
    if "stream_options" in body:
        assert chunks[-1]["usage"]["completion_tokens"] == 8
        every = "continuous_usage_stats" in body["stream_options"]
        assert all((chunk["usage"] is not None) == every for chunk in chunks[:-1])


def test_a_bench_that_is_told_no_model_finds_one_and_its_checkpoint(url):
    card = httpx.get(f"{url}/v1/models").json()["data"][0]
    assert (card["id"], card["root"]) == ("tiny", "tiny")


def test_langchain_chats_streams_and_reads_what_an_answer_cost(url):
    chat = ChatOpenAI(
        model="tiny",
        base_url=f"{url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        max_retries=0,
        stream_usage=True,
        max_completion_tokens=8,
    )
    whole = chat.invoke("the quick brown fox")
    chunks = list(chat.stream("the quick brown fox"))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    added = chunks[0]
    for chunk in chunks[1:]:
        added += chunk
    assert isinstance(added, AIMessageChunk)
    for answer in (whole, added):
        assert answer.usage_metadata is not None
        assert 1 <= answer.usage_metadata["output_tokens"] <= 8
    formed = chat.with_structured_output(Place, method="json_schema")
    drawn = {"temperature": 1.0, "seed": 1, "max_completion_tokens": 90}
    assert isinstance(formed.invoke("the quick brown fox", **drawn), Place)
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke("the fox")
    entries = scored.response_metadata["logprobs"]["content"]
    assert all(math.isfinite(entry["logprob"]) for entry in entries)
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat.bind_tools([TOOL]).invoke("the fox")
