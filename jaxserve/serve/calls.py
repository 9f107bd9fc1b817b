"""One HTTP call to generate: its requests in the engine, and its answer, whole or as events."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.config import SamplingParams
from jaxserve.errors import EngineError, RequestRefused
from jaxserve.serve.generation import EngineClient, TextDelta, merged, text_deltas
from jaxserve.serve.http import refusal_body
from jaxserve.serve.metrics import CallMetrics
from jaxserve.serve.responses import DONE, Answer, Choice, event, usage
from jaxserve.serve.streams import RequestStream
from jaxserve.serve.text import Text


@dataclass(frozen=True, kw_only=True)
class Call:
    """Prompts with one set of sampling settings, one choice each, and how to answer them.

    ``arrived`` is the call's time on the clock of ``metrics``. Start it, then ask for one of its
    two answers; close it in any case.
    """

    engine: EngineClient
    text: Text
    metrics: CallMetrics
    answer: Answer
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    arrived: float
    _streams: dict[int, RequestStream] = field(default_factory=dict)

    async def start(self) -> None:
        """Hands all prompts to the engine at once; raises the first refusal."""

        async def add(index: int, prompt: Sequence[int]) -> None:
            request_id = uuid.uuid4().hex
            self._streams[index] = await self.engine.add_request(request_id, prompt, self.params)

        adds = [add(index, prompt) for index, prompt in enumerate(self.prompts)]
        for outcome in await asyncio.gather(*adds, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def close(self) -> None:
        """Aborts what has not ended."""
        for stream in self._streams.values():
            stream.close()

    async def whole(self) -> dict[str, Any]:
        """The JSON object of the finished answer."""
        texts: list[list[str]] = [[] for _ in self.prompts]
        ends: dict[int, tuple[str, int]] = {}
        async with self._deltas() as deltas:
            async for delta in deltas:
                texts[delta.index].append(delta.text)
                if delta.finish_reason is not None:
                    ends[delta.index] = delta.finish_reason, delta.num_output_tokens
        choices = [Choice("".join(pieces), *ends[index]) for index, pieces in enumerate(texts)]
        num_output = sum(choice.num_output_tokens for choice in choices)
        return self.answer.whole(choices, usage(self._num_prompt_tokens, num_output))

    async def events(self, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events; what goes wrong on the way is an event too."""
        answer = self.answer
        num_output = [0] * len(self.prompts)
        try:
            async with self._deltas() as deltas:
                for index in range(len(self.prompts)):
                    if first := answer.first(index):
                        yield first
                async for delta in deltas:
                    num_output[delta.index] = delta.num_output_tokens
                    if delta.text:
                        yield answer.text(delta.index, delta.text)
                    if delta.finish_reason is not None:
                        yield answer.finish(delta.index, delta.finish_reason)
            if include_usage:
                yield answer.usage(usage(self._num_prompt_tokens, sum(num_output)))
        except (RequestRefused, EngineError) as error:
            yield event(refusal_body(error))
        yield DONE

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def _deltas(self) -> contextlib.aclosing[AsyncGenerator[TextDelta, None]]:
        """The deltas of all choices; leaving ends what still runs."""
        sources = [
            text_deltas(
                index,
                self._streams[index],
                self.text.detokenizer(prompt, self.params),
                self.metrics.request(self.arrived),
            )
            for index, prompt in enumerate(self.prompts)
        ]
        return contextlib.aclosing(merged(sources))
