"""What LLM gives back, and the requests behind it while they grow."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.sched.outputs import RequestUpdate, TokenLogprobs
from jaxserve.serve.detokenize import Detokenizer


@dataclass(frozen=True)
class CompletionOutput:
    """One choice: what was generated so far.

    ``logprobs`` has one entry a token where asked. ``stop_reason`` is the stop string or the id of
    the token that ended it. ``weight_versions`` are those that drew its tokens, in order.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: tuple[int, ...]

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log probabilities, where they were asked for."""
        return None if self.logprobs is None else sum(t.logprob for t in self.logprobs)


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its choices, finished or on the way."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int


@dataclass
class Choice:
    """A choice that grows."""

    index: int
    detokenizer: Detokenizer | None
    scored: bool
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[int] = field(default_factory=list)

    def push(self, update: RequestUpdate) -> None:
        """Take what a step brought."""
        logprobs = update.logprobs or (None,) * len(update.new_token_ids)
        for token_id, entry in zip(update.new_token_ids, logprobs, strict=True):
            self.token_ids.append(token_id)
            if entry is not None:
                self.logprobs.append(entry)
            if self.weight_versions[-1:] != [update.weight_version]:
                self.weight_versions.append(update.weight_version)
            if self.detokenizer is None:
                continue
            if token_id != update.stop_token_id:
                self.text += self.detokenizer.push(token_id)
            if self.detokenizer.stop_string is not None:
                self.finish_reason, self.stop_reason = "stop", self.detokenizer.stop_string
                return
        if update.finish_reason is not None:
            self.finish_reason, self.stop_reason = update.finish_reason, update.stop_token_id
            if self.detokenizer is not None:
                self.text += self.detokenizer.flush()

    def output(self) -> CompletionOutput:
        """As it stands."""
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs) if self.scored else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            weight_versions=tuple(self.weight_versions),
        )


@dataclass
class PendingRequest:
    """A prompt whose choices run."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    choices: dict[str, Choice]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    changed: bool = False
    error: str | None = None

    @property
    def finished(self) -> bool:
        """True when every choice has ended."""
        return all(choice.finish_reason is not None for choice in self.choices.values())

    def output(self) -> RequestOutput:
        """As it stands."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=tuple(choice.output() for choice in self.choices.values()),
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
        )
