"""The real engine, over a fake device, behind the real routes."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.config import SamplingParams
from jaxserve.serve.app import AppParts, create_app
from jaxserve.serve.async_engine import AsyncEngine
from jaxserve.serve.metrics import Metrics
from jaxserve.serve.structured import Grammars
from jaxserve.serve.text import Text
from tests.engine_harness import EOS, VOCAB, build, expected
from tests.serve_fakes import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()


@contextlib.asynccontextmanager
async def client_of(num_blocks: int):
    engine, _ = build(num_blocks=num_blocks)
    metrics = Metrics("tiny", max_model_len=64)
    text = Text(TOKENIZER)
    bridge = AsyncEngine(engine, max_requests=64, on_step=metrics.observe_step)
    app = create_app(
        AppParts(
            engine=bridge,
            text=text,
            grammars=Grammars(text, vocab_size=VOCAB, eos_token_ids=(EOS,)),
            metrics=metrics,
            served_names=("tiny",),
            root="tiny",
            max_model_len=64,
            version="0",
        )
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
        yield client, engine
    await bridge.shutdown(10.0)
    engine.audit()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks


def answer_of(reply: httpx.Response, streamed: bool) -> tuple[str, str, int]:
    """Text, finish reason and number of tokens."""
    if not streamed:
        body = reply.json()
        choice = body["choices"][0]
        return choice["text"], choice["finish_reason"], body["usage"]["completion_tokens"]
    lines = reply.text.removesuffix("data: [DONE]\n\n").strip().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    text = "".join(choice["text"] for choice in choices)
    return text, choices[-1]["finish_reason"], chunks[-1]["usage"]["completion_tokens"]


requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 16), min_size=1, max_size=40),
        "max_tokens": st.integers(1, 24),  # a whole context with the longest prompt
        "temperature": st.sampled_from([0.0, 0.7]),
        "seed": st.integers(0, 99),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, 16), max_size=1),
        "stream": st.booleans(),
    }
)


@given(calls=st.lists(requests, min_size=1, max_size=12), num_blocks=st.integers(12, 40))
@settings(max_examples=15)
def test_concurrent_answers_are_those_each_request_gets_alone(calls, num_blocks):
    async def run() -> tuple[list[httpx.Response], str]:
        async with client_of(num_blocks) as (client, _):

            async def post(call: dict) -> httpx.Response:
                options = {"stream_options": {"include_usage": True}} if call["stream"] else {}
                return await client.post("/v1/completions", json={**call, **options})

            replies = await asyncio.gather(*map(post, calls))
            return replies, (await client.get("/metrics")).text

    replies, metrics = asyncio.run(run())
    num_tokens = 0
    for call, reply in zip(calls, replies, strict=True):
        assert reply.status_code == 200
        params = SamplingParams(
            max_tokens=call["max_tokens"],
            temperature=call["temperature"],
            seed=call["seed"],
            ignore_eos=call["ignore_eos"],
            stop_token_ids=tuple(call["stop_token_ids"]),
        )
        tokens, reason = expected(call["prompt"], params)
        shown = tokens[:-1] if reason == "stop" else tokens
        text, got_reason, count = answer_of(reply, call["stream"])
        assert (text, got_reason, count) == (TOKENIZER.decode(shown), reason, len(tokens))
        num_tokens += count
    totals = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
    }
    assert totals["jaxserve:generation_tokens_total"] == num_tokens
    assert totals["jaxserve:request_generation_tokens_sum"] == num_tokens
    assert totals["jaxserve:prompt_tokens_total"] == sum(len(call["prompt"]) for call in calls)


async def test_clients_that_leave_at_any_moment_give_every_block_back():
    async with client_of(num_blocks=20) as (client, engine):

        async def leave_after(seconds: float, stream: bool) -> None:
            call = {"prompt": [1, 2, 3], "max_tokens": 60, "ignore_eos": True, "stream": stream}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await client.post("/v1/completions", json=call)

        await asyncio.gather(*(leave_after(i * 0.0005, i % 2 == 0) for i in range(40)))
        async with asyncio.timeout(10):
            while engine.has_unfinished_requests():
                await asyncio.sleep(0.002)
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
