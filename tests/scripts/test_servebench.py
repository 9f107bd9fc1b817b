"""The load bench's client over a real socket, its arithmetic, and what it refuses."""

import asyncio
import contextlib
import csv
import json
import socket
from dataclasses import fields, replace

import httpx
import load_client
import pytest
from figures import percentile
from hypothesis import given, settings
from hypothesis import strategies as st
from load_client import BenchError, ClientSaw, Load, Outcome, counter

from jaxserve.sched.outputs import ExecutableStats
from jaxserve.serve.app import create_app
from jaxserve.serve.async_engine import AsyncEngine
from jaxserve.serve.metrics import Metrics
from scripts import servebench
from scripts.servebench import ARMS
from tests.serve_fakes import ScriptedEngine, app_parts, byte_level_tokenizer, served

TOKENIZER = byte_level_tokenizer()
SCRIPT = TOKENIZER.encode("the quick brown fox", add_special_tokens=False).ids
LOAD = Load(requests=5, concurrency=2, prompt_tokens=7, max_tokens=6, seed=3)


@contextlib.contextmanager
def server_of(engine, compiles=lambda: 0):
    """A server over a scripted engine, which counts ``compiles()`` compiles after it was ready."""
    metrics = Metrics(
        "tiny",
        max_model_len=engine.max_model_len,
        executables=lambda: ExecutableStats(compiles_after_ready=compiles()),
    )
    bridge = AsyncEngine(engine, max_requests=64, on_step=metrics.observe_step)
    try:
        with served(create_app(app_parts(engine, engine=bridge, metrics=metrics))) as url:
            yield url
    finally:
        asyncio.run(asyncio.wait_for(bridge.shutdown(0.0), 30))


async def run(url, load=LOAD):
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        return await load_client.run_load(client, load)


def saw(times_s, compiles=0, tokens=None):
    return ClientSaw(times_s=times_s, tokens=tokens or len(times_s) - 1, compiles=compiles)


def test_every_client_gets_its_tokens_and_the_server_counts_as_many():
    engine = ScriptedEngine(script=SCRIPT)
    with server_of(engine) as url:
        outcome = asyncio.run(run(url))
    assert [client.tokens for client in outcome.clients] == [LOAD.max_tokens] * LOAD.requests
    assert outcome.tokens == engine.stats().generation_tokens == 30
    for client in outcome.clients:
        assert 0 < client.ttft_s < outcome.seconds
        assert len(client.gaps_s) == LOAD.max_tokens - 1
        assert sum(client.gaps_s) + client.ttft_s <= outcome.seconds


def test_prompts_have_their_length_and_follow_from_the_seed():
    def prompts(seed):
        engine = ScriptedEngine(script=SCRIPT)
        with server_of(engine) as url:
            asyncio.run(run(url, replace(LOAD, seed=seed)))
        return {(tuple(prompt), params.seed) for prompt, params in engine.seen}

    first = prompts(3)
    assert {len(prompt) for prompt, _ in first} == {LOAD.prompt_tokens}
    assert len(first) == LOAD.requests
    assert prompts(3) == first
    assert prompts(4).isdisjoint(first)


def test_a_client_counts_the_compiles_of_its_own_time():
    engine = ScriptedEngine(script=SCRIPT)
    # A step compiles: a lone client meets all of its own steps' compiles and no other's.
    with server_of(engine, compiles=lambda: engine.stats().num_steps) as url:
        outcome = asyncio.run(run(url, replace(LOAD, concurrency=1)))
    assert sum(client.compiles for client in outcome.clients) <= outcome.compiles
    assert all(client.compiles >= LOAD.max_tokens for client in outcome.clients)
    assert outcome.compiles == engine.stats().num_steps


def test_a_length_the_context_has_no_room_for_is_refused_by_the_server_and_told():
    engine = ScriptedEngine(script=SCRIPT, max_model_len=10)  # 7 of the prompt and 3 more
    with server_of(engine) as url, pytest.raises(BenchError, match="max_tokens=6 is too large"):
        asyncio.run(run(url))


def test_another_client_of_the_server_is_noticed():
    counted = [0]

    def answer(request):
        if request.url.path == "/metrics":
            return httpx.Response(200, text=f"vllm:generation_tokens_total {counted[0]}")
        if request.url.path == "/v1/completions":
            counted[0] = 31
        return _openai(request)

    with pytest.raises(BenchError, match=r"usage is 6 tokens and the server counts 31"):
        asyncio.run(_run_on(answer, requests=1))


def test_a_server_that_counts_nothing_is_measured_all_the_same():
    outcome = asyncio.run(_run_on(_openai, requests=2))
    assert outcome.compiles is None
    assert [client.compiles for client in outcome.clients] == [None, None]
    result = servebench.summarise("url", LOAD, outcome, None)
    assert result.row()[-3:] == ("-", "-", "-")


@pytest.mark.parametrize("wrong", ["cut", "error", "usage", "silent"])
def test_a_stream_that_is_not_what_was_asked_for_is_refused(wrong):
    with pytest.raises(BenchError):
        asyncio.run(_run_on(lambda request: _openai(request, wrong), requests=1))


def _openai(request, wrong=None):
    """Another server's answers: six tokens in five pieces of text, no metrics."""
    if request.url.path == "/v1/models":
        return httpx.Response(200, json={"data": [{"id": "m"}]})
    if request.url.path == "/tokenize":
        return httpx.Response(200, json={"tokens": [5, 6, 7]})
    if request.url.path == "/metrics":
        return httpx.Response(404)
    pieces = [] if wrong == "silent" else ["a", "b", "", "c", "d", "e"]
    events = [{"choices": [{"text": piece}], "usage": None} for piece in pieces]
    if wrong == "error":
        events.append({"error": {"message": "out of blocks"}, "choices": []})
    events.append({"choices": [], "usage": {"completion_tokens": 5 if wrong == "usage" else 6}})
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return httpx.Response(200, text="".join(lines) + ("" if wrong == "cut" else "data: [DONE]\n\n"))


async def _run_on(answer, requests):
    transport = httpx.MockTransport(answer)
    load = replace(LOAD, requests=requests)
    async with httpx.AsyncClient(transport=transport, base_url="http://other") as client:
        return await load_client.run_load(client, load)


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(0, 1e6), min_size=1, max_size=40),
    percent=st.sampled_from([0, 50, 99, 100]),
)
def test_a_percentile_lies_between_its_two_nearest_ranks(values, percent):
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below, above = ordered[int(rank)], ordered[min(int(rank) + 1, len(ordered) - 1)]
    expected = below + (above - below) * (rank - int(rank))
    assert percentile(values, percent) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_no_latency_at_all_is_not_a_zero():
    with pytest.raises(BenchError, match="--max-tokens"):
        percentile([], 50)


def test_the_table_takes_first_waits_and_gaps_apart_and_never_averages():
    slow = saw((0.0, 2.0, 2.1), compiles=4)
    quick = [saw((0.0, 0.1, 0.2)) for _ in range(4)]
    outcome = Outcome(clients=(slow, *quick), seconds=2.0, compiles=4)
    result = servebench.summarise("exact", LOAD, outcome, 1.5)
    assert result.tokens_per_s == 5.0
    assert result.ttft_p50_ms == pytest.approx(100)
    assert result.ttft_p99_ms == pytest.approx(100 + 1900 * 0.96)
    assert (result.itl_p50_ms, result.itl_p99_ms) == pytest.approx((100, 100))
    assert (result.compiles, result.clients_that_met_one, result.most_for_one) == (4, 1, 4)


def test_a_counter_is_found_under_any_prefix_and_summed_over_its_labels():
    text = (
        "# TYPE vllm:generation_tokens_total counter\n"
        'vllm:generation_tokens_total{engine="0",model_name="a b"} 12.0\n'
        'vllm:generation_tokens_total{engine="1",model_name="a b"} 3.0\n'
        'vllm:prompt_generation_tokens_total{engine="0"} 100.0\n'
    )
    assert counter(text, "generation_tokens_total") == 15
    assert counter(text, "compiles_after_ready_total") is None


def test_a_running_server_is_measured_into_one_csv_line(tmp_path, capsys):
    path = tmp_path / "serve.csv"
    flags = "--requests 3 --concurrency 2 --prompt-tokens 4 --max-tokens 5 --seed 1"
    with server_of(ScriptedEngine(script=SCRIPT)) as url:
        assert servebench.main([*flags.split(), "--url", f"{url}/v1", "--csv", str(path)]) == 0
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert list(row) == [field.name for field in fields(servebench.Result)]
    assert (row["arm"], row["requests"], row["max_tokens"], row["compiles"]) == (
        "url",
        "3",
        "5",
        "0",
    )
    assert 0 < float(row["itl_p50_ms"]) <= float(row["itl_p99_ms"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == ("3 requests, 2 at a time, 4 prompt tokens, 5 generated, seed 1:")
    assert len(printed) == 3


def test_minutes_of_streams_are_a_soak(monkeypatch):
    asked = []
    monkeypatch.setattr(servebench.soak, "main", lambda argv: asked.append(argv) or 0)
    flags = ["--streams", "200", "--minutes", "5", "--dtype", "bfloat16"]
    assert servebench.main(flags) == 0
    assert asked == [flags]


def test_the_arms_are_three_and_only_known_ones_are_taken(capsys):
    assert list(ARMS) == ["exact", "bucketed", "aot"]
    with pytest.raises(SystemExit):
        servebench.main(["--arms", "aot,eager"])
    assert "--arms eager" in capsys.readouterr().err


def test_server_flags_beside_a_running_server_are_refused(capsys):
    with pytest.raises(SystemExit):
        servebench.main(["--url", "http://127.0.0.1:1", "--dtype", "bfloat16"])
    assert "--dtype: the server at --url runs already" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_line(capsys):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    assert servebench.main(["--url", f"http://127.0.0.1:{port}"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("servebench.py: ")
