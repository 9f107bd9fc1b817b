"""Clients that leave, requests that take too long, full queues: every block comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest

from jaxserve.serve.app import create_app
from jaxserve.serve.async_engine import AsyncEngine
from jaxserve.serve.text import Text
from tests.engine_harness import build
from tests.serve_fakes import (
    ScriptedEngine,
    app_parts,
    byte_level_tokenizer,
    served,
    wait_until,
)

NUM_ROWS = 4


class Bridge(AsyncEngine):
    """Knows how many requests were given up, also while a step is stuck."""

    given_up = 0

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self.given_up += 1


class Stepwise:
    """The real engine over the fake device; each step waits for a permit."""

    bridge: Bridge

    def __init__(self) -> None:
        self.inner, _ = build(num_blocks=2100, max_num_seqs=NUM_ROWS, max_model_len=4096)
        self.gate = threading.Semaphore(0)
        self.begun = 0
        self.logged: list[dict[str, Any]] = []
        self.num_open: Callable[[], int] = int
        self.vocab_size, self.max_model_len = 17, 4096

    def step(self) -> Any:
        self.begun += 1
        self.gate.acquire()
        return self.inner.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def let(self, steps: int) -> None:
        """Lets so many steps run, and waits until they have."""
        target = self.begun + steps
        self.gate.release(steps)
        wait_until(lambda: self.begun >= target)

    @property
    def all_free(self) -> bool:
        stats = self.inner.stats()
        return not self.inner.has_unfinished_requests() and (
            stats.num_free_blocks == stats.num_blocks
        )


@contextlib.contextmanager
def server_of(engine: Stepwise, **options: Any) -> Iterator[str]:
    bridge = Bridge(engine, max_requests=64, **options)
    engine.bridge = bridge
    engine.num_open = lambda: bridge.num_open

    def log(event: str, fields: Mapping[str, Any]) -> None:
        engine.logged.append(dict(fields))

    with served(create_app(app_parts(engine, engine=bridge, log=log))) as url:
        try:
            yield url
        finally:
            engine.gate.release(10**6)
    asyncio.run(asyncio.wait_for(bridge.shutdown(0.0), 30))


def send(url: str, **call: Any) -> socket.socket:
    """A request on a connection of its own; nothing of its answer is read."""
    return post(url, "/v1/completions", {"ignore_eos": True, "temperature": 0} | call)


def post(url: str, path: str, fields: Mapping[str, Any]) -> socket.socket:
    body = json.dumps(fields).encode()
    connection = socket.create_connection((httpx.URL(url).host, httpx.URL(url).port), timeout=30)
    connection.sendall(
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
        % (path.encode(), len(body), body)
    )
    return connection


def run_to(stage: str, engine: Stepwise, url: str, stream: bool) -> socket.socket:
    """A request at the stage, held there until a step is let; the engine was idle, or is full."""
    long = stage == "prefilling"  # a step computes 40 tokens of a prompt
    call = {"prompt": [1] * (60 if long else 3), "max_tokens": 3 if long else 20}
    connection = send(url, **call, stream=stream)
    if stage == "queued":
        wait_until(lambda: engine.num_open() == NUM_ROWS + 1)
        engine.let(2)
        assert engine.inner.stats().num_waiting == 1
        return connection
    wait_until(lambda: engine.begun == 1)
    if long:
        engine.let(1)
        assert engine.inner.stats().scheduled_tokens == 40
    else:
        wanted = 19 if stage == "last token" else 5
        while engine.inner.stats().generation_tokens < wanted:
            engine.let(1)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["queued", "prefilling", "decoding", "last token"])
def test_a_client_that_leaves_gives_every_block_back_at_once(stage, stream):
    engine = Stepwise()
    with server_of(engine) as url, contextlib.ExitStack() as others:
        if stage == "queued":
            for row in range(NUM_ROWS):
                others.enter_context(send(url, prompt=[row + 1], max_tokens=60))
                wait_until(
                    lambda row=row: (
                        (row and engine.gate.release())
                        or engine.inner.stats().num_running + engine.inner.stats().num_waiting > row
                    )
                )
        run_to(stage, engine, url, stream).close()
        wait_until(lambda: engine.bridge.given_up == 1, 5.0)
        if stage == "queued":
            wait_until(lambda: engine.gate.release() or engine.inner.stats().num_waiting == 0, 5.0)
            assert engine.inner.stats().num_running == NUM_ROWS
            others.close()
            wait_until(lambda: engine.bridge.given_up == 1 + NUM_ROWS, 5.0)
        wait_until(lambda: engine.gate.release() or engine.all_free, 5.0)
        engine.gate.release(100)
        wait_until(lambda: len(engine.logged) == 1 + NUM_ROWS * (stage == "queued"))
        for line in engine.logged:
            assert line["client_gone"] is True
            assert line["finish_reason"] == "abort"
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_a_paused_server_gives_its_place_back(stream):
    engine = Stepwise()
    with server_of(engine) as url:
        asyncio.run(engine.bridge.pause("abort"))
        clients = [send(url, prompt=[1], n=n, stream=stream) for n in (1, 3)]
        wait_until(lambda: engine.num_open() == 4)
        for client in clients:
            client.close()
        try:
            wait_until(lambda: engine.num_open() == 0, 5.0)
        finally:
            asyncio.run(engine.bridge.resume())  # else the server waits for its requests for ever
        wait_until(lambda: len(engine.logged) == 2)
        assert all(line["client_gone"] for line in engine.logged)
        assert not engine.inner.has_unfinished_requests()


class SlowText(Text):
    """Takes as long as the test likes over one prompt."""

    def __init__(self) -> None:
        super().__init__(byte_level_tokenizer())
        self.gate = threading.Event()
        self.num_begun = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if text == "slow":
            self.num_begun += 1
            self.gate.wait(60)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_clients_of_the_tokenizer_hold_up_no_other_and_leave_the_line_when_they_go():
    engine, text, logged = ScriptedEngine(script=[5]), SlowText(), []
    bridge = AsyncEngine(engine, max_requests=64)
    parts = app_parts(engine, engine=bridge, text=text, log=lambda *line: logged.append(line))
    with served(create_app(parts)) as url:
        try:
            # More than the threads that asyncio lends, wherever this runs.
            clients = [post(url, "/tokenize", {"prompt": "slow"}) for _ in range(40)]
            wait_until(lambda: text.num_begun == 2)
            call = {"prompt": "fox", "max_tokens": 1}
            assert httpx.post(f"{url}/v1/completions", json=call, timeout=30).status_code == 200
            for client in clients:
                client.close()
            wait_until(lambda: len(logged) == 41)
        finally:
            text.gate.set()
        assert httpx.post(f"{url}/tokenize", json={"prompt": "fox"}, timeout=30).is_success
        assert text.num_begun == 2
    asyncio.run(asyncio.wait_for(bridge.shutdown(0.0), 30))


@pytest.mark.parametrize("stage", ["prefilling", "decoding"])
def test_a_request_that_takes_too_long_is_told_and_gives_every_block_back(stage):
    now = [0.0]
    engine = Stepwise()
    with server_of(engine, request_timeout_s=30.0, clock=lambda: now[0]) as url:
        unary = run_to(stage, engine, url, False)
        streamed = send(url, prompt=[2], max_tokens=60, stream=True)
        wait_until(lambda: engine.num_open() == 2)
        engine.let(2)
        now[0] = 31.0
        engine.gate.release(3)
        wait_until(lambda: engine.all_free, 5.0)
        answer = unary.recv(65536)
        assert answer.startswith(b"HTTP/1.1 504")
        assert b"longer than 30 s (--request-timeout)" in answer
        assert b"x-should-retry: false" in answer
        received = b""
        while b"timeout_error" not in received:
            piece = streamed.recv(65536)
            assert piece
            received += piece
        engine.gate.release(100)
        for connection in (unary, streamed):
            connection.close()


def test_a_full_queue_refuses_at_once_while_a_step_is_stuck():
    engine = Stepwise()
    with server_of(engine) as url, contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(send(url, prompt=[1], max_tokens=5))
        wait_until(lambda: engine.num_open() == 64)
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": [1]}, timeout=30)
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
