"""The answers of the OpenAI API: one object for a whole answer, or chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer."""

    text: str
    finish_reason: str
    num_output_tokens: int


def usage(num_prompt_tokens: int, num_output_tokens: int) -> dict[str, int]:
    """The ``usage`` object."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """The ``error`` object, the same for every refusal and every route."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event of a JSON object."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class Answer(Protocol):
    """How one route writes its answers. Chunks are whole server-sent events."""

    def whole(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]: ...
    def first(self, index: int) -> bytes: ...
    def text(self, index: int, text: str) -> bytes: ...
    def finish(self, index: int, reason: str) -> bytes: ...
    def usage(self, usage: dict[str, int]) -> bytes: ...


class _Envelope:
    """The part of an answer that is the same in all its chunks, serialised once.

    With ``include_usage`` every chunk carries ``usage: null`` except the last, which has no choice.
    """

    chunk_object: str
    whole_object: str

    def __init__(self, answer_id: str, created: int, model: str, include_usage: bool) -> None:
        self._fields = {"id": answer_id, "created": created, "model": model}
        head = json.dumps({**self._fields, "object": self.chunk_object}, separators=(",", ":"))
        self._head = f'data: {head[:-1]},"choices":['
        self._tail = '],"usage":null}\n\n' if include_usage else "]}\n\n"

    def _chunk(self, choice: str) -> bytes:
        return f"{self._head}{choice}{self._tail}".encode()

    def usage(self, usage: dict[str, int]) -> bytes:
        """The last chunk of a stream that was asked for its usage."""
        return f'{self._head}],"usage":{json.dumps(usage)}}}\n\n'.encode()

    def _whole(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {**self._fields, "object": self.whole_object, "choices": choices, "usage": usage}


class CompletionAnswer(_Envelope):
    """Answers of /v1/completions."""

    chunk_object = whole_object = "text_completion"

    def whole(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """The object of a unary answer."""
        return self._whole(
            [
                {
                    "index": index,
                    "text": choice.text,
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(choices)
            ],
            usage,
        )

    def first(self, index: int) -> bytes:
        """Nothing announces a completion."""
        return b""

    def text(self, index: int, text: str) -> bytes:
        """A chunk of text."""
        return self._chunk(
            f'{{"index":{index},"text":{json.dumps(text)},"logprobs":null,"finish_reason":null}}'
        )

    def finish(self, index: int, reason: str) -> bytes:
        """The chunk that ends a choice."""
        return self._chunk(
            f'{{"index":{index},"text":"","logprobs":null,"finish_reason":"{reason}"}}'
        )


class ChatAnswer(_Envelope):
    """Answers of /v1/chat/completions."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def whole(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """The object of a unary answer."""
        return self._whole(
            [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(choices)
            ],
            usage,
        )

    def first(self, index: int) -> bytes:
        """The chunk that says who speaks."""
        return self._delta(index, '{"role":"assistant","content":""}', "null")

    def text(self, index: int, text: str) -> bytes:
        """A chunk of text."""
        return self._delta(index, f'{{"content":{json.dumps(text)}}}', "null")

    def finish(self, index: int, reason: str) -> bytes:
        """The chunk that ends a choice."""
        return self._delta(index, "{}", f'"{reason}"')

    def _delta(self, index: int, delta: str, reason: str) -> bytes:
        return self._chunk(
            f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":{reason}}}'
        )
