"""A request's way from the engine's tokens to the text a client gets, streamed or not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Literal, NamedTuple, Protocol

from jaxserve.config import SamplingParams
from jaxserve.errors import NotReady, RequestFailed
from jaxserve.sched.outputs import EngineStats, RequestUpdate, TokenLogprobs
from jaxserve.sched.request import TokenMask
from jaxserve.serve.detokenize import Detokenizer
from jaxserve.serve.logprobs import ShownToken
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
    def check_room(self) -> None: ...
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


class TextDelta(NamedTuple):
    """Text that became certain, and the tokens that came with it where they are shown.

    A tuple, because every token makes one. ``num_output_tokens`` counts from the start.
    ``prompt_logprobs`` comes once.
    """

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    num_output_tokens: int
    num_cached_tokens: int
    tokens: list[ShownToken]
    prompt_logprobs: Sequence[TokenLogprobs | None] | None


async def text_deltas(
    index: int,
    stream: RequestStream,
    detokenizer: Detokenizer,
    metrics: RequestMetrics,
    *,
    shows_tokens: bool = False,
    text_offset: int = 0,
) -> AsyncGenerator[TextDelta, None]:
    """The text of one request; empty deltas are left out, the last one has a finish_reason.

    ``shows_tokens``: deltas carry every token that counts, with offsets from ``text_offset`` on.
    Leaving early aborts the request. Raises NotReady when the server ends it, RequestFailed when
    it fails by itself, EngineDead.
    """
    reason = "abort"
    num_prompt = num_output = 0
    try:
        async with stream:
            async for update in stream:
                metrics.update(update)
                num_prompt = update.num_prompt_tokens
                before = update.num_output_tokens - len(update.new_token_ids)
                text, tokens = _push(update, detokenizer, text_offset)
                num_output = before + len(tokens)
                for _ in tokens:
                    metrics.token()
                finish = update.finish_reason
                if finish == "abort":
                    raise NotReady("the server ended this request: it is stopping or pausing")
                if finish == "error":
                    reason = finish
                    raise RequestFailed(update.error or "the request failed")
                if finish is not None:
                    text += detokenizer.flush()
                if detokenizer.stop_string is not None:
                    finish = "stop"
                if finish is not None:
                    stream.close()
                    reason = finish
                shown = tokens if shows_tokens else []
                if text or shown or finish is not None or update.prompt_logprobs is not None:
                    yield TextDelta(
                        index=index,
                        text=text,
                        finish_reason=finish,
                        num_output_tokens=num_output,
                        num_cached_tokens=update.num_cached_tokens,
                        tokens=shown,
                        prompt_logprobs=update.prompt_logprobs,
                    )
                if finish is not None:
                    return
    finally:
        metrics.end(reason, num_prompt, num_output)


def _push(
    update: RequestUpdate, detokenizer: Detokenizer, text_offset: int
) -> tuple[str, list[ShownToken]]:
    """The text that becomes certain with an update and its tokens, up to a stop string."""
    pieces: list[str] = []
    tokens: list[ShownToken] = []
    logprobs = update.logprobs or [None] * len(update.new_token_ids)
    for token_id, entry in zip(update.new_token_ids, logprobs, strict=True):
        tokens.append(ShownToken(token_id, text_offset + detokenizer.num_characters, entry))
        if token_id != update.stop_token_id:
            pieces.append(detokenizer.push(token_id))
        if detokenizer.stop_string is not None:
            break
    return "".join(pieces), tokens


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
