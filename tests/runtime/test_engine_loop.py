"""The engine loop: overlap, order, ends, aborts, refusals, faults, times and counts."""

from __future__ import annotations

import itertools
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jaxserve.config import SamplingParams
from jaxserve.errors import EngineDead, InvalidRequest
from jaxserve.plan.buckets import DecodeShape
from tests.engine_harness import EOS, VOCAB, build, drain, expected, greedy
from tests.fakes import FakePending, FakeRunner


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

    def decode(self, *arguments: Any) -> Any:
        return self._launch(super().decode, *arguments)

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

    def decode(self, *arguments: Any) -> Any:
        return self._watch(super().decode(*arguments))

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
    assert engine.has_unfinished_requests()  # a token in flight and an abort to report
    (update,) = engine.step()
    assert (update.finish_reason, update.new_token_ids) == ("abort", ())
    assert (update.num_prompt_tokens, update.num_output_tokens) == (2, 3)
    assert update.timings is not None
    assert not engine.has_unfinished_requests()


def test_the_engine_is_unfinished_until_all_is_reported_and_read_back():
    engine, _ = build()
    engine.add_request("queued", [1], greedy())
    engine.abort_request("queued")
    assert engine.has_unfinished_requests()
    assert [u.finish_reason for u in engine.step()] == ["abort"]
    assert not engine.has_unfinished_requests()
    stop = expected([1], greedy())[0][0]
    engine.add_request("stops", [1], greedy(stop_token_ids=(stop,)))
    engine.step()
    assert [u.finish_reason for u in engine.step()] == ["stop"]
    assert engine.has_unfinished_requests()
    assert engine.step() == []
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

    def decode(self, *arguments: Any) -> Any:
        self._break("decode")
        return self._maybe_unreadable(super().decode(*arguments))

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
        def decode(self, *arguments: Any) -> Any:
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


def test_a_step_that_only_decodes_is_timed_from_the_reading_of_the_step_before_it():
    now = 0.0

    def clock():
        nonlocal now
        now += 1.0
        return now

    engine, _ = build(clock=clock)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for _ in range(2):
        engine.add_request("a", [1, 2, 3], params)
        while engine.has_unfinished_requests():
            engine.step()
    # The first token is a prefill's; the clock ticks for each schedule and each reading.
    assert dict(engine.stats().decode_step_seconds) == {1: (6, 12.0)}


def test_the_shapes_and_the_cells_read_for_nobody_are_counted():
    engine, _ = build()
    engine.add_request("a", [1] * 17, SamplingParams(max_tokens=3, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    stats = engine.stats()
    # Contexts of 18 and 19 tokens on a rectangle of widths 16, 32, ...
    assert dict(stats.shape_replays) == {DecodeShape(1, 32): 2}
    assert stats.padded_cells == (32 - 18) + (32 - 19)
