"""What stands before the routes: ids, origins, and bodies that nobody reads."""

from __future__ import annotations

import contextlib
import socket
import threading

import httpx
import pytest

from jaxserve.serve.app import create_app
from jaxserve.serve.async_engine import AsyncEngine
from jaxserve.serve.launch import Front
from jaxserve.serve.logs import no_log
from tests.serve_fakes import ScriptedEngine, app_parts, client_of, served

LIMIT = 50_000


@pytest.mark.parametrize("sent", ["abc", "a" * 256, "req_01:/+=@~"])
async def test_a_sane_request_id_is_echoed_on_every_answer(sent):
    async with client_of(ScriptedEngine(script=[5]), api_keys=("k",)) as client:
        for path in ("/health", "/v1/models", "/nothing"):
            reply = await client.get(path, headers={"X-Request-Id": sent})
            assert reply.headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", [None, "", "two words", "a" * 257, "tab\tbed", b"\xe9"])
async def test_where_no_sane_request_id_came_one_is_made(sent):
    async with client_of(ScriptedEngine(script=[5])) as client:
        headers = {} if sent is None else {"X-Request-Id": sent}
        made = [
            (await client.get("/version", headers=headers)).headers["x-request-id"]
            for _ in range(2)
        ]
    assert made[0] != made[1]
    assert all(len(request_id) == 32 for request_id in made)


async def test_an_answers_id_holds_the_requests_id():
    async with client_of(ScriptedEngine(script=[5])) as client:
        reply = await client.post(
            "/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "abc"}
        )
    assert reply.json()["id"] == "cmpl-abc"


async def test_web_pages_of_other_origins_may_not_call_unless_they_are_named():
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with client_of(ScriptedEngine(script=[5])) as client:
        reply = await client.options("/v1/completions", headers=preflight)
        assert (reply.status_code, "access-control-allow-origin" in reply.headers) == (405, False)
        reply = await client.get("/version", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in reply.headers
    named = {"allowed_origins": ("https://a.example",), "api_keys": ("k",)}
    async with client_of(ScriptedEngine(script=[5]), **named) as client:
        reply = await client.options("/v1/completions", headers=preflight)
        assert reply.status_code == 200  # a browser sends no key with it
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        other = await client.options(
            "/v1/completions", headers={**preflight, "Origin": "https://b.example"}
        )
        assert "access-control-allow-origin" not in other.headers
        refused = await client.get("/v1/models", headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"


@pytest.fixture(scope="module")
def address():
    parts = app_parts(ScriptedEngine(script=[5]), max_body_bytes=LIMIT, api_keys=("k",))
    with served(create_app(parts)) as url:
        yield httpx.URL(url).host, httpx.URL(url).port
    assert isinstance(parts.engine, AsyncEngine)


def head(path: str, *lines: str) -> bytes:
    given = ("Host: x", "Authorization: Bearer k", *lines)
    return "\r\n".join((f"POST {path} HTTP/1.1", *given, "", "")).encode()


def read_to_end(connection: socket.socket) -> bytes:
    """What comes before the connection ends, or is reset: those bytes were there to be read."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            received += piece
    return received


@pytest.mark.parametrize("path", ["/v1/completions", "/nothing", "/health"])
def test_an_endless_body_is_answered_and_its_connection_closed(address, path):
    """The client sends for as long as it can: that ends, and the answer is there to be read."""
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(head(path, "Transfer-Encoding: chunked"))
        answer: list[bytes] = []
        reader = threading.Thread(target=lambda: answer.append(read_to_end(connection)))
        reader.start()
        sent = 0
        with contextlib.suppress(ConnectionError):
            while reader.is_alive() and sent < 100 * LIMIT:
                connection.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
                sent += 4096
        reader.join()
    status = {"/v1/completions": b"413", "/nothing": b"404", "/health": b"405"}[path]
    assert answer[0].startswith(b"HTTP/1.1 " + status)
    assert b"connection: close" in answer[0].lower()
    assert b'"error"' in answer[0]


@pytest.mark.parametrize("size", [LIMIT + 1, 2 * LIMIT])
def test_a_client_that_sends_all_before_it_reads_can_read_its_413(address, size):
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(head("/v1/completions", f"Content-Length: {size}"))
        connection.sendall(b" " * size)
        assert b"413" in read_to_end(connection).split(b"\r\n")[0]


def test_a_refused_request_with_a_small_body_keeps_its_connection(address):
    with socket.create_connection(address, timeout=30) as connection:
        for _ in range(3):
            request = head("/nothing", "Content-Length: 5").replace(b"Bearer k", b"Bearer x")
            connection.sendall(request)
            connection.sendall(b"hello")
            answer = connection.recv(65536)
            while b"invalid_api_key" not in answer:
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 401")


async def test_until_the_boot_is_over_ready_says_what_is_done_and_what_is_left():
    now = [100.0]
    front = Front(no_log, clock=lambda: now[0])
    transport = httpx.ASGITransport(front)
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
        first = await client.get("/ready")
        front.phase = "3 of 10 executables"
        front.report("executables", 3, 10)
        now[0] = 112.5
        reply = await client.get("/ready", headers={"X-Request-Id": "abc"})
        page = await client.get("/")
    assert first.json() == {
        "status": "starting",
        "phase": "starting",
        "progress": None,
        "seconds": 0.0,
    }
    assert (reply.status_code, reply.headers["x-request-id"]) == (503, "abc")
    assert reply.json() == {
        "status": "starting",
        "phase": "3 of 10 executables",
        "progress": {"what": "executables", "done": 3, "total": 10},
        "seconds": 12.5,
    }
    assert page.status_code == 200
    assert "text/html" in page.headers["content-type"]
