"""What a coroutine holds of its request while the engine thread works on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from jaxserve.sched.outputs import RequestUpdate


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine took the request."""


Item = Accepted | RequestUpdate | Exception


class RequestStream:
    """The updates of one request, in order, ending after the one with a finish_reason.

    Iterating raises EngineDead when the engine ends first. Closing it early, also by leaving its
    ``async with`` block, aborts the request in the engine.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self._abort = abort
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._ended = False

    def put(self, item: Item) -> None:
        """Called on ``loop`` by the bridge."""
        self._items.put_nowait(item)

    async def accepted(self) -> None:
        """Returns once the engine took the request, raises what it raised instead."""
        item = await self._items.get()
        if isinstance(item, Exception):
            self._ended = True
            raise item

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestUpdate:
        if self._ended:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, Exception):
            self._ended = True
            raise item
        assert isinstance(item, RequestUpdate)
        self._ended = item.finish_reason is not None
        return item

    def close(self) -> None:
        """Aborts the request unless it has ended. May be called again."""
        if not self._ended:
            self._ended = True
            self._abort(self.request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()
