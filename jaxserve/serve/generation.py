"""A request's way from the engine's tokens to the text a client gets, streamed or not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from jaxserve.config import SamplingParams
from jaxserve.errors import NotReady
from jaxserve.sched.outputs import EngineStats
from jaxserve.sched.request import TokenMask
from jaxserve.serve.detokenize import Detokenizer
from jaxserve.serve.metrics import RequestMetrics
from jaxserve.serve.streams import RequestStream


class EngineClient(Protocol):
    """What the routes need of AsyncEngine."""

    async def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        mask: TokenMask | None = None,
        cache_salt: str = "",
        group: str | None = None,
    ) -> RequestStream: ...
    @property
    def max_requests(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    @property
    def accepting(self) -> bool: ...
    @property
    def paused(self) -> bool: ...
    @property
    def seconds_since_tick(self) -> float: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that became certain. ``num_output_tokens`` counts from the start."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    num_output_tokens: int


async def text_deltas(
    index: int, stream: RequestStream, detokenizer: Detokenizer, metrics: RequestMetrics
) -> AsyncGenerator[TextDelta, None]:
    """The text of one request; empty pieces are left out, the last delta has a finish_reason.

    Leaving early aborts the request. Raises NotReady when the server ends it, EngineDead.
    """
    reason = "abort"
    num_prompt = num_output = 0
    try:
        async with stream:
            async for update in stream:
                metrics.update(update)
                num_prompt = update.num_prompt_tokens
                num_output = update.num_output_tokens - len(update.new_token_ids)
                pieces: list[str] = []
                for token_id in update.new_token_ids:
                    num_output += 1
                    metrics.token()
                    if token_id != update.stop_token_id:
                        pieces.append(detokenizer.push(token_id))
                    if detokenizer.stop_string is not None:
                        break
                finish = update.finish_reason
                if finish == "abort":
                    raise NotReady("the server ended this request: it is stopping")
                if finish is not None:
                    pieces.append(detokenizer.flush())
                if detokenizer.stop_string is not None:
                    finish = "stop"
                text = "".join(pieces)
                if finish is not None:
                    stream.close()
                    reason = finish
                if text or finish is not None:
                    yield TextDelta(index, text, finish, num_output)
                if finish is not None:
                    return
    finally:
        metrics.end(reason, num_prompt, num_output)


async def merged(
    sources: Sequence[AsyncGenerator[TextDelta, None]],
) -> AsyncGenerator[TextDelta, None]:
    """The deltas of all sources as they come. The first error ends the others."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as only:
            async for delta in only:
                yield delta
        return
    queue: asyncio.Queue[TextDelta | BaseException | None] = asyncio.Queue()

    async def pump(source: AsyncGenerator[TextDelta, None]) -> None:
        try:
            async for delta in source:
                queue.put_nowait(delta)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
