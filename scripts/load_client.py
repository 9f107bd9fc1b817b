"""Streaming clients of an OpenAI-compatible server, and what each of them saw.

Works with any server that has /v1/models, /v1/completions and /tokenize; what it counts in /metrics
is used where it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

# Tokenised by the server; prompts are drawn from the ids.
PASSAGE = (
    "The harbour wakes before the town does. Ropes creak, gulls argue over the morning's first "
    "crates, and someone counts barrels aloud while the tide turns under the pier."
)


class BenchError(Exception):
    """The server did not do what was asked; the message says what."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of a server; lengths are tokens."""

    requests: int
    concurrency: int
    prompt_tokens: int
    max_tokens: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class ClientSaw:
    """One request. ``times_s`` are when it was sent and when each piece of text came.

    ``compiles`` is how many the server did meanwhile, None where it does not count them.
    """

    times_s: tuple[float, ...]
    tokens: int
    compiles: int | None

    @property
    def ttft_s(self) -> float:
        """Seconds to the first text."""
        return self.times_s[1] - self.times_s[0]

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Seconds between pieces of text."""
        return tuple(b - a for a, b in zip(self.times_s[1:], self.times_s[2:], strict=False))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What all clients saw, in the order they ended, and the seconds and compiles of the whole."""

    clients: tuple[ClientSaw, ...]
    seconds: float
    compiles: int | None

    @property
    def tokens(self) -> int:
        """Tokens streamed to all clients."""
        return sum(client.tokens for client in self.clients)


def counter(metrics: str, suffix: str) -> float | None:
    """The sum over the label sets of a counter in Prometheus text, whatever its prefix; else None.

    >>> counter('jaxserve:generation_tokens_total{model_name="m"} 12.0', "generation_tokens_total")
    12.0
    """
    pattern = rf"^\w*:?{re.escape(suffix)}(?:\{{[^\n]*\}})? (\S+)$"
    found = re.findall(pattern, metrics, re.MULTILINE)
    return sum(map(float, found)) if found else None


@dataclass(frozen=True)
class Counters:
    """What the server counts; None: it does not."""

    compiles: float | None
    generated: float | None

    @classmethod
    async def read(cls, client: httpx.AsyncClient) -> Counters:
        """As /metrics has them now."""
        reply = await client.get("/metrics")
        text = reply.text if reply.status_code == 200 else ""
        return cls(
            counter(text, "compiles_after_ready_total"), counter(text, "generation_tokens_total")
        )


async def events(lines: AsyncIterator[str]) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of a stream of server-sent events. Raises BenchError without a [DONE]."""
    async for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise BenchError("a stream ended without data: [DONE]")


async def ask(
    client: httpx.AsyncClient, model: str, prompt: Sequence[int], load: Load, index: int
) -> ClientSaw:
    """Stream one completion of exactly ``load.max_tokens`` tokens. Raises BenchError."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": load.max_tokens,
        "temperature": 1.0,
        "seed": load.seed + index,
        "ignore_eos": True,
        "skip_special_tokens": False,  # every token is to be seen
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    before = await Counters.read(client)
    times = [time.perf_counter()]
    usage = None
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise BenchError(f"status {reply.status_code}: {(await reply.aread()).decode()}")
        async with contextlib.aclosing(events(reply.aiter_lines())) as stream:
            async for event in stream:
                if "error" in event:
                    raise BenchError(f"a stream failed: {event['error']['message']}")
                if any(choice["text"] for choice in event["choices"]):
                    times.append(time.perf_counter())
                usage = event.get("usage") or usage
    after = await Counters.read(client)
    if usage is None or usage["completion_tokens"] != load.max_tokens:
        said = None if usage is None else usage["completion_tokens"]
        raise BenchError(f"asked for {load.max_tokens} tokens, the stream's usage says {said}")
    if not 1 < len(times) <= 1 + load.max_tokens:
        raise BenchError(f"{len(times) - 1} pieces of text from {load.max_tokens} tokens")
    return ClientSaw(
        times_s=tuple(times),
        tokens=usage["completion_tokens"],
        compiles=_growth(before.compiles, after.compiles),
    )


async def run_load(
    client: httpx.AsyncClient, load: Load, progress: Callable[[], object] = lambda: None
) -> Outcome:
    """Send all of ``load``; the server must have no other clients.

    Raises BenchError, httpx.HTTPError.
    """
    model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
    reply = await client.post("/tokenize", json={"model": model, "prompt": PASSAGE})
    ids = reply.raise_for_status().json()["tokens"]
    prompts = np.random.default_rng(load.seed).choice(ids, (load.requests, load.prompt_tokens))
    waiting = iter(enumerate(prompts.tolist()))
    saw: list[ClientSaw] = []

    async def one_after_another() -> None:
        for index, prompt in waiting:
            saw.append(await ask(client, model, prompt, load, index))
            progress()

    before = await Counters.read(client)
    start = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as tasks:  # the first failure ends the other clients
            for _ in range(load.concurrency):
                tasks.create_task(one_after_another())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    seconds = time.perf_counter() - start
    after = await Counters.read(client)
    compiles = _growth(before.compiles, after.compiles)
    outcome = Outcome(clients=tuple(saw), seconds=seconds, compiles=compiles)
    counted = _growth(before.generated, after.generated)
    if counted is not None and counted != outcome.tokens:
        raise BenchError(
            f"the streams' usage is {outcome.tokens} tokens and the server counts {counted}: "
            "it must have no other clients"
        )
    return outcome


def _growth(before: float | None, after: float | None) -> int | None:
    return None if before is None or after is None else int(after - before)
