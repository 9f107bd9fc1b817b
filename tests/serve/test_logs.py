"""Log lines: one a request with where its time went, one on the engine now and then, no secrets."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.outputs import EngineStats
from jaxserve.serve.logs import EngineLog, LogWriter, log_line
from tests.serve_fakes import ScriptedEngine, client_of, wait_until

LINE = re.compile(r'\S+ \S+( [a-z_]+=([^\s"=]+|"([^"\\]|\\.)*"))*')


class Lines(list):
    """Collects what is logged."""

    def __call__(self, event, fields) -> None:
        self.append((event, {name: value for name, value in fields.items() if value is not None}))


@given(values=st.dictionaries(st.sampled_from("abc"), st.text() | st.integers() | st.booleans()))
@settings(deadline=None)
def test_no_value_breaks_out_of_its_line_or_its_field(values):
    text = log_line("text", 0.0, "request", values)
    assert LINE.fullmatch(text)
    assert text.startswith("1970-01-01T00:00:00.000+00:00 request")
    line = log_line("json", 0.0, "request", values)
    assert "\n" not in line
    assert (
        json.loads(line) == {"time": "1970-01-01T00:00:00.000+00:00", "event": "request"} | values
    )


async def test_a_request_is_one_line_with_its_tokens_and_where_its_time_went():
    lines = Lines()
    async with client_of(ScriptedEngine(script=[5]), log=lines) as client:
        headers = {"X-Request-Id": "abc-1"}
        call = {"prompt": ["secret words", "fox"], "max_tokens": 3, "model": "tiny-alias"}
        await client.post("/v1/completions?key=sk-secret", json=call, headers=headers)
    [(event, line)] = lines
    assert event == "request"
    seconds = {name: line.pop(name) for name in ("total_s", "ttft_s", "decode_s")}
    assert seconds["total_s"] >= seconds["ttft_s"] >= 0
    prompt_tokens = line.pop("prompt_tokens")
    assert prompt_tokens > 3
    assert line == {
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "request_id": "abc-1",
        "model": "tiny-alias",
        "stream": False,
        "cached_tokens": 0,
        "output_tokens": 6,
        "queue_s": 0.5,
        "prefill_s": 0.25,
        "finish_reason": "length",
    }


async def test_a_prompt_of_several_choices_counts_once_and_their_tokens_all():
    lines = Lines()
    async with client_of(ScriptedEngine(script=[5]), log=lines) as client:
        call = {"prompt": [7, 8, 9], "n": 4, "max_tokens": 2}
        reply = await client.post("/v1/completions", json=call)
        metrics = (await client.get("/metrics")).text
    assert reply.json()["usage"]["prompt_tokens"] == 3
    assert (lines[0][1]["prompt_tokens"], lines[0][1]["output_tokens"]) == (3, 8)
    assert 'request_prompt_tokens_sum{model_name="tiny"} 3.0' in metrics


async def test_no_line_holds_a_prompt_an_answer_or_a_key():
    lines = Lines()
    async with client_of(ScriptedEngine(script=[5]), log=lines, api_keys=("sk-secret",)) as client:
        for key in ("sk-secret", "sk-wrong"):
            for body in ({"prompt": "my secret"}, {"prompt": "my secret", "secret": 1}, {"x": {}}):
                await client.post(
                    "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
                )
        await client.post("/v1/completions", content=b"secret")
    assert len(lines) == 7
    assert "secret" not in str(lines)
    assert "sk-" not in str(lines)


async def test_probes_are_logged_when_debugging_only():
    for log_probes in (False, True):
        lines = Lines()
        async with client_of(
            ScriptedEngine(script=[5]), log=lines, log_probes=log_probes
        ) as client:
            for path in ("/health", "/ready", "/metrics", "/version"):
                await client.get(path)
        paths = [fields["path"] for _, fields in lines]
        assert paths == (
            ["/health", "/ready", "/metrics", "/version"] if log_probes else ["/version"]
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_is_told_from_one_that_was_answered(stream):
    lines = Lines()
    engine = ScriptedEngine(script=[5], gate=threading.Semaphore(0), max_model_len=10**9)
    async with client_of(engine, log=lines) as client:
        body = {"prompt": "x", "stream": stream, "max_tokens": 10**8}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        async with asyncio.timeout(30):
            while not any(job.emitted >= 3 for job in engine.jobs.values()):
                engine.gate.release()
                await asyncio.sleep(0.002)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        engine.gate.release(10**6)
        async with asyncio.timeout(30):
            while not lines:
                await asyncio.sleep(0.002)
    [(_, line)] = lines
    assert line["finish_reason"] == "abort"
    assert line["total_s"] > 0


def test_the_engine_is_told_of_every_ten_seconds_while_it_does_something():
    lines, now = Lines(), [0.0]
    log = EngineLog(lines, clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        stats = EngineStats(
            num_running=2,
            num_waiting=1,
            num_blocks=10,
            num_free_blocks=4,
            prompt_tokens=100 * second,
            generation_tokens=30 * second,
            num_preemptions=second,
            prefix_cache_queries=50 * second,
            prefix_cache_hits=20 * second,
        )
        log.observe_step(stats)
    assert [event for event, _ in lines] == ["engine", "engine"]
    assert lines[1][1] == {
        "running": 2,
        "waiting": 1,
        "kv_cache_usage": 0.6,
        "prompt_tokens_per_s": 100.0,
        "generation_tokens_per_s": 30.0,
        "preemptions": 10,
        "prefix_cache_hit_rate": 0.4,
    }


def test_an_hour_without_requests_does_not_count_in_the_engines_rates():
    lines, now = Lines(), [0.0]
    log = EngineLog(lines, clock=lambda: now[0])
    log.observe_step(EngineStats(generation_tokens=50))
    for second in range(11):
        now[0] = 3600.0 + second
        log.observe_step(EngineStats(num_running=1, generation_tokens=50 + 20 * second))
    [(_, line)] = lines
    assert line["generation_tokens_per_s"] == 20.0


class Stalled(io.StringIO):
    """A stream whose reader does not read until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        self.go.wait()
        return super().write(text)


def test_a_reader_that_stalls_costs_lines_and_no_time():
    stream = Stalled()
    writer = LogWriter(stream, "json", capacity=5)
    for number in range(100):
        writer("request", {"number": number})  # returns, or this test never ends
    stream.go.set()
    wait_until(lambda: stream.getvalue().count("\n") >= 5)
    writer.close(30.0)
    written = [json.loads(line) for line in stream.getvalue().splitlines()]
    kept = [line for line in written if line["event"] == "request"]
    assert sum(line.get("dropped", 0) for line in written) == 100 - len(kept)
    assert 5 <= len(kept) <= 6
    assert [line["number"] for line in kept] == list(range(len(kept)))


def test_a_log_that_cannot_be_written_does_not_end_the_writer():
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            if "first" in text:
                raise OSError(28, "No space left on device")
            return super().write(text)

    stream = Full()
    writer = LogWriter(stream, "text")
    writer("first", {})
    writer("second", {})
    writer.close(30.0)
    assert " second\n" in stream.getvalue()
    assert "dropped=1" in stream.getvalue()
