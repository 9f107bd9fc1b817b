"""Scores of a step as what a request is told."""

import numpy as np

from jaxserve.config import SamplingParams
from jaxserve.plan.batch import Scores
from jaxserve.sched.scheduler import Chunk
from jaxserve.sched.scores import collect_prompt_logprobs, token_logprobs
from tests.fakes import make_request

SCORES = Scores(
    np.asarray([-0.5, -2.0, -3.0], np.float32),
    np.asarray([1, 3, 7], np.int32),
    np.asarray([[4, 5, 6], [7, 8, 9], [1, 2, 3]], np.int32),
    np.asarray([[-0.5, -1.0, -np.inf], [-0.25, -1.5, -2.0], [-1, -2, -3]], np.float32),
)


def test_the_number_of_likeliest_asked_for_is_given_and_banned_ones_are_left_out():
    assert token_logprobs(SCORES, 1, 9, 2) == (9, -2.0, 3, ((7, -0.25), (8, -1.5)))
    assert token_logprobs(SCORES, 0, 4, 3).top == ((4, -0.5), (5, -1.0))
    assert token_logprobs(SCORES, 0, 4, 0) == (4, -0.5, 1, ())


def test_a_prompt_is_collected_over_its_chunks_and_given_once():
    params = SamplingParams(prompt_logprobs=1)
    request = make_request(0, [10, 11, 12, 13], params=params)
    assert request.scores_prompt
    assert request.take_prompt_logprobs() is None
    # Tokens 0 and 1, behind another request's token in their batch; then 2 and 3.
    collect_prompt_logprobs(Chunk(request, 0, 2, (), False, None), SCORES, start=1)
    first = request.prompt_logprobs[1:3]
    assert first == [(11, -2.0, 3, ((7, -0.25),)), (12, -3.0, 7, ((1, -1.0),))]
    collect_prompt_logprobs(Chunk(request, 2, 4, (), True, 0), SCORES, start=0)
    assert request.take_prompt_logprobs() == (None, *first, (13, -0.5, 1, ((4, -0.5),)))
    assert request.take_prompt_logprobs() is None


def test_half_a_prompt_is_not_given():
    request = make_request(0, [10, 11, 12], params=SamplingParams(prompt_logprobs=0))
    collect_prompt_logprobs(Chunk(request, 0, 1, (), False, None), SCORES, start=0)
    assert request.take_prompt_logprobs() is None


def test_a_prompt_of_one_token_has_one_entry_without_a_score():
    request = make_request(0, [10], params=SamplingParams(prompt_logprobs=5))
    collect_prompt_logprobs(Chunk(request, 0, 1, (), True, 0), SCORES, start=0)
    assert request.take_prompt_logprobs() == (None,)
