"""One log line a request, at its end, and the id that ties it to its answer."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.sched.outputs import RequestTimings
from jaxserve.serve.logs import Log

_RECORD = "jaxserve.record"
_SANE_ID = re.compile(r"[!-~]{1,256}")
# What probes and scrapers ask every few seconds is logged when debugging only.
_PROBES = frozenset({"/health", "/ping", "/ready", "/is_sleeping", "/metrics"})


@dataclass(slots=True)
class CallRecord:
    """What is known of one HTTP request; its handlers fill it in, the log reads it.

    Seconds are those of its slowest choice. ``ttft_s`` counts from the request's arrival;
    ``queue_s`` and ``prefill_s`` stay None where the engine was not the one to end a choice.
    """

    request_id: str
    model: str | None = None
    stream: bool | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    client_gone: bool = False

    def count(self, *, prompt: int = 0, cached: int = 0, output: int = 0) -> None:
        """Tokens of one more choice."""
        self.prompt_tokens = (self.prompt_tokens or 0) + prompt
        self.cached_tokens = (self.cached_tokens or 0) + cached
        self.output_tokens = (self.output_tokens or 0) + output

    def time(self, timings: RequestTimings) -> None:
        """Where the engine says a choice's time went."""
        self.queue_s = max(self.queue_s or 0.0, timings.queue_s)
        self.prefill_s = max(self.prefill_s or 0.0, timings.prefill_s)

    def fields(self) -> dict[str, Any]:
        """What the log shows. Nothing a client wrote but its id and the model it named."""
        return {
            "request_id": self.request_id,
            "model": self.model,
            "stream": self.stream,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "ttft_s": self.ttft_s,
            "queue_s": self.queue_s,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "finish_reason": ",".join(sorted(set(self.finish_reasons))) or None,
            "client_gone": self.client_gone or None,
        }


def record_of(scope: Scope) -> CallRecord:
    """The record of the request that ``scope`` describes."""
    return scope[_RECORD]


class RequestLog:
    """Gives every request an id and a record, its answer X-Request-Id, and the log a line.

    The id is the one the client sent where that is 1 to 256 visible ASCII characters.
    """

    def __init__(
        self,
        app: ASGIApp,
        log: Log,
        *,
        log_probes: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._log = log
        self._log_probes = log_probes
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived = self._clock()
        sent = Headers(scope=scope).get("x-request-id", "")
        record = CallRecord(sent if _SANE_ID.fullmatch(sent) else uuid.uuid4().hex)
        scope[_RECORD] = record
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            path = scope["path"]
            if self._log_probes or path not in _PROBES:
                request = {"method": scope["method"], "path": path[:256], "status": status}
                total = {"total_s": self._clock() - arrived}
                self._log("request", {**request, **record.fields(), **total})
