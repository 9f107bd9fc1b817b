"""Which tokens a request may draw next: what its options and its grammar ban, as bit masks."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.config import SamplingParams
from jaxserve.errors import InvalidRequest
from jaxserve.plan.batch import ALL_ALLOWED, mask_spec

if TYPE_CHECKING:
    from jaxserve.sched.request import Request, TokenMask


class NothingAllowed(Exception):
    """No token of the vocabulary may come next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """What limits the draws of one request, which are numbered from 0.

    ``allowed_W`` holds at every draw, ``not_ending_W`` at those before ``min_tokens``.
    ``bad_words`` have two tokens or more, by the last but one: the last is banned where the output
    ends in the others.
    """

    allowed_W: np.ndarray
    not_ending_W: np.ndarray
    min_tokens: int
    bad_words: Mapping[int, Sequence[tuple[int, ...]]]
    mask: TokenMask | None
    always: bool

    @property
    def needs_last_token(self) -> bool:
        """True when a draw's mask depends on the token before it, so that must be read first."""
        return self.mask is not None or bool(self.bad_words)

    def bind(self, draw: int) -> bool:
        """Whether anything is banned at a draw, or may be."""
        return self.always or draw < self.min_tokens

    def fill(self, words_W: np.ndarray, output_token_ids: list[int], draw: int) -> None:
        """Write the mask of a draw; raises NothingAllowed, or whatever the TokenMask raises."""
        words_W.fill(ALL_ALLOWED)
        if self.mask is not None:
            self.mask.fill(words_W)
        words_W &= self.allowed_W
        if draw < self.min_tokens:
            words_W &= self.not_ending_W
        for word in self.bad_words.get(output_token_ids[-1], ()) if output_token_ids else ():
            before = len(word) - 1
            if tuple(output_token_ids[-before:]) == word[:-1]:
                _ban(words_W, word[-1:])
        if not words_W.any():
            raise NothingAllowed(f"the request's constraints leave no token for output {draw}")

    def with_mask(self, mask: TokenMask | None) -> TokenRules | None:
        """These rules and a mask's, None where nothing is ever banned."""
        rules = self if mask is None else replace(self, mask=mask, always=True)
        return rules if rules.bind(0) else None

    def accept(self, token_id: int) -> bool:
        """Advance the TokenMask by a token that was drawn; True when nothing more may follow."""
        if self.mask is None:
            return False
        self.mask.accept(token_id)
        return self.mask.done


class TokenLimits:
    """What ends the requests of one model, and what limits their draws.

    The choices of one call hold the very same tuples of tokens, which may be long: what is made of
    the latest is kept, and they share it.
    """

    def __init__(self, eos: frozenset[int], vocab_size: int) -> None:
        self._eos = eos
        self._vocab_size = vocab_size
        self._asked: tuple[object, ...] = ()
        self._made: tuple[frozenset[int], TokenRules]

    def of(self, params: SamplingParams) -> tuple[frozenset[int], TokenRules]:
        """The tokens that end a request and its rules, which have no TokenMask yet.

        Raises what ``build_rules`` does.
        """
        asked = (
            params.ignore_eos,
            params.min_tokens,
            params.stop_token_ids,
            params.logit_bias,
            params.allowed_token_ids,
            params.bad_words,
            params.bad_words_token_ids,
        )
        if not self._asked or not all(map(operator.is_, asked, self._asked)):
            ending = frozenset(params.stop_token_ids) | (
                frozenset() if params.ignore_eos else self._eos
            )
            self._made = ending, build_rules(params, ending, self._vocab_size)
            self._asked = asked
        return self._made


def build_rules(params: SamplingParams, ending: frozenset[int], vocab_size: int) -> TokenRules:
    """The rules of a request without a TokenMask; ``ending`` are the tokens that end it.

    Raises InvalidRequest for tokens outside the vocabulary and for options that leave none.
    """
    _check_token_ids(params, vocab_size)
    if params.bad_words and not params.bad_words_token_ids:
        raise InvalidRequest("bad_words needs its spellings in bad_words_token_ids", "bad_words")
    single = [word[0] for word in params.bad_words_token_ids if len(word) == 1]
    longer: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for word in params.bad_words_token_ids:
        if len(word) > 1:
            longer[word[-2]].append(word)
    rules = TokenRules(
        allowed_W=_words_of(params.allowed_token_ids, vocab_size),
        not_ending_W=_words_of(None, vocab_size),
        min_tokens=params.min_tokens if ending else 0,
        bad_words=dict(longer),
        mask=None,
        always=bool(params.allowed_token_ids or params.bad_words_token_ids),
    )
    _ban(rules.allowed_W, single)
    _ban(rules.not_ending_W, [token for token in ending if 0 <= token < vocab_size])
    strictest_W = rules.allowed_W & rules.not_ending_W if rules.min_tokens else rules.allowed_W
    if not strictest_W.any():
        raise InvalidRequest(
            "allowed_token_ids, bad_words and min_tokens together leave no token to draw",
            "allowed_token_ids",
        )
    return rules


def pack_masks(
    drawing: Iterable[tuple[int, Request]], rows: int, vocab_size: int
) -> tuple[np.ndarray | None, list[tuple[Request, Exception]]]:
    """Masks of rows that draw in this iteration, uint32 [rows, W]; None when nothing is banned.

    ``drawing`` are (row, request), the draw already counted as in flight. Also returns the requests
    whose mask could not be had, and why; their rows ban nothing.
    """
    mask_XW: np.ndarray | None = None
    failed: list[tuple[Request, Exception]] = []
    for row, request in drawing:
        rules = request.rules
        draw = len(request.output_token_ids) + request.num_in_flight - 1
        forced = 0 <= draw < len(request.forced)
        if not forced and (rules is None or not rules.bind(draw)):
            continue
        if mask_XW is None:
            spec = mask_spec(rows, vocab_size)
            mask_XW = np.full(spec.shape, ALL_ALLOWED, spec.dtype)
        if forced or rules is None:
            mask_XW[row] = _words_of(request.forced[draw : draw + 1], vocab_size)
            continue
        try:
            rules.fill(mask_XW[row], request.output_token_ids, draw)
        except Exception as error:  # a grammar raises anything; the other rows go on
            mask_XW[row] = ALL_ALLOWED
            failed.append((request, error))
    return mask_XW, failed


def _words_of(tokens: Iterable[int] | None, vocab_size: int) -> np.ndarray:
    """A mask of ``tokens``, None for the whole vocabulary; bits past it are 0."""
    (words,) = mask_spec(1, vocab_size).shape[1:]
    allowed = np.zeros(words * 32, bool)
    allowed[slice(vocab_size) if tokens is None else list(tokens)] = True
    return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)


def _ban(words_W: np.ndarray, tokens: Iterable[int]) -> None:
    for token in tokens:
        words_W[token >> 5] &= np.uint32(ALL_ALLOWED ^ (1 << (token & 31)))


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    for field, tokens in (
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("bad_words_token_ids", [t for word in params.bad_words_token_ids for t in word]),
    ):
        wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(
                f"{field}: token {wrong} is outside the vocabulary, 0 to {vocab_size - 1}", field
            )
