"""One thread owns the engine; coroutines come, read, leave and are told how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import replace

import pytest

from jaxserve.config import SamplingParams
from jaxserve.errors import EngineDead, InvalidRequest, NotReady, QueueFull, RequestTimeout
from jaxserve.serve.async_engine import AsyncEngine
from tests.serve_fakes import ScriptedEngine

TEN = SamplingParams(max_tokens=10)
LONG = SamplingParams(max_tokens=50)
ENDLESS = SamplingParams(max_tokens=None)


@contextlib.asynccontextmanager
async def bridge(engine: ScriptedEngine, *, max_requests: int = 100, **options):
    wrapped = AsyncEngine(engine, max_requests=max_requests, **options)
    try:
        yield wrapped
    finally:
        if engine.gate is not None:
            engine.gate.release(10_000)
        await asyncio.wait_for(wrapped.shutdown(0.0), 30)


async def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited 30 s in vain"
        await asyncio.sleep(0.002)


async def add_during_step(bridged, engine, request_id: str, params: SamplingParams):
    """Asks while a step is held at the gate, then lets that one step end."""
    asking = asyncio.create_task(bridged.add_request(request_id, [1], params))
    await asyncio.sleep(0)  # the request is in the inbox
    engine.gate.release()
    return await asking


async def tokens_of(stream) -> list[int]:
    return [token for update in [u async for u in stream] for token in update.new_token_ids]


async def test_concurrent_requests_get_their_own_tokens_in_order():
    engine = ScriptedEngine(script=range(100, 110))
    async with bridge(engine) as bridged:
        streams = [
            await bridged.add_request(f"r{i}", [1], SamplingParams(max_tokens=i + 1))
            for i in range(10)
        ]
        answers = await asyncio.gather(*map(tokens_of, streams))
    assert answers == [list(range(100, 101 + i)) for i in range(10)]


async def test_only_one_thread_ever_touches_the_engine():
    engine = ScriptedEngine(script=[7])
    async with bridge(engine) as bridged:
        await tokens_of(await bridged.add_request("a", [1], TEN))
        stream = await bridged.add_request("b", [1], LONG)
        stream.close()
        await until(lambda: not engine.jobs)
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


async def test_a_step_reaches_a_loop_with_one_call_whatever_the_number_of_requests():
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0), max_model_len=10**9)
    async with bridge(engine) as bridged:
        ids = {f"r{i}" for i in range(9)}
        await bridged.add_request("r0", [1], ENDLESS)
        for request_id in sorted(ids - {"r0"}):
            await add_during_step(bridged, engine, request_id, ENDLESS)
        loop = asyncio.get_running_loop()
        calls, post = [], loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (calls.append(args), post(*args))[1]
        try:
            engine.gate.release(5)
            await until(lambda: len(calls) >= 5)
        finally:
            del loop.call_soon_threadsafe
        for _, items in calls:  # all requests, none of them twice
            assert len(items) == 9
            assert {stream.request_id for stream, _ in items} == ids


async def test_what_the_engine_refuses_is_raised_where_it_was_asked_and_the_engine_goes_on():
    async with bridge(ScriptedEngine(script=[7])) as bridged:
        with pytest.raises(InvalidRequest, match="vocabulary"):
            await bridged.add_request("a", [5000], TEN)
        with pytest.raises(InvalidRequest, match="0 tokens"):
            await bridged.add_request("b", [], TEN)
        assert await tokens_of(await bridged.add_request("c", [1], TEN)) == [7] * 10


async def test_leaving_a_stream_aborts_its_request_and_no_other():
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0))
    async with bridge(engine) as bridged:
        kept = await bridged.add_request("kept", [1], TEN)
        async with await add_during_step(bridged, engine, "left", LONG) as left:
            engine.gate.release()
            await anext(left)
        engine.gate.release(100)
        assert await tokens_of(kept) == [7] * 10
        await until(lambda: engine.aborted == ["left"])
        with pytest.raises(StopAsyncIteration):
            await anext(left)


async def test_a_caller_cancelled_while_asking_leaves_nothing_behind():
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0))
    async with bridge(engine, max_requests=2) as bridged:
        first = await bridged.add_request("first", [1], TEN)
        await until(engine.step_started.is_set)  # the thread is inside a step: nobody is taken
        asking = asyncio.create_task(bridged.add_request("asking", [1], TEN))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        engine.gate.release(100)
        assert await tokens_of(first) == [7] * 10
        await until(lambda: engine.aborted == ["asking"])
        for name in ("c", "d"):
            await bridged.add_request(name, [1], TEN)


async def test_a_full_queue_refuses_and_takes_again_when_a_request_has_ended():
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0))
    async with bridge(engine, max_requests=2) as bridged:
        streams = [await bridged.add_request("a", [1], TEN)]
        streams.append(await add_during_step(bridged, engine, "b", TEN))
        with pytest.raises(QueueFull, match=r"2 requests .* at most 2 .*--max-queued-requests"):
            await bridged.add_request("c", [1], TEN)
        engine.gate.release(100)
        assert [len(await tokens_of(stream)) for stream in streams] == [10, 10]
        assert await tokens_of(await bridged.add_request("d", [1], TEN)) == [7] * 10


async def test_a_refused_request_does_not_take_a_place_in_the_queue():
    async with bridge(ScriptedEngine(script=[7]), max_requests=1) as bridged:
        for attempt in range(3):
            with pytest.raises(InvalidRequest):
                await bridged.add_request(f"r{attempt}", [], TEN)
        assert len(await tokens_of(await bridged.add_request("ok", [1], TEN))) == 10


async def test_a_step_that_raises_ends_every_request_and_says_why():
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0))
    deaths: list[BaseException] = []
    wrapped = AsyncEngine(engine, max_requests=9, on_death=deaths.append)
    streams = [await wrapped.add_request("a", [1], TEN)]
    streams.append(await add_during_step(wrapped, engine, "b", TEN))
    assert wrapped.alive
    engine.fault = RuntimeError("the device fell off the bus")
    engine.gate.release(100)
    for stream in streams:
        with pytest.raises(EngineDead, match="fell off the bus"):
            await tokens_of(stream)
    await until(lambda: not wrapped.alive and deaths)
    assert deaths == [engine.fault]
    assert not wrapped.accepting
    with pytest.raises(EngineDead, match="fell off the bus"):
        await wrapped.add_request("c", [1], TEN)
    await asyncio.wait_for(wrapped.shutdown(5), 30)


async def test_books_that_do_not_balance_when_idle_end_the_engine():
    class Leaky(ScriptedEngine):
        def audit(self) -> None:
            raise AssertionError("a block is lost")

    deaths: list[BaseException] = []
    wrapped = AsyncEngine(Leaky(script=[7]), max_requests=9, on_death=deaths.append)
    await tokens_of(await wrapped.add_request("a", [1], TEN))
    await until(lambda: not wrapped.alive and deaths)
    assert "a block is lost" in str(deaths[0])


async def test_a_shutdown_lets_running_requests_finish_and_takes_no_more():
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0))
    wrapped = AsyncEngine(engine, max_requests=9)
    stream = await wrapped.add_request("a", [1], TEN)
    ending = asyncio.create_task(wrapped.shutdown(60))
    await asyncio.sleep(0)
    with pytest.raises(NotReady, match="stopping"):
        await wrapped.add_request("b", [1], TEN)
    assert not wrapped.accepting
    engine.gate.release(100)
    assert await tokens_of(stream) == [7] * 10
    await asyncio.wait_for(ending, 30)
    assert not wrapped.alive
    assert wrapped.error is None
    assert engine.aborted == []


async def test_what_runs_past_the_grace_is_aborted_in_the_engine_and_told():
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0))
    wrapped = AsyncEngine(engine, max_requests=9)
    stream = await wrapped.add_request("a", [1], LONG)
    patient = asyncio.create_task(wrapped.shutdown(3600))
    await asyncio.sleep(0)
    hurried = asyncio.create_task(wrapped.shutdown(0))  # a second signal
    await asyncio.sleep(0)
    engine.gate.release(3)
    with pytest.raises(NotReady, match="stopping"):
        await tokens_of(stream)
    await asyncio.wait_for(asyncio.gather(patient, hurried), 30)
    assert engine.aborted == ["a"]
    assert not engine.has_unfinished_requests()


async def test_a_step_that_hangs_is_no_life_sign():
    now = [0.0]
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0))
    async with bridge(engine, stall_s=30.0, clock=lambda: now[0]) as bridged:
        await bridged.add_request("a", [1], TEN)
        await until(engine.step_started.is_set)
        now[0] = 29.0
        assert bridged.alive
        now[0] = 31.0
        assert not bridged.alive
        engine.gate.release(100)
        await until(lambda: bridged.alive)


async def test_on_step_is_told_the_totals_and_what_ended():
    told = []
    engine = ScriptedEngine(script=[7])
    async with bridge(engine, on_step=lambda stats, ended: told.append((stats, ended))) as bridged:
        await tokens_of(await bridged.add_request("a", [1], SamplingParams(max_tokens=3)))
    assert [stats.generation_tokens for stats, _ in told] == [1, 2, 3]
    assert [[update.request_id for update in ended] for _, ended in told] == [[], [], ["a"]]


def test_requests_of_a_loop_that_is_gone_are_aborted():
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0), max_model_len=10**9)
    wrapped = AsyncEngine(engine, max_requests=9)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(wrapped.add_request("a", [1], SamplingParams(max_tokens=None)))
    loop.close()
    engine.gate.release(10**6)

    async def rest() -> None:
        await until(lambda: engine.aborted == ["a"])
        await wrapped.shutdown(10)

    asyncio.run(rest())
    assert engine.aborted == ["a"]


async def test_a_function_of_the_engine_runs_on_its_thread_between_two_steps():
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0))
    async with bridge(engine) as bridged:
        stream = await bridged.add_request("a", [1], TEN)
        await until(engine.step_started.is_set)
        asking = asyncio.create_task(
            bridged.call(lambda inside: (inside, threading.get_ident(), inside.jobs["a"].emitted))
        )
        await asyncio.sleep(0)
        assert not asking.done()  # the step is held at the gate
        engine.gate.release()
        inside, thread, emitted = await asking
        assert (inside, emitted) == (engine, 1)
        assert {thread} == engine.threads
        engine.gate.release(100)
        assert await tokens_of(stream) == [7] * 10


async def test_what_a_function_raises_reaches_its_caller_and_the_engine_goes_on():
    async with bridge(ScriptedEngine(script=[7])) as bridged:
        with pytest.raises(ZeroDivisionError):
            await bridged.call(lambda engine: 1 // 0)
        assert await tokens_of(await bridged.add_request("a", [1], TEN)) == [7] * 10


async def test_a_function_whose_caller_gave_up_is_never_run():
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0))
    ran = []
    async with bridge(engine) as bridged:
        stream = await bridged.add_request("a", [1], TEN)
        await until(engine.step_started.is_set)
        asking = asyncio.create_task(bridged.call(ran.append))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        engine.gate.release(100)
        await tokens_of(stream)
        await bridged.call(lambda engine: None)
    assert ran == []


async def test_functions_that_wait_when_the_engine_dies_are_told_and_later_ones_refused():
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0))
    wrapped = AsyncEngine(engine, max_requests=9)
    stream = await wrapped.add_request("a", [1], TEN)
    await until(engine.step_started.is_set)
    asking = asyncio.create_task(wrapped.call(lambda engine: None))
    await asyncio.sleep(0)
    engine.fault = RuntimeError("the device fell off the bus")
    engine.gate.release(100)
    for dead in (asking, tokens_of(stream), wrapped.call(lambda engine: None)):
        with pytest.raises(EngineDead, match="fell off the bus"):
            await dead
    await asyncio.wait_for(wrapped.shutdown(0), 30)


async def test_a_request_that_takes_too_long_is_ended_and_told_and_its_place_is_free():
    now = [0.0]
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0))
    options = {"request_timeout_s": 5.0, "clock": lambda: now[0], "max_requests": 2}
    async with bridge(engine, **options) as bridged:
        old = await bridged.add_request("old", [1], LONG)
        now[0] = 4.0
        young = await add_during_step(bridged, engine, "young", LONG)
        now[0] = 5.5
        engine.gate.release()
        with pytest.raises(RequestTimeout, match=r"longer than 5 s \(--request-timeout\)"):
            await tokens_of(old)
        assert engine.aborted == ["old"]
        await add_during_step(bridged, engine, "next", LONG)
        engine.gate.release(100)
        assert await tokens_of(young) == [7] * 50


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
async def test_a_pause_holds_new_requests_and_does_to_running_ones_what_its_mode_says(mode):
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0))
    async with bridge(engine) as bridged:
        running = await bridged.add_request("running", [1], TEN)
        await until(engine.step_started.is_set)
        pausing = asyncio.create_task(bridged.pause(mode))
        await asyncio.sleep(0)
        engine.gate.release(100)
        await pausing
        assert bridged.paused
        left = [job.params.max_tokens - job.emitted for job in engine.jobs.values()]
        assert left == ([9] if mode == "keep" else [])
        assert engine.aborted == (["running"] if mode == "abort" else [])
        waiting = asyncio.create_task(bridged.add_request("new", [1], TEN))
        await bridged.call(lambda engine: None)  # the thread has read what came before
        assert "new" not in engine.jobs
        await bridged.resume()
        assert await tokens_of(await waiting) == [7] * 10
        assert len(await tokens_of(running)) == (1 if mode == "abort" else 10)
        assert not bridged.paused


async def test_a_request_that_leaves_or_runs_out_of_time_during_a_pause_never_runs():
    now = [0.0]
    engine = ScriptedEngine(script=[7])
    async with bridge(engine, request_timeout_s=5.0, clock=lambda: now[0]) as bridged:
        await bridged.pause("wait")
        leaving, late = (
            asyncio.create_task(bridged.add_request(name, [1], TEN)) for name in ("a", "b")
        )
        await asyncio.sleep(0)
        leaving.cancel()
        now[0] = 6.0
        with pytest.raises(RequestTimeout):
            await late
        await bridged.resume()
        await until(lambda: bridged.num_open == 0)
    assert engine.seen == []


class Sleeper(ScriptedEngine):
    asleep = False

    def stats(self):
        return replace(super().stats(), asleep=self.asleep)


async def test_what_is_asked_of_a_sleeping_engine_is_refused_also_right_behind_the_order():
    engine = Sleeper(script=[7], gate=threading.Semaphore(0))
    async with bridge(engine) as bridged:
        running = await bridged.add_request("running", [1], TEN)
        await until(engine.step_started.is_set)
        ordering = asyncio.create_task(bridged.call(lambda engine: setattr(engine, "asleep", True)))
        behind = asyncio.create_task(bridged.add_request("behind", [1], TEN))
        await asyncio.sleep(0)  # both are in the inbox
        engine.gate.release()
        await ordering
        assert bridged.stats().asleep
        with pytest.raises(NotReady, match="POST /wake_up"):
            await behind
        with pytest.raises(NotReady, match="POST /wake_up"):
            await bridged.add_request("later", [1], TEN)
        engine.asleep = False
        engine.gate.release(100)
        assert await tokens_of(running) == [7] * 10
        assert len(engine.seen) == 1


async def test_a_shutdown_ends_a_pause_so_that_what_it_froze_may_finish():
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0))
    wrapped = AsyncEngine(engine, max_requests=9)
    stream = await wrapped.add_request("a", [1], TEN)
    pausing = asyncio.create_task(wrapped.pause("keep"))
    await asyncio.sleep(0)
    engine.gate.release()
    await pausing
    engine.gate.release(100)
    ending = asyncio.create_task(wrapped.shutdown(60))
    assert await tokens_of(stream) == [7] * 10
    await asyncio.wait_for(ending, 30)
    assert engine.aborted == []


async def test_a_second_pause_or_a_resume_lets_the_first_return():
    engine = ScriptedEngine(script=[7], gate=threading.Semaphore(0))
    async with bridge(engine) as bridged:
        stream = await bridged.add_request("a", [1], TEN)
        first = asyncio.create_task(bridged.pause("wait"))
        second = asyncio.create_task(bridged.pause("keep"))
        await asyncio.sleep(0)
        engine.gate.release(100)
        await asyncio.wait_for(asyncio.gather(first, second), 30)
        await bridged.resume()
        assert await tokens_of(stream) == [7] * 10
