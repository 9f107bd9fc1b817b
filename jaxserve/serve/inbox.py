"""What the engine thread is asked, one message at a time, and the engine it asks."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict

from jaxserve.config import SamplingParams
from jaxserve.sched.outputs import EngineStats, RequestUpdate
from jaxserve.sched.request import TokenMask
from jaxserve.serve.streams import RequestStream

PauseMode = Literal["abort", "wait", "keep"]


class Engine(Protocol):
    """What the engine thread calls; nothing else ever touches the engine."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        mask: TokenMask | None = None,
        cache_salt: str = "",
        group: str | None = None,
    ) -> None: ...
    def abort_request(self, request_id: str) -> None: ...
    def step(self) -> list[RequestUpdate]: ...
    def has_unfinished_requests(self) -> bool: ...
    def audit(self) -> None: ...
    def stats(self) -> EngineStats: ...


class EngineOptions(TypedDict):
    """What Engine.add_request takes besides a prompt and its sampling."""

    mask: TokenMask | None
    cache_salt: str
    group: str | None


@dataclass(frozen=True, slots=True)
class Add:
    """A new request; ``deadline`` is when it has taken too long, of the bridge's clock."""

    stream: RequestStream
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    options: EngineOptions
    deadline: float


@dataclass(frozen=True, slots=True)
class Abort:
    """Its reader is gone."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish what runs until ``deadline`` (of the bridge's clock), abort the rest, and end."""

    deadline: float


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the engine, to run between two steps."""

    function: Callable[[Any], Any]
    result: concurrent.futures.Future[Any]

    def run(self, engine: object) -> None:
        """Sets the result, unless the caller has given up."""
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            value = self.function(engine)
        except BaseException as error:
            self.result.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            self.result.set_result(value)


Message = Add | Abort | Stop | Call
