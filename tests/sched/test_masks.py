"""Masks against sets of tokens: what is banned at which draw, and what cannot be asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import SamplingParams
from jaxserve.errors import InvalidRequest
from jaxserve.sched.masks import NothingAllowed, TokenLimits, build_rules, pack_masks
from tests.fakes import make_request

VOCAB = 41  # the second word has bits of no token
ENDING = frozenset({5, 40})


class Countdown:
    """A mask that allows one token, one less after each; done at 0, broken past it."""

    def __init__(self, token: int) -> None:
        self.token = token

    def fill(self, words_W: np.ndarray) -> None:
        if self.token < 0:
            raise ValueError("below zero")
        words_W[:] = 0
        words_W[self.token // 32] = 1 << (self.token % 32)

    def accept(self, token_id: int) -> None:
        assert token_id == self.token
        self.token -= 1

    @property
    def done(self) -> bool:
        return self.token == 0


def rules_of(mask=None, ending=ENDING, **options):
    params = SamplingParams(max_tokens=99, **options)
    return build_rules(params, ending, VOCAB).with_mask(mask)


def allowed_by(rules, output=(), draw=None) -> set[int]:
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    rules.fill(words, list(output), len(output) if draw is None else draw)
    return {t for t in range(len(words) * 32) if int(words[t // 32]) >> (t % 32) & 1}


def test_a_request_that_bans_nothing_has_no_rules():
    assert rules_of() is None
    assert rules_of(min_tokens=3, ending=frozenset()) is None
    assert rules_of(stop=("x",), stop_token_ids=(3,)) is None


@given(
    allowed=st.none() | st.sets(st.sampled_from([0, 1, 5, 31, 32, 40]), min_size=1),
    words=st.lists(st.lists(st.sampled_from([0, 1, 32]), min_size=1, max_size=3), max_size=4),
    min_tokens=st.integers(0, 4),
    output=st.lists(st.sampled_from([0, 1, 32]), max_size=5),
)
def test_a_mask_bans_what_the_options_say_and_nothing_else(allowed, words, min_tokens, output):
    expected = set(range(VOCAB)) if allowed is None else set(allowed)
    if len(output) < min_tokens:
        expected -= ENDING
    for *before, last in words:
        if output[len(output) - len(before) :] == before:
            expected.discard(last)
    try:
        rules = rules_of(
            allowed_token_ids=None if allowed is None else tuple(allowed),
            bad_words_token_ids=tuple(map(tuple, words)),
            min_tokens=min_tokens,
        )
    except InvalidRequest:
        always = {word[0] for word in words if len(word) == 1}
        left = (set(range(VOCAB)) if allowed is None else allowed) - always
        assert not left - (ENDING if min_tokens else set())
        return
    if rules is None or not rules.bind(len(output)):
        assert expected == set(range(VOCAB))
    elif expected:
        assert allowed_by(rules, output) == expected
    else:
        with pytest.raises(NothingAllowed):
            allowed_by(rules, output)


def test_the_tokens_that_end_a_request_are_banned_by_the_number_of_draws_alone():
    rules = rules_of(min_tokens=2)
    assert not rules.needs_last_token
    assert [rules.bind(draw) for draw in range(4)] == [True, True, False, False]
    assert allowed_by(rules, (), draw=1) == set(range(VOCAB)) - ENDING


def test_the_choices_of_a_call_share_what_is_made_of_its_tokens_and_no_other_call_does():
    limits = TokenLimits(ENDING, VOCAB)
    call = SamplingParams(n=3, seed=7, allowed_token_ids=(1, 2), stop_token_ids=(9,), min_tokens=1)
    ending, rules = limits.of(call)
    assert ending == ENDING | {9}
    for seed in range(3):
        assert limits.of(replace(call, n=1, seed=seed))[0] is ending
        assert limits.of(replace(call, n=1, seed=seed))[1] is rules
    for change, field in (
        ({"ignore_eos": True}, "ending"),
        ({"stop_token_ids": (8,)}, "ending"),
        ({"allowed_token_ids": (1, 3)}, "rules"),
        ({"min_tokens": 2}, "rules"),
        ({"bad_words_token_ids": ((1,),)}, "rules"),
        ({"logit_bias": ((1, 2.0),)}, "rules"),
    ):
        other = limits.of(replace(call, **change))
        assert (other[0] != ending) if field == "ending" else (other[1] is not rules)
    with pytest.raises(InvalidRequest):
        limits.of(replace(call, allowed_token_ids=(VOCAB,)))
    assert limits.of(call)[0] == ending


def test_only_a_grammar_and_words_of_two_tokens_need_the_last_token():
    assert not rules_of(allowed_token_ids=(1,), bad_words_token_ids=((2,),)).needs_last_token
    assert rules_of(bad_words_token_ids=((2,), (3, 4))).needs_last_token
    assert rules_of(mask=Countdown(3)).needs_last_token


def test_a_draw_looks_only_at_the_words_that_the_last_token_may_go_on_with():
    class Output(list):
        num_slices = 0

        def __getitem__(self, item):
            self.num_slices += isinstance(item, slice)
            return super().__getitem__(item)

    words = tuple((*[token] * 9, 0) for token in range(1, 41) for _ in range(20))
    rules = rules_of(bad_words_token_ids=(*words, (7, 8, 9)))
    output = Output([7, 8])
    assert allowed_by(rules, ()) == set(range(VOCAB))
    rules.fill(np.zeros(2, np.uint32), output, 2)
    assert output.num_slices == 21


def test_a_grammar_is_narrowed_by_the_options_and_advanced_by_its_tokens():
    rules = rules_of(mask=Countdown(3), bad_words_token_ids=((2, 1),))
    assert allowed_by(rules) == {3}
    assert not rules.accept(3)
    assert allowed_by(rules, [3]) == {2}
    assert not rules.accept(2)
    with pytest.raises(NothingAllowed, match="leave no token for output 2"):
        allowed_by(rules, [3, 2])
    assert rules.accept(1)


def test_each_row_has_its_own_mask_and_one_that_cannot_be_had_bans_nothing():
    failing = rules_of(mask=Countdown(-1))
    requests = [
        make_request(0, rules=rules_of(allowed_token_ids=(7,))),
        make_request(1),
        make_request(2, rules=failing),
        make_request(3, rules=rules_of(min_tokens=1)),
    ]
    for request in requests:
        request.num_in_flight = 1
    requests[3].output_token_ids = [1]  # has its one token
    mask, failed = pack_masks(enumerate(requests), 5, VOCAB)
    assert mask is not None
    assert (mask.shape, mask.dtype) == ((5, 2), np.uint32)
    assert mask[0].tolist() == [1 << 7, 0]
    assert (mask[1:] == 0xFFFFFFFF).all()
    assert [(request.request_id, str(error)) for request, error in failed] == [("r2", "below zero")]


def test_rows_that_ban_nothing_make_no_mask():
    request = make_request(0, rules=rules_of(min_tokens=1))
    request.output_token_ids, request.num_in_flight = [1], 1
    assert pack_masks([(0, request), (1, make_request(1))], 2, VOCAB) == (None, [])


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"logit_bias": ((41, 1.0),)}, "logit_bias", "token 41 is outside the vocabulary, 0 to 40"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids", "token -1"),
        ({"bad_words_token_ids": ((1, 99),)}, "bad_words_token_ids", "token 99"),
        ({"bad_words": ("a",)}, "bad_words", "spellings"),
        (
            {"allowed_token_ids": (3,), "bad_words_token_ids": ((3,),)},
            "allowed_token_ids",
            "leave no token",
        ),
        ({"allowed_token_ids": (5, 40), "min_tokens": 1}, "allowed_token_ids", "leave no token"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, field, says):
    with pytest.raises(InvalidRequest, match=says) as refused:
        rules_of(**options)
    assert refused.value.param == field
