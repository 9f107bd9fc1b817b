"""The soak on a tiny model's server, its figures, and what it does not let pass."""

import asyncio
import csv
import json
from dataclasses import fields, replace

import httpx
import pytest
import soak_client
from load_client import BenchError
from soak_client import KINDS, Saw, Tally

from scripts import soak
from tests.tiny_server import tiny_server

MB = [100.0, 110.0, 110.0, 111.0]


def test_twenty_streams_of_every_kind_are_kept_count_of_while_more_are_refused(monkeypatch):
    monkeypatch.setattr(soak_client, "_IDLE_S", 60.0)  # the promise is of an idle machine
    with tiny_server(max_queued_requests=22) as url:
        tally = asyncio.run(soak_client.soak(url, clients=30, seconds=4.0, seed=1))
    assert {saw.kind for saw in tally.saw} == set(KINDS)
    assert tally.peak_streams >= 20
    assert tally.refused_s
    assert max(tally.refused_s) < tally.seconds
    assert tally.cached_tokens > 0
    assert tally.open_streams == 0
    answered = sum(tally.finished.values())
    assert answered >= sum(saw.kind != "leaves early" for saw in tally.saw)
    lines = {line.kind: line for line in soak.summarise(tally, [0.1], MB, 1.0)}
    assert lines["all"].tokens == tally.tokens == sum(lines[kind].tokens for kind in KINDS)
    assert lines["all"].requests == len(tally.saw)


EVENTS = [
    {"choices": [{"index": 0, "text": "a", "token_ids": [5], "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "b", "token_ids": [6], "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]},
    {"choices": [], "usage": {"completion_tokens": 2}},
]
COUNTS = {
    "num_requests_running": 0,
    "num_requests_waiting": 0,
    "kv_cache_usage_perc": 0,
    "generation_tokens_total": 2,
    "request_generation_tokens_sum": 2,
    "request_success_total": 1,
    "compiles_after_ready_total": 0,
}


def run_on(events=EVENTS, counts=(), kind="greedy"):
    """One request to a server that answers so, and counts so afterwards."""
    counted = {**COUNTS, **dict(counts)}
    answered = []

    def answer(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [5, 6, 7]})
        if request.url.path == "/metrics":
            values = counted.items() if answered else ()
            return httpx.Response(200, text="\n".join(f"x:{name} {n}" for name, n in values))
        answered.append(request)
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return httpx.Response(200, text="".join(lines) + "data: [DONE]\n\n")

    async def once():
        tally = Tally()
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            asked = {"max_tokens": 2, **KINDS[kind](soak_client.np.random.default_rng(0))}
            before = (await client.get("/metrics")).text
            await soak_client._ask(client, kind, asked, 1, tally)
            soak_client._compare(before, await soak_client._idle(client), tally, 0)
        return tally

    return asyncio.run(once())


def test_what_a_server_of_one_request_counted_is_compared():
    tally = run_on()
    assert tally.tokens == 2
    assert tally.finished == {"length": 1}
    assert run_on(counts={"generation_tokens_total": 5}).dropped_tokens == 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"events": EVENTS[1:]}, "1 tokens streamed"),
        ({"events": EVENTS[:3]}, "usage says None"),
        ({"events": [*EVENTS[:2], EVENTS[3]]}, "ends {}"),
        ({"events": [{"error": {"message": "no blocks"}}]}, "no blocks"),
        ({"kind": "stop strings"}, "the stop string 'a'"),
        ({"counts": {"request_generation_tokens_sum": 1}}, "server counts 1"),
        ({"counts": {"generation_tokens_total": 1}}, "did not generate"),
        ({"counts": {"request_success_total": 2}}, "1 choices ended"),
        ({"counts": {"compiles_after_ready_total": 1}}, "1 executables"),
    ],
)
def test_a_count_that_is_off_ends_the_soak(wrong, said):
    with pytest.raises(BenchError, match=said.replace("{}", r"\{\}")):
        run_on(**wrong)


def test_blocks_that_stay_taken_are_waited_for_and_then_told_of(monkeypatch):
    monkeypatch.setattr(soak_client, "_IDLE_S", 0.0)
    with pytest.raises(BenchError, match=r"kv_cache_usage_perc': 0.5"):
        run_on(counts={"kv_cache_usage_perc": 0.5})


def tally_of(**changes):
    saw = [Saw(kind=kind, tokens=2, ttft_s=1.0, gaps_s=(0.5,)) for kind in KINDS]
    return replace(Tally(saw=saw, refused_s=[0.1, 0.3], seconds=10.0, peak_streams=9), **changes)


def test_a_queue_that_was_never_full_is_no_soak():
    with pytest.raises(BenchError, match="never full"):
        soak.summarise(tally_of(refused_s=[]), [], MB, 1.0)
    with pytest.raises(BenchError, match="greedy"):
        soak.summarise(tally_of(saw=[]), [], MB, 1.0)


STATUS = "2026-11-30T04:00:00.000+00:00 request method=POST path=/v1/completions status="
LOGGED = [
    "ready: http://127.0.0.1:1/v1",
    "2026-11-30T04:00:00.000+00:00 engine running=16 waiting=2",
    STATUS + "429 request_id=a model=m stream=yes total_s=0.001",
    STATUS + "200 request_id=b finish_reason=stop total_s=9.0",
    STATUS + "429 request_id=c total_s=0.003",
]


def test_the_table_has_a_line_for_every_kind_and_the_refusals_apart(tmp_path, monkeypatch, capsys):
    watched = {"memory": MB}

    async def watch(url, pid, args):
        return tally_of(peak_streams=args.streams), watched["memory"]

    class Serving:
        url, pid = "http://x", 1

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    asked = []

    def serving(flags, log):
        asked.append(flags)
        for line in LOGGED:
            log(line)
        return Serving()

    monkeypatch.setattr(soak, "_watch", watch)
    monkeypatch.setattr(soak, "serving", serving)
    path = tmp_path / "soak.csv"
    assert soak.main(["--streams", "20", "--csv", str(path), "--dtype", "bfloat16"]) == 0
    assert asked[0][-4:] == ["--max-queued-requests", "8", "--dtype", "bfloat16"]
    with path.open(newline="") as file:
        rows = {row["kind"]: row for row in csv.DictReader(file)}
    assert list(rows) == [*KINDS, "all", "refused", "refused, server's clock"]
    assert list(rows["all"]) == [field.name for field in fields(soak.Line)]
    assert float(rows["all"]["tokens_per_s"]) == 2 * len(KINDS) / 10
    assert (rows["refused"]["ttft_p50_ms"], rows["refused"]["itl_p50_ms"]) == ("200.0", "")
    own = rows["refused, server's clock"]
    assert (own["requests"], own["ttft_p50_ms"]) == ("2", "2.0")
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)
    watched["memory"] = [100.0, 100.0, 100.0, 120.0]
    assert soak.main(["--streams", "20"]) == 1
    assert "grew from 100 to 120 MB" in capsys.readouterr().err
