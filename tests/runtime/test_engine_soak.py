"""Traffic of every kind over the fake device, and traps that show its checks can fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import SamplingParams
from jaxserve.errors import AuditFailed, EngineDead
from jaxserve.plan.buckets import DecodeShape
from jaxserve.runtime.engine import Engine
from jaxserve.sched.blocks import BlockPool
from jaxserve.sched.outputs import TokenLogprobs
from jaxserve.sched.request import Request
from jaxserve.sched.rows import RowTable
from tests.engine_harness import VOCAB, Outcome, build, collect, drain, expected, greedy
from tests.fakes import FakePending, FakeRunner

OPTIONS: dict[str, list[Any]] = {
    "presence_penalty": [1.5],
    "frequency_penalty": [-0.5],
    "repetition_penalty": [1.25],
    "logit_bias": [((3, 1.0), (5, -2.5))],
    "allowed_token_ids": [(1, 2, 3, 5, 8), (4, 5)],
    "bad_words_token_ids": [((1,),), ((2, 3), (4, 4, 1), (6,)), ((1, 2), (2, 1))],
    "min_tokens": [1, 2, 6],
    "logprobs": [0, 3],
    "prompt_logprobs": [0, 3],
}


@st.composite
def traffic(draw_from: Any):
    requests = []
    for _ in range(draw_from(st.integers(1, 10))):
        max_tokens = draw_from(st.sampled_from([0, 1, 2, 8, 9, 30, None]))
        options = {
            name: draw_from(st.sampled_from(values))
            for name, values in OPTIONS.items()
            if draw_from(st.integers(0, 4)) == 0
        }
        if max_tokens is not None and options.get("min_tokens", 0) > max_tokens:
            del options["min_tokens"]
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=draw_from(st.sampled_from([0.0, 0.7])),
            top_k=draw_from(st.sampled_from([-1, 0, 5])),
            top_p=draw_from(st.sampled_from([0.5, 1.0])),
            seed=draw_from(st.integers(-(2**63), 2**63 - 1)),
            ignore_eos=draw_from(st.booleans()),
            stop_token_ids=draw_from(st.sampled_from([(), (3,)])),
            **options,
        )
        prompt = draw_from(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=45))
        arrival = draw_from(st.integers(0, 30))
        abort = draw_from(st.one_of(st.none(), st.integers(0, 40)))
        requests.append((prompt, params, arrival, abort))
    return requests


@given(
    traffic(),
    st.integers(9, 30),
    st.integers(1, 5),
    st.sampled_from([5, 8, 17, 64]),
    st.sampled_from([0.0, 0.1, 0.9]),
)
def test_a_soak_gives_each_request_its_own_tokens_and_leaks_nothing(
    requests, num_blocks, max_num_seqs, budget, watermark
):
    engine, _ = build(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        watermark=watermark,
    )
    outcomes: dict[str, Outcome] = {}
    for step in range(41):
        for i, (prompt, params, arrival, abort) in enumerate(requests):
            if arrival == step:
                engine.add_request(str(i), prompt, params)
            if abort == step:
                engine.abort_request(str(i))
                engine.audit()
        collect(outcomes, engine.step())
        engine.audit()
    drain(engine, outcomes)
    for i, (prompt, params, *_, abort) in enumerate(requests):
        tokens, reason = expected(prompt, params)
        outcome = outcomes[str(i)]
        if abort is not None and outcome.result[1] == "abort":
            assert outcome.tokens == tokens[: len(outcome.tokens)]
            assert len(outcome.tokens) < max(len(tokens), 1)
        else:
            assert outcome.result == (tokens, reason)
            check_logprobs(outcome, prompt, params)


def check_logprobs(outcome: Outcome, prompt: list[int], params: SamplingParams) -> None:
    """The scores of the fake device, which it tells from the token alone, each once."""

    def score(token: int, count: int) -> TokenLogprobs:
        return TokenLogprobs(token, -token, token + 1, tuple((t, -t) for t in range(count)))

    if params.logprobs is None:
        assert outcome.logprobs == []
    else:
        assert outcome.logprobs == [score(t, params.logprobs) for t in outcome.tokens]
    if params.prompt_logprobs is None:
        assert outcome.prompt_logprobs is None
    else:
        told = [score(t, params.prompt_logprobs) for t in prompt[1:]]
        assert outcome.prompt_logprobs == (None, *told)


# Long answers that outgrow a pool of 11 usable blocks, short ones that leave gaps in the rows.
PRESSURE = [
    ([1, 2, 3], greedy(30)),
    ([4] * 17, SamplingParams(max_tokens=25, temperature=0.5, seed=-3, ignore_eos=True)),
    ([5] * 8, greedy(3)),
    ([6] * 20, SamplingParams(max_tokens=25, min_p=0.1, seed=2**40 + 1, ignore_eos=True)),
    ([7] * 30, greedy(None)),
    ([8], greedy(40)),
    ([9, 9, 1], greedy(20, frequency_penalty=1.0, repetition_penalty=1.5)),
    ([2] * 9, greedy(20, bad_words_token_ids=((1, 2), (7, 7)), presence_penalty=-1.0)),
    ([3] * 12, greedy(18, logit_bias=((4, 2.0),), min_tokens=3, allowed_token_ids=(1, 4, 9, 12))),
]


def run_pressure(engine: Engine) -> dict[str, Outcome]:
    for i, (prompt, params) in enumerate(PRESSURE):
        engine.add_request(str(i), prompt, params)
    return drain(engine)


def check_pressure(outcomes: dict[str, Outcome]) -> None:
    for i, (prompt, params) in enumerate(PRESSURE):
        assert outcomes[str(i)].result == expected(prompt, params)


def test_memory_pressure_changes_no_token():
    roomy, _ = build(num_blocks=200)
    check_pressure(run_pressure(roomy))
    assert roomy.stats().num_preemptions == 0
    tight, runner = build(num_blocks=1 + 11)
    check_pressure(run_pressure(tight))
    assert tight.stats().num_preemptions > 0
    assert "permute" in runner.calls


class WritesBeside(FakeRunner):
    def write(self, block: int, offset: int, row: int, position: int) -> None:
        super().write(block, (offset + 1) % self.block_size, row, position)


class ForgetsPermutations(FakeRunner):
    def permute_rows(self, sources_B: np.ndarray) -> None:
        pass


class ForgetsNewBlocks(FakeRunner):
    def decode(self, shape: DecodeShape, new_blocks_B: np.ndarray, mask_BW: Any) -> FakePending:
        return super().decode(shape, np.zeros_like(new_blocks_B), mask_BW)


class ReadsTooNarrow(FakeRunner):
    def decode(self, shape: DecodeShape, new_blocks_B: np.ndarray, mask_BW: Any) -> FakePending:
        return super().decode(shape._replace(width=8), new_blocks_B, mask_BW)


class ReadsAFutureSlot(FakeRunner):
    def read_and_draw(self, table_P: np.ndarray, length: int, *asked: Any) -> int:
        return super().read_and_draw(table_P, length + 1, *asked)


class ForgetsCounts(FakeRunner):
    def write_counts(self, row: int, counts_V: np.ndarray) -> None:
        pass


class LeavesCountsBehind(FakeRunner):
    def permute_rows(self, sources_B: np.ndarray) -> None:
        counts = self.state.counts_BV.copy()
        super().permute_rows(sources_B)
        self.state.counts_BV[:] = counts


class ForgetsMasks(FakeRunner):
    def decode(self, shape: DecodeShape, new_blocks_B: np.ndarray, mask_BW: Any) -> FakePending:
        return super().decode(shape, new_blocks_B, None)


class WakesRowsThatSitOut(FakeRunner):
    def decode(self, shape: DecodeShape, new_blocks_B: np.ndarray, mask_BW: Any) -> FakePending:
        return super().decode(shape, np.maximum(new_blocks_B, 0), mask_BW)


class ForgetsBias(FakeRunner):
    def prefill(self, batch: Any) -> FakePending:
        return super().prefill(batch._replace(bias=None))


class SwapsSeeds(FakeRunner):
    def prefill(self, batch: Any) -> FakePending:
        sampling = batch.sampling._replace(keys_X2=batch.sampling.keys_X2[:, ::-1].copy())
        return super().prefill(batch._replace(sampling=sampling))


class ShiftsAPosition(FakeRunner):
    def prefill(self, batch: Any) -> FakePending:
        return super().prefill(batch._replace(positions_T=batch.positions_T + np.int32(1)))


@pytest.mark.parametrize(
    "runner_class",
    [
        WritesBeside,
        ForgetsPermutations,
        ForgetsNewBlocks,
        ReadsTooNarrow,
        ReadsAFutureSlot,
        ForgetsCounts,
        LeavesCountsBehind,
        ForgetsMasks,
        WakesRowsThatSitOut,
        ForgetsBias,
        SwapsSeeds,
        ShiftsAPosition,
    ],
)
def test_a_device_that_errs_in_one_slot_table_row_or_seed_is_caught(runner_class):
    engine, _ = build(runner_class, num_blocks=1 + 11)
    with pytest.raises(AssertionError):
        check_pressure(run_pressure(engine))


def gaps_are_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def compact(table: RowTable) -> None:
        table._rows = [r for r in table._rows if r is not None]
        for row, request in enumerate(table._rows):
            request.row = row  # type: ignore[union-attr]
        table._num_vacated = 0

    monkeypatch.setattr(RowTable, "compact", compact)


def output_is_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    between = Request.tokens_between

    def without_output(request: Request, start: int, end: int) -> list[int]:
        known = len(request.prompt_token_ids)
        tokens = between(request, start, end)
        return [t if start + i < known else 0 for i, t in enumerate(tokens)]

    monkeypatch.setattr(Request, "tokens_between", without_output)


def blocks_are_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "allocate", lambda pool, n: list(range(1, n + 1)))
    monkeypatch.setattr(BlockPool, "free", lambda pool, blocks: None)


@pytest.mark.parametrize(
    "damage", [gaps_are_not_closed, output_is_not_recomputed, blocks_are_given_twice]
)
def test_a_host_that_errs_is_caught_by_the_device_or_the_tokens_without_an_audit(
    damage, monkeypatch
):
    damage(monkeypatch)
    monkeypatch.setattr(Engine, "audit", lambda engine: None)
    engine, _ = build(num_blocks=1 + 11)
    with pytest.raises((AssertionError, EngineDead)):
        check_pressure(run_pressure(engine))


def test_a_recomputed_prompt_is_counted_once():
    engine, _ = build(num_blocks=1 + 11)
    run_pressure(engine)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prompt_tokens == sum(len(prompt) for prompt, _ in PRESSURE)
    assert stats.scheduled_tokens > stats.prompt_tokens + stats.generation_tokens - len(PRESSURE)


def test_the_audit_of_a_running_engine_catches_a_leak():
    engine, _ = build()
    engine.add_request("a", [1], greedy())
    engine.step()
    engine.audit()
    engine._scheduler.pool.allocate(1)
    with pytest.raises(AuditFailed, match="belong to no request"):
        engine.audit()


def test_a_reused_host_array_is_caught():
    array = np.zeros(3, np.int32)
    pending = FakePending(np.zeros(3, np.int32), [array])
    array[1] = 1
    with pytest.raises(AssertionError, match="the host wrote to an array"):
        pending.read()
