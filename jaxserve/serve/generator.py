"""From a checked request to the call that answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.config import SamplingParams
from jaxserve.errors import InvalidRequest
from jaxserve.serve.calls import Call
from jaxserve.serve.generation import EngineClient
from jaxserve.serve.metrics import CallMetrics
from jaxserve.serve.prompts import PromptReader
from jaxserve.serve.protocol import ChatRequest, CompletionRequest, Generation
from jaxserve.serve.responses import Answer, ChatAnswer, CompletionAnswer, Envelope, Prompt
from jaxserve.serve.structured import Grammars
from jaxserve.serve.text import Text


@dataclass(frozen=True, kw_only=True)
class Generator:
    """Reads prompts and compiles grammars beside the event loop, and makes calls of them.

    Its methods raise InvalidRequest naming the field, and before anything costly is done what the
    engine refuses every request with.
    """

    engine: EngineClient
    text: Text
    prompts: PromptReader
    grammars: Grammars
    shows_cached_tokens: bool = False

    async def completion(
        self, asked: CompletionRequest, envelope: Envelope, metrics: CallMetrics, arrived: float
    ) -> Call:
        """The call of /v1/completions; choices are those of the first prompt, then the next."""
        params = asked.sampling_params()
        self._check_room(len(asked.prompts), params.n)
        answer = CompletionAnswer(envelope, asked.answer_options(), self.text.vocabulary)

        def read() -> tuple[Sequence[Prompt], SamplingParams]:
            return self.prompts.of_completion(asked), self.prompts.spelled(params)

        return await self._call(asked, read, answer, metrics, arrived)

    async def chat(
        self, asked: ChatRequest, envelope: Envelope, metrics: CallMetrics, arrived: float
    ) -> Call:
        """The call of /v1/chat/completions."""
        params = asked.sampling_params()
        self._check_room(1, params.n)
        answer = ChatAnswer(envelope, asked.answer_options(), self.text.vocabulary)

        def read() -> tuple[Sequence[Prompt], SamplingParams]:
            return [self.prompts.of_chat(asked)], self.prompts.spelled(params)

        return await self._call(asked, read, answer, metrics, arrived)

    async def _call(
        self,
        asked: Generation,
        read: Callable[[], tuple[Sequence[Prompt], SamplingParams]],
        answer: Answer,
        metrics: CallMetrics,
        arrived: float,
    ) -> Call:
        self.engine.check_room()
        prompts, params = await asyncio.to_thread(read)
        grammar = None
        if (bound := asked.constraint()) is not None:
            field, constraint = bound
            grammar = await self.grammars.compile(constraint, field)
        return Call(
            engine=self.engine,
            text=self.text,
            metrics=metrics,
            answer=answer,
            prompts=prompts,
            params=params,
            arrived=arrived,
            grammar=grammar,
            cache_salt=asked.cache_salt or "",
            shows_cached_tokens=self.shows_cached_tokens,
        )

    def _check_room(self, num_prompts: int, n: int) -> None:
        """More choices than may wait would never get in."""
        most = self.engine.max_requests
        if num_prompts * n > most:
            raise InvalidRequest(
                f"{num_prompts} prompts of n={n} choices are {num_prompts * n} requests, at most "
                f"{most} can wait here (--max-num-seqs + --max-queued-requests)",
                "prompt" if n == 1 else "n",
            )
