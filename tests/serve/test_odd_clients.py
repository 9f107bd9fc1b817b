"""Clients that read slowly, stop, send more than was asked for, or go at any byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Callable

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.serve.app import create_app
from jaxserve.serve.async_engine import AsyncEngine
from tests.engine_harness import build
from tests.serve_fakes import ScriptedEngine, app_parts, served, wait_until


@pytest.fixture(scope="module")
def server():
    """A URL, and what is true when nothing is left of any request."""
    engine, _ = build(num_blocks=100, max_model_len=128)
    bridge = AsyncEngine(engine, max_requests=64)
    shape = ScriptedEngine(script=[5], vocab_size=17, max_model_len=128)

    def nothing_left() -> bool:
        stats = engine.stats()
        idle = not engine.has_unfinished_requests() and bridge.num_open == 0
        return idle and stats.num_free_blocks == stats.num_blocks

    with served(create_app(app_parts(shape, engine=bridge))) as url:
        yield url, nothing_left
    asyncio.run(asyncio.wait_for(bridge.shutdown(0.0), 30))


def request(call: dict, *, path: str = "/v1/completions") -> bytes:
    body = json.dumps({"ignore_eos": True, "temperature": 0} | call).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def connect(url: str) -> socket.socket:
    return socket.create_connection((httpx.URL(url).host, httpx.URL(url).port), timeout=30)


def read(connection: socket.socket, enough: Callable[[bytes], bool], piece: int = 65536) -> bytes:
    """What came until it is enough, or until the server ended or reset the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while not enough(received) and (data := connection.recv(piece)):
            received += data
    return received


def serves(url: str, nothing_left: Callable[[], bool]) -> bool:
    """Whether a request is answered in full; waits for nothing to be left before and after it."""
    wait_until(nothing_left)
    call = {"prompt": [1], "max_tokens": 3, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json=call, timeout=30)
    wait_until(nothing_left)
    return reply.json()["usage"]["completion_tokens"] == 3


calls = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 16), min_size=1, max_size=40),
        "max_tokens": st.sampled_from([1, 2, 60]),
        "n": st.integers(1, 3),
        "stream": st.booleans(),
    }
)
endings = st.sampled_from(["close", "half-close", "reset"])


@given(call=calls, share=st.floats(0, 1), num_read=st.integers(0, 4000), ending=endings)
@settings(max_examples=25)
def test_a_client_may_go_at_any_byte_of_its_request_or_its_answer(
    server, call, share, num_read, ending
):
    url, nothing_left = server
    sent = request(call)
    sent = sent[: len(sent) if num_read else int(share * len(sent))]
    with connect(url) as connection:
        connection.sendall(sent)
        read(connection, lambda got: len(got) >= num_read, piece=max(1, num_read))
        if ending == "half-close":
            connection.shutdown(socket.SHUT_WR)
        elif ending == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert serves(url, nothing_left)


@given(
    after=st.sampled_from([b"\r\n", b"\0" * 300, b"hello\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"{}"])
    | st.binary(min_size=1, max_size=60),
    call=calls,
)
@settings(max_examples=25)
def test_bytes_after_a_request_harm_nobody(server, after, call):
    url, nothing_left = server
    with connect(url) as connection:
        connection.sendall(request(call | {"max_tokens": 3}) + after)
        answer = read(connection, lambda got: b"[DONE]" in got or b'"usage"' in got)
        assert answer.startswith(b"HTTP/1.1 200")
    assert serves(url, nothing_left)


@given(requests=st.lists(calls, min_size=2, max_size=4))
@settings(max_examples=15)
def test_requests_sent_at_once_on_one_connection_are_answered_in_their_order(server, requests):
    url, nothing_left = server
    asked = [call | {"max_tokens": 3 + place} for place, call in enumerate(requests)]
    options = {"stream_options": {"include_usage": True}}
    with connect(url) as connection:
        connection.sendall(b"".join(request(c | (options if c["stream"] else {})) for c in asked))
        answers = read(
            connection, lambda got: got.count(b'"completion_tokens":') == len(asked)
        ).split(b'"completion_tokens":')[1:]
    assert [int(answer.partition(b",")[0]) for answer in answers] == [
        call["max_tokens"] * call["n"] for call in asked
    ]
    assert serves(url, nothing_left)


def test_a_client_that_stops_reading_holds_up_nobody_and_costs_nothing_when_it_goes():
    engine = ScriptedEngine(script=[5], max_model_len=10**9)
    bridge = AsyncEngine(engine, max_requests=64)
    logged = []
    parts = app_parts(engine, engine=bridge, log=lambda event, fields: logged.append(fields))
    with served(create_app(parts)) as url:
        with connect(url) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            more = {"max_tokens": 20_000, "stream": True, "logprobs": 3}
            connection.sendall(request({"prompt": [1, 2]} | more))
            read(connection, lambda got: b"data: " in got, piece=512)
            other = {"prompt": [3], "max_tokens": 3}
            reply = httpx.post(f"{url}/v1/completions", json=other, timeout=30)
            assert reply.json()["usage"]["completion_tokens"] == 3
            wait_until(lambda: not engine.jobs)  # the engine does not wait for a reader
            assert httpx.get(f"{url}/version", timeout=30).status_code == 200
            lines = [(line["path"], line["client_gone"]) for line in logged]
            assert lines == [("/v1/completions", None), ("/version", None)]  # not its own yet
        wait_until(lambda: len(logged) == 3)
        assert logged[-1]["client_gone"] is True
        assert bridge.num_open == 0
    asyncio.run(asyncio.wait_for(bridge.shutdown(0.0), 30))


@given(pieces=st.lists(st.integers(1, 700), min_size=1, max_size=8))
@settings(max_examples=10)
def test_a_client_that_reads_in_small_pieces_gets_every_event(server, pieces):
    url, nothing_left = server
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with connect(url) as connection:
        connection.sendall(request({"prompt": [1], "max_tokens": 30} | options))
        received = b""
        while b"data: [DONE]" not in received:
            data = connection.recv(pieces[len(received) % len(pieces)])
            assert data
            received += data
    assert received.count(b'"finish_reason":null') >= 1
    assert b'"completion_tokens":30' in received
    assert serves(url, nothing_left)
