"""One HTTP call to generate: its requests in the engine, and its answer, whole or as events."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.config import SamplingParams
from jaxserve.errors import EngineError, RequestRefused
from jaxserve.serve.generation import EngineClient, TextDelta, merged, text_deltas
from jaxserve.serve.http import refusal_body
from jaxserve.serve.metrics import CallMetrics
from jaxserve.serve.responses import DONE, Answer, Choice, Prompt, event, usage
from jaxserve.serve.streams import RequestStream
from jaxserve.serve.structured import Grammar
from jaxserve.serve.text import Text


@dataclass(frozen=True, kw_only=True)
class Call:
    """Prompts with one set of sampling settings, ``params.n`` choices each, and how to answer them.

    Choice ``i`` answers prompt ``i // n``. ``grammar`` is what every answer must match;
    ``shows_cached_tokens`` puts those into the usage. ``arrived`` is the call's time on the clock
    of ``metrics``. Start it, then ask for one of its two answers; close it in any case.
    """

    engine: EngineClient
    text: Text
    metrics: CallMetrics
    answer: Answer
    prompts: Sequence[Prompt]
    params: SamplingParams
    arrived: float
    grammar: Grammar | None = None
    cache_salt: str = ""
    shows_cached_tokens: bool = False
    _streams: dict[int, RequestStream] = field(default_factory=dict)

    async def start(self) -> None:
        """Hands all choices to the engine at once; raises the first refusal."""
        groups = [uuid.uuid4().hex for _ in self.prompts]
        n = self.params.n

        async def add(index: int) -> None:
            prompt, child = divmod(index, n)
            self._streams[index] = await self.engine.add_request(
                f"{groups[prompt]}-{child}",
                self.prompts[prompt].token_ids,
                child_params(self.params, child),
                mask=None if self.grammar is None else self.grammar.mask(),
                cache_salt=self.cache_salt,
                group=groups[prompt] if n > 1 else None,
            )

        adds = [add(index) for index in range(self._num_choices)]
        for outcome in await asyncio.gather(*adds, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def close(self) -> None:
        """Aborts what has not ended."""
        for stream in self._streams.values():
            stream.close()

    async def whole(self) -> dict[str, Any]:
        """The JSON object of the finished answer."""
        choices = self._no_choices()
        async with self._deltas() as deltas:
            async for delta in deltas:
                _take(choices[delta.index], delta)
        return self.answer.whole(choices, self._usage(choices))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events; what goes wrong on the way is an event too."""
        answer = self.answer
        choices = self._no_choices()
        unopened = set(range(self._num_choices))

        def counted(chunk: bytes) -> bytes:
            if not answer.options.continuous_usage:
                return chunk
            return answer.with_usage(chunk, self._usage(choices))

        try:
            async with self._deltas() as deltas:
                for index, choice in enumerate(choices):
                    if first := answer.first(index, choice.prompt):
                        yield counted(first)
                async for delta in deltas:
                    index, choice = delta.index, choices[delta.index]
                    _count(choice, delta)
                    if index in unopened:
                        unopened.remove(index)
                        if echo := answer.echo(index, choice):
                            yield counted(echo)
                    if delta.text or delta.tokens:
                        yield counted(answer.text(index, delta.text, delta.tokens))
                    if delta.finish_reason is not None:
                        yield counted(answer.finish(index, delta.finish_reason))
            if answer.options.include_usage:
                yield answer.usage(self._usage(choices))
        except (RequestRefused, EngineError) as error:
            yield event(refusal_body(error))
        yield DONE

    @property
    def _num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def _no_choices(self) -> list[Choice]:
        return [Choice(prompt) for prompt in self.prompts for _ in range(self.params.n)]

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """A prompt counts once, whatever the number of its choices."""
        n = self.params.n
        cached = None
        if self.shows_cached_tokens:
            # Choices find each other's blocks too; those of before the call are what all find.
            groups = [choices[i : i + n] for i in range(0, len(choices), n)]
            cached = sum(min(choice.num_cached_tokens for choice in group) for group in groups)
        return usage(
            sum(len(prompt.token_ids) for prompt in self.prompts),
            sum(choice.num_output_tokens for choice in choices),
            cached,
        )

    def _deltas(self) -> contextlib.aclosing[AsyncGenerator[TextDelta, None]]:
        """The deltas of all choices; leaving ends what still runs."""
        shows_tokens = self.answer.options.shows_tokens
        sources = [
            text_deltas(
                index,
                self._streams[index],
                self.text.detokenizer(choice.prompt.token_ids, self.params),
                self.metrics.request(self.arrived, shares_prompt=index % self.params.n > 0),
                shows_tokens=shows_tokens,
                text_offset=len(choice.prompt.text),
            )
            for index, choice in enumerate(self._no_choices())
        ]
        return contextlib.aclosing(merged(sources))


def child_params(params: SamplingParams, child: int) -> SamplingParams:
    """The settings of one of ``params.n`` choices: its seed is the request's plus its number.

    So choice 0 is what a request for one choice gets (vLLM's rule). Wraps around in 64 bits.
    """
    if params.n == 1:
        return params
    seed = params.seed
    if seed is not None:
        seed = (seed + child + 2**63) % 2**64 - 2**63
    return replace(params, n=1, seed=seed)


def _count(choice: Choice, delta: TextDelta) -> None:
    """Takes from a delta all but what is shown."""
    choice.num_output_tokens = delta.num_output_tokens
    choice.num_cached_tokens = max(choice.num_cached_tokens, delta.num_cached_tokens)
    if delta.prompt_logprobs is not None:
        choice.prompt_logprobs = delta.prompt_logprobs


def _take(choice: Choice, delta: TextDelta) -> None:
    """Takes a whole delta."""
    _count(choice, delta)
    choice.texts.append(delta.text)
    choice.tokens += delta.tokens
    choice.finish_reason = delta.finish_reason
