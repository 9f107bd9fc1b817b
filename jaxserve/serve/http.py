"""HTTP below the routes: bodies, disconnects, server-sent events and keys."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import EngineError, RequestRefused, RequestTimeout
from jaxserve.serve.request_log import record_of
from jaxserve.serve.responses import error_body

T = TypeVar("T")

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/ready", "/is_sleeping", "/metrics", "/version"})


class BodyTooLarge(RequestRefused):
    """413."""

    status = 413


class Forbidden(RequestRefused):
    """403."""

    status = 403
    type = "permission_error"


def refusal_response(error: RequestRefused | EngineError) -> JSONResponse:
    """The error as OpenAI writes it; an engine's fault is a 500 that keeps its details to us."""
    if isinstance(error, EngineError):
        return JSONResponse(refusal_body(error), 500)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    if isinstance(error, RequestTimeout):
        headers["x-should-retry"] = "false"  # OpenAI's clients would take the same time again
    return JSONResponse(refusal_body(error), error.status, headers)


def refusal_body(error: RequestRefused | EngineError) -> dict[str, Any]:
    """The ``error`` object of an exception."""
    if isinstance(error, RequestRefused):
        return error_body(error.message, error.type, error.param, error.code)
    return error_body("the engine failed; see the server's log", "server_error", None, None)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body of at most ``limit`` bytes. Raises BodyTooLarge, also before it has come."""
    announced = request.headers.get("content-length", "")
    too_large = BodyTooLarge(f"the body is larger than {limit} bytes")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise too_large
    return bytes(body)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; cancels it and raises ClientDisconnect if the client leaves first.

    Call it when the body has been read: whatever the client sends then is its end.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Sends server-sent events as they come and closes their source when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def pump() -> None:
            async with contextlib.aclosing(self._events) as events:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    # What has piled up for a slow reader must not keep the loop from the others,
                    # nor from seeing that the reader is gone.
                    await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await until_disconnect(receive, pump())
        except ClientDisconnect:
            record_of(scope).client_gone = True
        finally:
            self._close()  # a generator that was never started closes nothing by itself


class ApiKeys:
    """Lets requests with a known bearer key through; probes and metrics need none."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope):
            await self._app(scope, receive, send)
            return
        body = error_body(
            "a known api key is needed: Authorization: Bearer KEY",
            "invalid_request_error",
            None,
            "invalid_api_key",
        )
        response = JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # All keys are compared whatever the result: the time taken tells nothing.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(found)


class UnreadBodies:
    """Sees to what is left of a body when an answer is sent without it.

    A client that is still sending may read its answer only afterwards, and closing at once would
    reset its connection: ``drain_bytes`` more are read and dropped, for at most ``drain_s``. After
    a body that may hold more, or has no announced end, the connection is closed.
    """

    def __init__(self, app: ASGIApp, *, drain_bytes: int, drain_s: float = 5.0) -> None:
        self._app = app
        self._drain_bytes = drain_bytes
        self._drain_s = drain_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        ended = length in ("", "0") and "transfer-encoding" not in headers

        async def receive_until_end() -> Message:
            nonlocal ended
            message = await receive()
            ended = ended or not message.get("more_body", False)  # also of a disconnect
            return message

        async def send_and_drain(message: Message) -> None:
            if ended:
                await send(message)
            elif message["type"] == "http.response.start":
                if not length.isdecimal() or int(length[:20]) > self._drain_bytes:
                    MutableHeaders(scope=message)["connection"] = "close"
                await send(message)
            elif message.get("more_body", False):
                await send(message)
            else:
                await send({**message, "more_body": True})
                await self._drain(receive)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(scope, receive_until_end, send_and_drain)

    async def _drain(self, receive: Receive) -> None:
        dropped = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while dropped <= self._drain_bytes:
                    message = await receive()
                    dropped += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return
