"""Grammars, masks, log probabilities and prompts alone through the engine loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.config import SamplingParams
from jaxserve.errors import InvalidRequest
from tests.engine_harness import EOS, VOCAB, Outcome, build, collect, drain, expected, greedy
from tests.fakes import FakeRunner, draw


class Cycle:
    """A grammar over the fake vocabulary: after token t only those of ``step`` from t may come.

    It ends after ``length`` tokens, and may break when asked for mask or token number ``breaks``.
    """

    def __init__(self, length: int, *, breaks: tuple[str, int] = ("", 0)) -> None:
        self.accepted: list[int] = []
        self.fills = 0
        self._length = length
        self._breaks = breaks

    def allowed(self) -> set[int]:
        last = self.accepted[-1] if self.accepted else 0
        return {(last + step) % VOCAB for step in (1, 3, 4)}

    def fill(self, words_W: np.ndarray) -> None:
        if self._breaks == ("fill", len(self.accepted)):
            raise RuntimeError("no mask")
        if self._breaks == ("empty", len(self.accepted)):
            words_W[:] = 0
            return
        self.fills += 1
        words_W[:] = 0
        for token in self.allowed():
            words_W[token // 32] |= np.uint32(1 << (token % 32))

    def accept(self, token_id: int) -> None:
        assert token_id in self.allowed(), "a token came that was banned"
        if self._breaks == ("accept", len(self.accepted)):
            raise RuntimeError("no such token")
        self.accepted.append(token_id)

    @property
    def done(self) -> bool:
        return len(self.accepted) == self._length


def guided(prompt: list[int], count: int) -> list[int]:
    """What a greedy request under a Cycle must give, straight from its own tokens."""
    sampling = (0.0, 0, 1.0, 0.0, (0, 0), 0.0, 0.0, 1.0, 0)
    grammar, history = Cycle(10**6), list(prompt)
    for _ in range(count):
        allowed = grammar.allowed()
        positions = range(len(history))
        token = draw(history, positions, sampling, VOCAB, allowed=lambda t, a=allowed: t in a)
        grammar.accept(token)
        history.append(token)
    return grammar.accepted


def test_a_grammar_ends_its_request_and_its_last_token_is_text():
    engine, _ = build()
    engine.add_request("a", [1, 2], greedy(50), mask=Cycle(6))
    outcome = drain(engine)["a"]
    assert outcome.result == (guided([1, 2], 6), "stop")
    assert outcome.last is not None
    assert outcome.last.stop_token_id is None


def test_a_grammar_beside_others_costs_them_nothing_and_asks_for_each_mask_once():
    engine, runner = build(max_num_seqs=3)
    grammar = Cycle(5)
    engine.add_request("free", [3, 4], greedy(12))
    engine.add_request("bound", [1, 2], greedy(50), mask=grammar)
    engine.add_request("other", [9] * 8, greedy(11))
    outcomes = drain(engine)
    assert outcomes["free"].result == expected([3, 4], greedy(12))
    assert outcomes["other"].result == expected([9] * 8, greedy(11))
    assert outcomes["bound"].result == (guided([1, 2], 5), "stop")
    assert grammar.fills == 5
    # One prefill and the eleven decodes that the free ones need anyway.
    assert runner.calls.count("decode") == 11


class Awake(FakeRunner):
    """Writes down which rows drew at each decode."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.drew: list[list[int]] = []

    def decode(self, shape: Any, new_blocks_B: np.ndarray, mask_BW: Any) -> Any:
        before = self.state.context_lens_B.copy()
        pending = super().decode(shape, new_blocks_B, mask_BW)
        self.drew.append(np.flatnonzero(self.state.context_lens_B != before).tolist())
        return pending


def test_a_row_that_needs_its_last_token_draws_every_other_iteration():
    engine, runner = build(Awake)
    engine.add_request("free", [3, 4], greedy(9))
    engine.add_request("bound", [1, 2], greedy(4), mask=Cycle(99))
    drain(engine)
    assert runner.drew == [[0], [0, 1], [0], [0, 1], [0], [0, 1], [0], [0]]


def test_rows_that_all_wait_leave_the_device_idle_for_an_iteration():
    engine, runner = build(Awake)
    for name in "ab":
        engine.add_request(name, [1, 2], greedy(4), mask=Cycle(99))
    outcomes = drain(engine)
    assert runner.drew == [[0, 1]] * 3
    assert {o.result == (guided([1, 2], 4), "length") for o in outcomes.values()} == {True}


def test_a_prompt_goes_on_while_every_row_waits():
    engine, runner = build(Awake)
    engine.add_request("a", [1, 2], greedy(5), mask=Cycle(99))
    outcomes: dict[str, Outcome] = {}
    collect(outcomes, engine.step())
    engine.add_request("b", [5] * 20, greedy(3))
    collect(outcomes, engine.step())  # a waits for its first token; b is computed
    assert runner.calls == ["prefill", "prefill"]
    drain(engine, outcomes)
    assert outcomes["a"].result == (guided([1, 2], 5), "length")
    assert outcomes["b"].result == expected([5] * 20, greedy(3))


@pytest.mark.parametrize("when", [0, 1, 3])
@pytest.mark.parametrize(
    ("breaks", "says"),
    [("fill", "no mask"), ("accept", "no such token"), ("empty", "leave no token")],
)
def test_a_grammar_that_fails_ends_its_own_request_alone(breaks, when, says):
    engine, _ = build()
    engine.add_request("good", [3, 4], greedy(12))
    engine.add_request("bad", [1, 2], greedy(50), mask=Cycle(40, breaks=(breaks, when)))
    engine.add_request("guided", [1, 2], greedy(7), mask=Cycle(40))
    outcomes = drain(engine)
    tokens, reason = outcomes["bad"].result
    assert reason == "error"
    assert tokens == guided([1, 2], when + (breaks == "accept"))
    assert says in (outcomes["bad"].last.error or "")
    assert outcomes["good"].result == expected([3, 4], greedy(12))
    assert outcomes["guided"].result == (guided([1, 2], 7), "length")


def test_a_request_under_a_grammar_can_be_preempted_and_aborted():
    engine, _ = build(num_blocks=1 + 8, max_num_seqs=3)
    engine.add_request("old", [5] * 8, greedy(40))
    engine.add_request("bound", [1, 2], greedy(30), mask=Cycle(99))
    engine.add_request("gone", [1, 2], greedy(30), mask=Cycle(99))
    outcomes: dict[str, Outcome] = {}
    for _ in range(4):
        collect(outcomes, engine.step())
    engine.abort_request("gone")
    drain(engine, outcomes)
    assert engine.stats().num_preemptions > 0
    assert outcomes["bound"].result == (guided([1, 2], 30), "length")
    assert outcomes["gone"].result[1] == "abort"


def test_a_stop_token_still_stops_under_a_grammar_and_is_named():
    engine, _ = build()
    output = guided([1, 2], 4)
    params = greedy(50, stop_token_ids=(output[2],))
    engine.add_request("a", [1, 2], params, mask=Cycle(99))
    outcome = drain(engine)["a"]
    cut = output.index(output[2]) + 1
    assert outcome.result == (output[:cut], "stop")
    assert outcome.last is not None
    assert outcome.last.stop_token_id == output[2]


def test_min_tokens_holds_back_what_would_end_a_request_and_no_longer():
    engine, _ = build()
    prompt = next(
        [n] for n in range(VOCAB) if len(expected([n], SamplingParams(temperature=0.0))[0]) < 4
    )
    params = SamplingParams(temperature=0.0, min_tokens=6, max_tokens=40)
    engine.add_request("a", prompt, params)
    tokens, reason = drain(engine)["a"].result
    assert (tokens, reason) == expected(prompt, params)
    assert EOS not in tokens[:6]


def test_a_prompt_alone_is_computed_and_ends_by_length_without_a_token():
    engine, runner = build()
    prompt = [1, 2, 3, 4] * 14  # two chunks
    engine.add_request("a", prompt, greedy(0, prompt_logprobs=2))
    outcome = drain(engine)["a"]
    assert outcome.result == ([], "length")
    assert runner.calls == ["prefill", "prefill"]
    assert outcome.prompt_logprobs is not None
    assert [entry and entry.token_id for entry in outcome.prompt_logprobs] == [None, *prompt[1:]]
    assert engine.stats().generation_tokens == 0


def test_a_prompt_alone_may_fill_the_whole_context():
    engine, _ = build()
    engine.add_request("a", [1] * 64, greedy(0))
    assert drain(engine)["a"].result == ([], "length")
    with pytest.raises(InvalidRequest, match="65 tokens, at most 64 fit"):
        engine.add_request("b", [1] * 65, greedy(0))
    with pytest.raises(InvalidRequest, match="64 tokens, at most 63 leave room"):
        engine.add_request("b", [1] * 64, greedy(1))


class Strict(FakeRunner):
    """Refuses whatever a step does not need: masks, counts, and reading scores."""

    def write_counts(self, row: int, counts_V: np.ndarray) -> None:
        raise AssertionError("counts were written")

    def decode(self, shape: Any, new_blocks_B: np.ndarray, mask_BW: Any) -> Any:
        assert mask_BW is None
        return super().decode(shape, new_blocks_B, mask_BW)

    def prefill(self, batch: Any) -> Any:
        assert (batch.bias, batch.mask_SW, batch.targets_T) == (None, None, None)
        return super().prefill(batch)


def test_requests_without_options_send_nothing_and_read_nothing_for_them():
    engine, _ = build(Strict)
    for i in range(4):
        engine.add_request(str(i), [1, 2, i], greedy(9, stop_token_ids=(16,)))
    outcomes = drain(engine)
    assert all(outcome.last.logprobs is None for outcome in outcomes.values())


def test_only_the_rows_that_draw_under_a_rule_are_looked_at():
    engine, runner = build(Strict)
    engine.add_request("a", [1, 2], greedy(9, min_tokens=1, ignore_eos=True))
    drain(engine)  # nothing can end it early, so nothing is banned
    assert runner.calls.count("decode") == 8


def test_a_request_that_penalises_keeps_a_row_for_its_only_token():
    engine, runner = build()
    params = greedy(1, presence_penalty=1.0)
    engine.add_request("a", [1, 2], params)
    engine.add_request("b", [3], greedy(4))
    outcomes = drain(engine)
    assert runner.calls[:2] == ["write_counts", "prefill"]
    assert outcomes["a"].result == expected([1, 2], params)
    assert outcomes["b"].result == expected([3], greedy(4))
