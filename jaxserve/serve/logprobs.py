"""Log probabilities as the OpenAI API and vLLM write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxserve.sched.outputs import TokenLogprobs
from jaxserve.serve.detokenize import Vocabulary

# JSON has no infinity: what a token that cannot be drawn is given, as vLLM does.
LEAST_LOGPROB = -9999.0


class ShownToken(NamedTuple):
    """A token of an answer or an echoed prompt.

    ``text_offset`` counts the characters of the text before it: a token that ends inside a
    character begins at that character, and so does the next one.
    """

    token_id: int
    text_offset: int
    logprobs: TokenLogprobs | None


def token_string(data: bytes) -> str:
    """A token's text. Bytes that are no text by themselves are written as \\xNN, as OpenAI does."""
    return data.decode("utf-8", "backslashreplace")


def chat_logprobs(vocabulary: Vocabulary, tokens: Sequence[ShownToken], top: int) -> dict[str, Any]:
    """``logprobs`` of a chat choice or delta: every token, each with its ``top`` likeliest."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = vocabulary.bytes_of(token_id) or b""
        return {"token": token_string(data), "logprob": _finite(logprob), "bytes": list(data)}

    content = [
        {
            **entry(token.token_id, token.logprobs.logprob),
            "top_logprobs": [entry(*likely) for likely in token.logprobs.top[:top]],
        }
        for token in tokens
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    vocabulary: Vocabulary, tokens: Sequence[ShownToken], top: int
) -> dict[str, Any]:
    """``logprobs`` of a completion: four lists of one entry a token.

    ``top_logprobs`` maps the ``top`` likeliest tokens and the token itself to their logarithms.
    A prompt's first token has null for both.
    """

    def name(token_id: int) -> str:
        data = vocabulary.bytes_of(token_id) or b""
        string = token_string(data)
        # Keys of a mapping: a token that is half a character must not pass for a text of its name.
        return string if string.encode() == data else f"bytes:{string}"

    def likeliest(logprobs: TokenLogprobs) -> dict[str, float]:
        named: dict[str, float] = {name(logprobs.token_id): _finite(logprobs.logprob)}
        for token_id, logprob in logprobs.top[:top]:
            named.setdefault(name(token_id), _finite(logprob))  # of equal names, the likeliest
        return named

    return {
        "tokens": [name(token.token_id) for token in tokens],
        "token_logprobs": [
            None if token.logprobs is None else _finite(token.logprobs.logprob) for token in tokens
        ],
        "top_logprobs": [
            None if token.logprobs is None else likeliest(token.logprobs) for token in tokens
        ],
        "text_offset": [token.text_offset for token in tokens],
    }


def prompt_logprobs(
    vocabulary: Vocabulary, entries: Sequence[TokenLogprobs | None], top: int
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each token, itself and the ``top`` likeliest by their ids."""

    def shown(logprobs: TokenLogprobs) -> dict[str, Any]:
        ranked = {logprobs.token_id: (logprobs.logprob, logprobs.rank)}
        for rank, (token_id, logprob) in enumerate(logprobs.top[:top], start=1):
            ranked.setdefault(token_id, (logprob, rank))
        return {
            str(token_id): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": token_string(vocabulary.bytes_of(token_id) or b""),
            }
            for token_id, (logprob, rank) in ranked.items()
        }

    return [None if entry is None else shown(entry) for entry in entries]


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)  # in this order nan, of broken weights, gives the first
