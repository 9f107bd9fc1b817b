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
def server_of(engine: Stepwise, text: Text | None = None, **options: Any) -> Iterator[str]:
    bridge = Bridge(engine, max_requests=64, **options)
    text = text or Text(byte_level_tokenizer())
    engine.bridge = bridge
    engine.num_open = lambda: bridge.num_open

    def log(event: str, fields: Mapping[str, Any]) -> None:
        engine.logged.append(dict(fields))

    with served(create_app(app_parts(engine, engine=bridge, log=log, text=text))) as url:
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
    if stage == "between choices":
        call["n"] = NUM_ROWS + 2
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
        wanted = {"decoding": 5, "last token": 19, "between choices": 20 * NUM_ROWS + 2}[stage]
        while engine.inner.stats().generation_tokens < wanted:
            engine.let(1)
    if stage == "between choices":
        assert engine.num_open() == engine.inner.stats().num_running == 2
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "stage", ["queued", "prefilling", "decoding", "between choices", "last token"]
)
def test_a_client_that_leaves_gives_every_block_back_before_another_step_begins(stage, stream):
    # In seconds: what is left of the step under way. The server notices while that is stuck.
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
        connection = run_to(stage, engine, url, stream)
        num_left = 2 if stage == "between choices" else 1
        begun = engine.begun
        connection.close()
        wait_until(lambda: engine.bridge.given_up == num_left)
        if stage == "queued":
            engine.gate.release()
            wait_until(lambda: engine.inner.stats().num_waiting == 0)
            assert engine.inner.stats().num_running == NUM_ROWS
            others.close()
            wait_until(lambda: engine.bridge.given_up == 1 + NUM_ROWS)
        else:
            assert engine.begun == begun
            # Whoever draws the last token reads nothing more: its blocks are free already.
            taken = engine.inner.stats().num_free_blocks < engine.inner.stats().num_blocks
            assert taken == (stage != "last token")
        begun = engine.begun
        engine.gate.release()
        wait_until(lambda: engine.begun > begun or not engine.inner.has_unfinished_requests())
        assert engine.inner.stats().num_free_blocks == engine.inner.stats().num_blocks
        engine.gate.release(100)
        wait_until(lambda: engine.all_free)
        wait_until(lambda: len(engine.logged) == 1 + NUM_ROWS * (stage == "queued"))
        for line in engine.logged:
            assert line["client_gone"] is True
            assert "abort" in line["finish_reason"]
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_while_its_prompt_is_read_leaves_nothing_behind(n, stream):
    engine, text = Stepwise(), SlowText()
    with server_of(engine, text) as url:
        connection = send(url, prompt="slow", max_tokens=60, n=n, stream=stream)
        try:
            wait_until(lambda: text.num_begun == 1)
            connection.close()
        finally:
            text.gate.set()
        wait_until(lambda: len(engine.logged) == 1)
        assert engine.logged[0]["client_gone"] is True
        engine.gate.release(2)  # at most one step had begun to look at it; the next reports its end
        wait_until(lambda: engine.all_free and engine.num_open() == 0)


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
            wait_until(lambda: engine.num_open() == 0)
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
        wait_until(lambda: engine.all_free)
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
        wait_until(lambda: engine.num_open() == 64 and engine.begun == 1)
        for stream in (False, True):
            call = {"prompt": [1], "stream": stream}
            reply = httpx.post(f"{url}/v1/completions", json=call, timeout=30)
            assert reply.status_code == 429
            assert int(reply.headers["retry-after"]) >= 1
        assert (engine.begun, engine.inner.stats().num_steps) == (1, 0)  # the step is stuck still
