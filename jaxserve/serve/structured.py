"""Structured output: constraints compiled to grammars, and grammars to masks of allowed tokens."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from jaxserve.errors import InvalidRequest
from jaxserve.serve.text import Text

MAX_CONSTRAINT_CHARACTERS = 65_536
MAX_STRING_CHARACTERS = 8_192
# Between two tokens of JSON; without a bound a small model may write blanks to its last token.
_JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,32}"
_MARK = "\x02"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must match: a JSON schema (an object, or its text), a regular expression that
    matches the whole answer, a list of strings, or a grammar in llguidance's Lark.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    value: Any


class GrammarMask:
    """The tokens a grammar allows next; what ``TokenMask`` asks for. Raises ValueError when the
    answer has left the grammar, or has reached the limits of what is computed for one token.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fill(self, words_W: np.ndarray) -> None:
        """uint32 [ceil(V / 32)]: bit t % 32 of word t // 32 is 1 where token t may come next."""
        self._matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
        if self._matcher.is_error():
            raise ValueError(_reason(self._matcher.get_error()))

    def accept(self, token_id: int) -> None:
        """Advances by a token."""
        if not self._matcher.consume_token(token_id):
            raise ValueError(_reason(self._matcher.get_error()))

    @property
    def done(self) -> bool:
        """True when the answer is complete and nothing may follow."""
        return self._matcher.is_stopped()


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled constraint."""

    matcher: LLMatcher

    def mask(self) -> GrammarMask:
        """A mask of one answer's own, at its first token."""
        return GrammarMask(self.matcher.deep_copy())


class Grammars:
    """Compiles constraints for one model, away from the event loop.

    ``vocab_size`` is the model's. ``timeout_s`` and llguidance's limits on its work bound what one
    request may cost; ``workers`` compile at a time.
    """

    def __init__(
        self,
        text: Text,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        timeout_s: float = 10.0,
        workers: int = 2,
    ) -> None:
        self._text = text
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(workers)

    async def compile(self, constraint: Constraint, field: str) -> Grammar:
        """Raises InvalidRequest naming ``field`` and what is wrong with the constraint."""
        async with self._slots:
            work = asyncio.to_thread(self._compile, constraint, field)
            try:
                return await asyncio.wait_for(work, self._timeout_s)
            except TimeoutError:
                raise InvalidRequest(
                    f"{field}: not compiled in {self._timeout_s:g} s; simplify it", field
                ) from None

    def _compile(self, constraint: Constraint, field: str) -> Grammar:
        if not self._eos_token_ids:
            raise InvalidRequest(f"{field}: the model has no token that ends an answer", field)
        try:
            matcher = LLMatcher(
                self._tokenizer,
                _grammar_source(constraint),
                log_level=0,
                limits=LLParserLimits(verbose_errors=False),
            )
            # Also worked out here, where only this request waits for it: it is the dearest one.
            GrammarMask(matcher).fill(np.zeros(-(-self._vocab_size // 32), np.uint32))
        except ValueError as error:
            raise InvalidRequest(f"{field}: {_reason(str(error))}", field) from error
        return Grammar(matcher)

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        tokens = _Tokens(self._text, self._vocab_size, self._eos_token_ids[0])
        return LLTokenizer(
            TokenizerWrapper(tokens), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
        )


class _Tokens:
    """A model's tokens as llguidance reads them: the bytes each adds to an answer."""

    def __init__(self, text: Text, vocab_size: int, eos_token_id: int) -> None:
        self._text = text
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens = [text.vocabulary.bytes_of(i) or b"" for i in range(vocab_size)]
        self.special_token_ids = sorted(text.vocabulary.special_ids)

    def __call__(self, text: bytes) -> list[int]:
        # What goes on a text is encoded behind a mark that merges with nothing: a tokenizer may
        # put a space before a text that begins.
        marked = self._text.encode(_MARK + text.decode(), add_special_tokens=False)
        return marked[len(self._text.encode(_MARK, add_special_tokens=False)) :]


def _grammar_source(constraint: Constraint) -> str:
    """llguidance's form of a constraint. Raises ValueError for one that is too long or no JSON."""
    value = constraint.value
    length = len(value if isinstance(value, str) else json.dumps(value))
    if length > MAX_CONSTRAINT_CHARACTERS:
        raise ValueError(f"{length} characters, at most {MAX_CONSTRAINT_CHARACTERS}")
    if constraint.kind == "json_schema" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the schema is not JSON: {error}") from None
    # The literals of a grammar end with their line.
    longest = _longest_string(value.split("\n") if constraint.kind == "grammar" else value)
    if longest > MAX_STRING_CHARACTERS:
        raise ValueError(f"a string of {longest} characters, at most {MAX_STRING_CHARACTERS}")
    if constraint.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(
            value, overrides={"whitespace_pattern": _JSON_WHITESPACE}
        )
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if constraint.kind == "choice":
        value = "start: " + " | ".join(map(json.dumps, value))
    return LLMatcher.grammar_from_lark(value)


def _longest_string(value: Any) -> int:
    """Characters of the longest string in a JSON value: working out a mask takes as long."""
    longest, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            longest = max(longest, len(item))
        elif isinstance(item, dict):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            left += item
    return longest


def _reason(error: str) -> str:
    """llguidance's message without its parser's state, and without a panic's backtrace."""
    reason = error.split("<state>")[0].split("<non-verbose/>")[0].strip()[:500]
    if reason.startswith("panic:"):
        reason = reason.split("\n")[0]
    return "no token may come next" if reason.startswith("NoExtension") or not reason else reason
