"""Over real sockets: real clients, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading

import httpx
import openai
import pytest

from jaxserve.serve.app import create_app
from jaxserve.serve.async_engine import AsyncEngine
from tests.serve_fakes import ScriptedEngine, app_parts, byte_level_tokenizer, served, wait_until

TOKENIZER = byte_level_tokenizer()
ANSWER = "grüße 😀 the quick brown fox 你好"
HELLO = [{"role": "user", "content": "hello"}]


@contextlib.contextmanager
def server_of(engine: ScriptedEngine):
    parts = app_parts(engine)
    try:
        with served(create_app(parts)) as url:
            yield url
    finally:
        if engine.gate is not None:
            engine.gate.release(100_000)
        assert isinstance(parts.engine, AsyncEngine)
        asyncio.run(asyncio.wait_for(parts.engine.shutdown(0.0), 30))


@pytest.fixture(scope="module")
def url():
    eos = TOKENIZER.token_to_id("<|im_end|>")
    script = [*TOKENIZER.encode(ANSWER, add_special_tokens=False).ids, eos]
    with server_of(ScriptedEngine(script=script, eos_token_id=eos)) as url:
        yield url


def test_the_openai_client_chats_streamed_and_not(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(model="tiny", messages=HELLO)
        assert whole.choices[0].message.content == ANSWER
        assert whole.choices[0].finish_reason == "stop"
        chunks = list(
            client.chat.completions.create(
                model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == ANSWER
        assert chunks[-1].usage == whole.usage
        assert [model.id for model in client.models.list()] == ["tiny", "tiny-alias"]
        assert client.models.retrieve("tiny-alias").id == "tiny-alias"


def test_the_openai_client_completes_streamed_and_not(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        asked = {"model": "tiny", "prompt": "fox", "max_tokens": 60}
        assert client.completions.create(**asked).choices[0].text == ANSWER
        chunks = client.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER


def test_the_openai_client_raises_its_own_errors(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.completions.create(model="gpt", prompt="x")
        with pytest.raises(openai.BadRequestError, match="must be in") as refused:
            client.completions.create(model="tiny", prompt="x", n=200)
        assert refused.value.param == "n"


async def test_the_async_openai_client_runs_many_streams_at_once(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

        async def answer() -> str:
            stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        assert await asyncio.gather(*(answer() for _ in range(16))) == [ANSWER] * 16


def call_by_hand(url: str, body: dict) -> socket.socket:
    host, port = httpx.URL(url).host, httpx.URL(url).port
    assert port is not None
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, port), timeout=30)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
    )
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["fox", ["fox", "dog", "the"]])
def test_a_client_that_leaves_while_tokens_come_has_its_requests_aborted(stream, prompt):
    count = 1 if isinstance(prompt, str) else len(prompt)
    engine = ScriptedEngine(script=[5], max_model_len=10**9, gate=threading.Semaphore(0))
    with server_of(engine) as url:
        body = {"prompt": prompt, "stream": stream, "max_tokens": 10**8}
        with call_by_hand(url, body) as connection:
            wait_until(lambda: (engine.gate.release() or len(engine.jobs)) == count)
            if stream:
                engine.gate.release(10)
                received = b""
                while b"data: " not in received:
                    piece = connection.recv(4096)
                    assert piece
                    received += piece
        wait_until(lambda: (engine.gate.release() or len(engine.aborted)) == count)
        assert not engine.jobs
        ended = f'"abort",model_name="tiny"}} {count}.0'
        wait_until(lambda: ended in httpx.get(f"{url}/metrics").text)


def test_a_client_that_leaves_before_it_sent_its_body_costs_nothing():
    engine = ScriptedEngine(script=[5])
    with server_of(engine) as url:
        host, port = httpx.URL(url).host, httpx.URL(url).port
        with socket.create_connection((host, port), timeout=30) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
            connection.sendall(b"Content-Length: 100\r\n\r\n{")
        assert httpx.get(f"{url}/health").status_code == 200
        assert not engine.seen


def test_a_client_that_reads_slowly_gets_every_token():
    engine = ScriptedEngine(script=[5], max_model_len=10**9)
    with server_of(engine) as url:
        body = {"prompt": "fox", "stream": True, "max_tokens": 20_000, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            first = next(lines)
            wait_until(lambda: not engine.jobs)  # the engine is done before we read on
            rest = list(lines)
        assert first.startswith("data: ")
        assert sum('"finish_reason":null' in line for line in rest) == 19_999
        assert rest[-2:] == ["data: [DONE]", ""]
