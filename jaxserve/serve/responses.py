"""The answers of the OpenAI API: one object for a whole answer, or chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from jaxserve.sched.outputs import TokenLogprobs
from jaxserve.serve.detokenize import Vocabulary
from jaxserve.serve.logprobs import (
    ShownToken,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)

DONE = b"data: [DONE]\n\n"
_NO_USAGE = ',"usage":null}\n\n'


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens and, where it is echoed, their text and the offset of each in it."""

    token_ids: Sequence[int]
    text: str = ""
    offsets: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What an answer shows besides its text.

    ``logprobs`` and ``prompt_logprobs`` are the likeliest tokens shown beside each, None: nothing.
    ``continuous_usage``: chunks carry the usage so far.
    """

    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    echo: bool = False

    @property
    def shows_tokens(self) -> bool:
        """True when an answer has something to say of every token."""
        return self.logprobs is not None or self.return_token_ids


class Envelope(NamedTuple):
    """What every object of an answer says of itself; ``created`` is a Unix time."""

    id: str
    created: int
    model: str


@dataclass(slots=True)
class Choice:
    """One answer, as far as it has come."""

    prompt: Prompt
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    tokens: list[ShownToken] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """The text of the answer."""
        return "".join(self.texts)


def usage(
    num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int | None = None
) -> dict[str, Any]:
    """The ``usage`` object; None leaves the cached tokens out."""
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }
    if num_cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": num_cached_tokens}
    return counts


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """The ``error`` object, the same for every refusal and every route."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event of a JSON object."""
    return f"data: {_dumps(data)}\n\n".encode()


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


class Answer(Protocol):
    """How one route writes its answers. Chunks are whole server-sent events."""

    options: AnswerOptions

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]: ...
    def first(self, index: int, prompt: Prompt) -> bytes: ...
    def echo(self, index: int, choice: Choice) -> bytes: ...
    def text(self, index: int, text: str, tokens: Sequence[ShownToken]) -> bytes: ...
    def finish(self, index: int, reason: str) -> bytes: ...
    def usage(self, usage: dict[str, Any]) -> bytes: ...
    def with_usage(self, chunk: bytes, usage: dict[str, Any]) -> bytes: ...


class _Answer:
    """The part of an answer that is the same in all its chunks, serialised once.

    With ``include_usage`` every chunk carries ``usage: null`` except the last, which has no choice.
    """

    chunk_object: str
    whole_object: str

    def __init__(self, envelope: Envelope, options: AnswerOptions, vocabulary: Vocabulary) -> None:
        self.options = options
        self._vocabulary = vocabulary
        self._fields = envelope._asdict()
        head = _dumps({**self._fields, "object": self.chunk_object})
        self._head = f'data: {head[:-1]},"choices":['
        self._tail = _NO_USAGE if options.include_usage else "}\n\n"

    def _chunk(self, choice: str, extra: str = "") -> bytes:
        return f"{self._head}{choice}]{extra}{self._tail}".encode()

    def with_usage(self, chunk: bytes, usage: dict[str, Any]) -> bytes:
        """A chunk of a stream that was asked for its usage, with this in the place of null."""
        return chunk.removesuffix(_NO_USAGE.encode()) + f',"usage":{_dumps(usage)}}}\n\n'.encode()

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk of a stream that was asked for its usage."""
        return f'{self._head}],"usage":{_dumps(usage)}}}\n\n'.encode()

    def _whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._fields, "object": self.whole_object, "choices": choices, "usage": usage}

    def _token_ids(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        """The field ``token_ids`` where it was asked for."""
        if not self.options.return_token_ids:
            return {}
        return {"token_ids": [token.token_id for token in tokens]}

    def _prompt_token_ids(self, prompt: Prompt) -> dict[str, Any]:
        if not self.options.return_token_ids:
            return {}
        return {"prompt_token_ids": list(prompt.token_ids)}

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        top = self.options.prompt_logprobs
        if top is None:
            return {}
        entries = choice.prompt_logprobs or ()
        return {"prompt_logprobs": prompt_logprobs(self._vocabulary, entries, top)}


class CompletionAnswer(_Answer):
    """Answers of /v1/completions."""

    chunk_object = whole_object = "text_completion"

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The object of a unary answer."""
        return self._whole([self._choice(i, choice) for i, choice in enumerate(choices)], usage)

    def first(self, index: int, prompt: Prompt) -> bytes:
        """The chunk that says what was asked, where that is asked for."""
        if not self.options.return_token_ids:
            return b""
        return self._part(index, "", (), **self._prompt_token_ids(prompt))

    def echo(self, index: int, choice: Choice) -> bytes:
        """The chunk of the prompt's text, where that is asked for."""
        return self._part(index, choice.prompt.text, _echoed(choice)) if self.options.echo else b""

    def text(self, index: int, text: str, tokens: Sequence[ShownToken]) -> bytes:
        """A chunk of text."""
        if tokens:
            return self._part(index, text, tokens, **self._token_ids(tokens))
        return self._chunk(
            f'{{"index":{index},"text":{json.dumps(text)},"logprobs":null,"finish_reason":null}}'
        )

    def finish(self, index: int, reason: str) -> bytes:
        """The chunk that ends a choice."""
        return self._chunk(
            f'{{"index":{index},"text":"","logprobs":null,"finish_reason":"{reason}"}}'
        )

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        echoed = _echoed(choice) if self.options.echo else []
        return {
            "index": index,
            "text": choice.prompt.text + choice.text,
            "logprobs": self._logprobs([*echoed, *choice.tokens]),
            "finish_reason": choice.finish_reason,
            **self._prompt_token_ids(choice.prompt),
            **self._token_ids(choice.tokens),
            **self._prompt_logprobs(choice),
        }

    def _part(self, index: int, text: str, tokens: Sequence[ShownToken], **more: Any) -> bytes:
        logprobs = self._logprobs(tokens) if tokens else None
        return self._chunk(
            _dumps(
                {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, **more}
            )
        )

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        top = self.options.logprobs
        return None if top is None else completion_logprobs(self._vocabulary, tokens, top)


def _echoed(choice: Choice) -> list[ShownToken]:
    """A prompt's tokens as those of its answer are shown."""
    prompt = choice.prompt
    logprobs = choice.prompt_logprobs or [None] * len(prompt.token_ids)
    return list(map(ShownToken, prompt.token_ids, prompt.offsets, logprobs))


class ChatAnswer(_Answer):
    """Answers of /v1/chat/completions."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The object of a unary answer."""
        shown = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.tokens),
                "finish_reason": choice.finish_reason,
                **self._token_ids(choice.tokens),
            }
            for index, choice in enumerate(choices)
        ]
        return {
            **self._whole(shown, usage),
            **self._prompt_token_ids(choices[0].prompt),
            **self._prompt_logprobs(choices[0]),
        }

    def first(self, index: int, prompt: Prompt) -> bytes:
        """The chunk that says who speaks."""
        ids = self._prompt_token_ids(prompt)
        extra = f",{_dumps(ids)[1:-1]}" if ids else ""
        return self._delta(index, '{"role":"assistant","content":""}', "null", extra=extra)

    def echo(self, index: int, choice: Choice) -> bytes:
        """A conversation is not repeated."""
        return b""

    def text(self, index: int, text: str, tokens: Sequence[ShownToken]) -> bytes:
        """A chunk of text."""
        delta = f'{{"content":{json.dumps(text)}}}'
        if not tokens:
            return self._delta(index, delta, "null")
        logprobs = _dumps(self._logprobs(tokens))
        ids = self._token_ids(tokens)
        return self._delta(index, delta, "null", logprobs, f",{_dumps(ids)[1:-1]}" if ids else "")

    def finish(self, index: int, reason: str) -> bytes:
        """The chunk that ends a choice."""
        return self._delta(index, "{}", f'"{reason}"')

    def _delta(
        self,
        index: int,
        delta: str,
        reason: str,
        logprobs: str = "null",
        fields: str = "",
        extra: str = "",
    ) -> bytes:
        return self._chunk(
            f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{reason}'
            f"{fields}}}",
            extra,
        )

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        top = self.options.logprobs
        return None if top is None else chat_logprobs(self._vocabulary, tokens, top)
