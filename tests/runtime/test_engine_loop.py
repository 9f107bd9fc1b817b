"""The engine over a fake device: tokens, ends, overlap, audits and refusals."""

from __future__ import annotations

import itertools
import re
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import EngineConfig, ModelConfig, SamplingParams
from jaxserve.errors import AuditFailed, EngineDead, InvalidRequest
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape, PrefillBuckets
from jaxserve.runtime.engine import Engine
from jaxserve.sched.blocks import BlockPool
from jaxserve.sched.outputs import RequestUpdate
from jaxserve.sched.request import Request
from jaxserve.sched.rows import RowTable
from tests.fakes import FakePending, FakeRunner, draw

VOCAB = 17
EOS = 5


MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position_embeddings=4096,
    eos_token_ids=(EOS,),
)


def build(runner_class: type[Any] = FakeRunner, num_blocks: int = 100, **changes: Any):
    """An engine over a fake device; returns both."""
    clock = changes.pop("clock", time.monotonic)
    values: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 40,
        "block_size": 8,
    }
    config = EngineConfig(**values | changes)
    runner = runner_class(
        max_num_seqs=config.max_num_seqs,
        blocks_per_row=config.blocks_per_row,
        num_blocks=num_blocks,
        block_size=config.block_size,
        vocab_size=VOCAB,
    )
    engine = Engine(
        MODEL,
        config,
        runner,
        num_blocks=num_blocks,
        decode_buckets=DecodeBuckets(config.max_num_seqs, config.max_model_len, 16),
        prefill_buckets=PrefillBuckets(config.max_num_batched_tokens),
        clock=clock,
    )
    return engine, runner


def expected(prompt: list[int], params: SamplingParams, max_model_len: int = 64):
    """What a request alone must give: (tokens, finish reason), straight from its own tokens."""
    high, low = divmod((params.seed or 0) % 2**64, 2**32)
    top_k = params.top_k if params.top_k > 0 else 0
    sampling = (params.temperature, top_k, params.top_p, params.min_p, (high, low))
    history = list(prompt)
    while True:
        history.append(draw(history, range(len(history)), sampling, VOCAB))
        output = history[len(prompt) :]
        if (output[-1] == EOS and not params.ignore_eos) or output[-1] in params.stop_token_ids:
            return output, "stop"
        if len(output) == params.max_tokens or len(history) == max_model_len:
            return output, "length"


@dataclass
class Outcome:
    """What a request has been given so far."""

    tokens: list[int] = field(default_factory=list)
    last: RequestUpdate | None = None

    @property
    def result(self) -> tuple[list[int], str | None]:
        return self.tokens, self.last.finish_reason if self.last else None


def collect(outcomes: dict[str, Outcome], updates: list[RequestUpdate]) -> None:
    for update in updates:
        outcome = outcomes.setdefault(update.request_id, Outcome())
        assert outcome.last is None, "an update after the end"
        outcome.tokens += update.new_token_ids
        assert update.num_output_tokens == len(outcome.tokens)
        assert (update.timings is None) == (update.finish_reason is None)
        if update.finish_reason is not None:
            outcome.last = update


def drain(engine: Engine, outcomes: dict[str, Outcome] | None = None) -> dict[str, Outcome]:
    """Step until nothing is left, auditing between all steps."""
    outcomes = {} if outcomes is None else outcomes
    for _ in range(5000):
        if not engine.has_unfinished_requests():
            break
        collect(outcomes, engine.step())
        engine.audit()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    return outcomes


def greedy(max_tokens: int | None = 8, **changes: Any) -> SamplingParams:
    """Greedy, and past the eos token unless asked."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **{"ignore_eos": True} | changes)


@st.composite
def traffic(draw_from: Any):
    requests = []
    for _ in range(draw_from(st.integers(1, 10))):
        temperature = draw_from(st.sampled_from([0.0, 0.7]))
        params = SamplingParams(
            max_tokens=draw_from(st.sampled_from([1, 2, 8, 9, 30, None])),
            temperature=temperature,
            top_k=draw_from(st.sampled_from([-1, 0, 5])),
            top_p=draw_from(st.sampled_from([0.5, 1.0])),
            seed=draw_from(st.integers(-(2**63), 2**63 - 1)),
            ignore_eos=draw_from(st.booleans()),
            stop_token_ids=draw_from(st.sampled_from([(), (3,)])),
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
            assert len(outcome.tokens) < len(tokens)
        else:
            assert outcome.result == (tokens, reason)


# Long answers that outgrow a pool of 11 usable blocks, short ones that leave gaps in the rows.
PRESSURE = [
    ([1, 2, 3], greedy(30)),
    ([4] * 17, SamplingParams(max_tokens=25, temperature=0.5, seed=-3, ignore_eos=True)),
    ([5] * 8, greedy(3)),
    ([6] * 20, SamplingParams(max_tokens=25, min_p=0.1, seed=2**40 + 1, ignore_eos=True)),
    ([7] * 30, greedy(None)),
    ([8], greedy(40)),
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
    def decode(self, shape: DecodeShape, new_blocks_B: np.ndarray) -> FakePending:
        return super().decode(shape, np.zeros_like(new_blocks_B))


class ReadsTooNarrow(FakeRunner):
    def decode(self, shape: DecodeShape, new_blocks_B: np.ndarray) -> FakePending:
        return super().decode(shape._replace(width=8), new_blocks_B)


class ReadsAFutureSlot(FakeRunner):
    def read_and_draw(self, table_P: np.ndarray, length: int, sampling: Any) -> int:
        return super().read_and_draw(table_P, length + 1, sampling)


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


class SlowPending:
    def __init__(self, future: Future[FakePending]) -> None:
        self.future = future

    def read(self) -> np.ndarray:
        return self.future.result().read()


class SlowRunner(FakeRunner):
    """A device on its own thread, which ends step k only once step k + 1 is dispatched."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.log: list[str] = []
        self.last_step = 0
        self.dispatched = [threading.Event() for _ in range(100)]
        self.device = ThreadPoolExecutor(max_workers=1)
        self.numbers = itertools.count()

    def _launch(self, step: Any, *arguments: Any) -> SlowPending:
        k = next(self.numbers)
        self.log.append(f"dispatch {k}")
        self.dispatched[k].set()

        def work() -> FakePending:
            if k < self.last_step and not self.dispatched[k + 1].wait(timeout=20):
                raise TimeoutError(f"the host waits for step {k} before it dispatches {k + 1}")
            return step(*arguments)

        return SlowPending(self.device.submit(work))

    def decode(self, shape: DecodeShape, new_blocks_B: np.ndarray) -> Any:
        return self._launch(super().decode, shape, new_blocks_B)

    def prefill(self, batch: Any) -> Any:
        return self._launch(super().prefill, batch)


def test_the_next_iteration_is_dispatched_before_the_tokens_of_the_last_are_read():
    engine, runner = build(SlowRunner)
    runner.last_step = 5
    with runner.device:
        engine.add_request("a", [1, 2, 3], greedy(6))
        outcomes = drain(engine)
    assert runner.log == [f"dispatch {k}" for k in range(6)]
    assert outcomes["a"].result == expected([1, 2, 3], greedy(6))


class LoggingRunner(FakeRunner):
    """Writes down dispatches and reads in the order the host makes them."""

    def decode(self, shape: DecodeShape, new_blocks_B: np.ndarray) -> Any:
        return self._watch(super().decode(shape, new_blocks_B))

    def prefill(self, batch: Any) -> Any:
        return self._watch(super().prefill(batch))

    def _watch(self, pending: FakePending) -> Any:
        calls = self.calls

        class Watched:
            def read(self) -> np.ndarray:
                calls.append("read")
                return pending.read()

        return Watched()


def test_an_iteration_is_permute_then_decode_then_prefill_and_reads_come_after():
    engine, runner = build(LoggingRunner)
    engine.add_request("a", [1, 2, 3], greedy(2))
    engine.step()
    assert runner.calls == ["prefill"]
    engine.add_request("b", [1, 2, 3], greedy(3))
    engine.step()
    assert runner.calls[1:] == ["decode", "prefill", "read"]
    engine.step()
    assert runner.calls[4:] == ["permute", "decode", "read", "read"]


def test_nothing_is_dispatched_past_the_length_that_ends_a_request():
    engine, runner = build()
    engine.add_request("a", [1, 2, 3], greedy(3))
    drain(engine)
    assert runner.calls == ["prefill", "decode", "decode"]


def test_a_request_for_one_token_takes_no_decode_row():
    engine, runner = build()
    engine.add_request("a", [1, 2, 3], greedy(1))
    outcomes = drain(engine)
    assert runner.calls == ["prefill"]
    assert not runner.state.context_lens_B.any()
    assert outcomes["a"].result == expected([1, 2, 3], greedy(1))


def test_the_token_in_flight_when_a_request_stops_is_dropped():
    engine, runner = build()
    tokens, _ = expected([1, 2], greedy(20))
    stop = tokens[3]
    length = tokens.index(stop) + 1
    engine.add_request("a", [1, 2], greedy(20, stop_token_ids=(stop,)))
    outcomes = drain(engine)
    assert outcomes["a"].result == (tokens[:length], "stop")
    last = outcomes["a"].last
    assert last is not None
    assert last.stop_token_id == stop
    # One decode more than its tokens needed was already on its way.
    assert runner.calls.count("decode") == length


def test_eos_ends_a_request_unless_it_is_ignored():
    prompt = next(
        [k] for k in range(VOCAB) if expected([k], greedy(12, ignore_eos=False))[1] == "stop"
    )
    heeding, ignoring = greedy(12, ignore_eos=False), greedy(12)
    engine, _ = build()
    engine.add_request("heeds", prompt, heeding)
    engine.add_request("ignores", prompt, ignoring)
    outcomes = drain(engine)
    assert outcomes["heeds"].result == expected(prompt, heeding)
    assert outcomes["heeds"].tokens[-1] == EOS
    assert outcomes["heeds"].last is not None
    assert outcomes["heeds"].last.stop_token_id == EOS
    assert outcomes["ignores"].result == (expected(prompt, ignoring)[0], "length")
    assert len(outcomes["ignores"].tokens) == 12


@pytest.mark.parametrize("max_tokens", [None, 64, 1000])
def test_the_context_ends_a_request_that_may_go_on(max_tokens):
    engine, _ = build(max_model_len=20)
    engine.add_request("a", [1] * 15, greedy(max_tokens))
    assert drain(engine)["a"].result == expected([1] * 15, greedy(max_tokens), 20)
    engine.add_request("longest", [1] * 19, greedy(max_tokens))
    assert len(drain(engine)["longest"].tokens) == 1


def test_an_abort_is_reported_by_the_next_step_and_unknown_ids_are_ignored():
    engine, _ = build()
    engine.abort_request("nobody")
    engine.add_request("a", [1, 2], greedy(20))
    for _ in range(4):
        engine.step()
    engine.abort_request("a")
    engine.abort_request("a")
    engine.audit()
    (update,) = engine.step()
    assert (update.finish_reason, update.new_token_ids) == ("abort", ())
    assert (update.num_prompt_tokens, update.num_output_tokens) == (2, 3)
    assert update.timings is not None
    assert not engine.has_unfinished_requests()


def test_an_id_may_be_used_again_while_the_token_of_its_last_owner_is_in_flight():
    engine, _ = build()
    engine.add_request("a", [1, 2], greedy(20))
    engine.step()
    engine.abort_request("a")
    engine.add_request("a", [9, 8, 7], greedy(4))
    engine.audit()
    (abort,) = engine.step()
    assert abort.finish_reason == "abort"
    assert drain(engine)["a"].result == expected([9, 8, 7], greedy(4))


def test_unseeded_requests_differ_and_an_engine_with_the_same_seed_repeats_them():
    def run(seed: int) -> list[list[int]]:
        engine, _ = build(seed=seed)
        for i in range(3):
            engine.add_request(str(i), [1], SamplingParams(max_tokens=12, ignore_eos=True))
        outcomes = drain(engine)
        return [outcomes[str(i)].tokens for i in range(3)]

    first = run(0)
    assert first == run(0)
    assert len({tuple(tokens) for tokens in (*first, *run(1))}) == 6


@pytest.mark.parametrize(
    ("prompt", "num_blocks", "message"),
    [
        ([], 100, "the prompt has 0 tokens, it needs at least 1"),
        ([1] * 64, 100, "the prompt has 64 tokens, at most 63"),
        ([1, VOCAB], 100, f"prompt token {VOCAB} is outside the vocabulary, 0 to {VOCAB - 1}"),
        ([-1], 100, "prompt token -1 is outside the vocabulary"),
        ([1] * 20, 1 + 3, "needs 4 KV blocks of 8 tokens, the pool has 3"),
    ],
)
def test_a_request_that_cannot_be_is_refused_and_the_engine_goes_on(prompt, num_blocks, message):
    engine, _ = build(num_blocks=num_blocks)
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        engine.add_request("bad", prompt, greedy(8))
    engine.audit()
    assert not engine.has_unfinished_requests()
    engine.add_request("bad", [1], greedy(8))
    with pytest.raises(InvalidRequest, match="request id bad is in use"):
        engine.add_request("bad", [1], greedy(8))
    assert drain(engine)["bad"].result == expected([1], greedy(8))


class Broken(Exception):
    """A device fault."""


class BrokenRunner(FakeRunner):
    breaks = ""

    def permute_rows(self, sources_B: np.ndarray) -> None:
        self._break("permute")
        super().permute_rows(sources_B)

    def decode(self, shape: DecodeShape, new_blocks_B: np.ndarray) -> Any:
        self._break("decode")
        return self._maybe_unreadable(super().decode(shape, new_blocks_B))

    def prefill(self, batch: Any) -> Any:
        self._break("prefill")
        return self._maybe_unreadable(super().prefill(batch))

    def _break(self, what: str) -> None:
        if self.breaks == what:
            raise Broken(what)

    def _maybe_unreadable(self, pending: FakePending) -> FakePending:
        if self.breaks == "read":
            pending.read = lambda: self._break("read")  # type: ignore[method-assign]
        return pending


@pytest.mark.parametrize("breaks", ["permute", "decode", "prefill", "read"])
def test_a_failing_device_ends_the_engine_for_good_with_the_cause_kept(breaks):
    engine, runner = build(BrokenRunner)
    runner.breaks = breaks
    engine.add_request("a", [1, 2], greedy(2))
    engine.add_request("b", [1, 2], greedy(9))
    with pytest.raises(EngineDead, match=breaks) as death:
        drain(engine)
    assert isinstance(death.value.__cause__, Broken)
    for call in (
        engine.step,
        lambda: engine.add_request("c", [1], greedy(2)),
        lambda: engine.abort_request("a"),
    ):
        with pytest.raises(EngineDead) as again:
            call()
        assert isinstance(again.value.__cause__, Broken)


def test_an_interrupt_passes_and_the_engine_is_dead_after_it():
    class Interrupted(FakeRunner):
        def decode(self, shape: DecodeShape, new_blocks_B: np.ndarray) -> Any:
            raise KeyboardInterrupt

    engine, _ = build(Interrupted)
    engine.add_request("a", [1, 2], greedy(5))
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    with pytest.raises(EngineDead):
        engine.step()


def test_times_come_from_the_clock_given():
    ticks = itertools.count()
    engine, _ = build(clock=lambda: float(next(ticks)))
    engine.add_request("a", [1], greedy(3))  # clock 0
    # Steps read the clock to schedule, and again to commit: (1), (2, 3), (4, 5), (6, 7).
    last = drain(engine)["a"].last
    assert last is not None
    assert last.timings is not None
    assert (last.timings.queue_s, last.timings.prefill_s, last.timings.decode_s) == (1.0, 2.0, 4.0)


def test_stats_count_what_was_done():
    engine, _ = build(num_blocks=50, max_num_seqs=4)
    for i, max_tokens in enumerate([2, 3, 3]):
        engine.add_request(str(i), [1] * 5, greedy(max_tokens))
    assert engine.stats().num_waiting == 3
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (3, 0)
    assert (stats.num_blocks, stats.num_free_blocks) == (49, 46)
    drain(engine)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (15, 8)
    # One prefill of 15, a decode of three in a bucket of 4, a decode of two in a bucket of 2.
    assert (stats.num_steps, stats.scheduled_tokens) == (3, 15 + 3 + 2)
    assert (stats.padded_rows, dict(stats.decode_replays)) == (1, {4: 1, 2: 1})


def test_a_recomputed_prompt_is_counted_once():
    engine, _ = build(num_blocks=1 + 11)
    run_pressure(engine)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prompt_tokens == sum(len(prompt) for prompt, _ in PRESSURE)
    assert stats.scheduled_tokens > stats.prompt_tokens + stats.generation_tokens - len(PRESSURE)
