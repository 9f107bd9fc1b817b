"""Clients that ask for everything a server offers, and count what they get."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from load_client import PASSAGE, BenchError, counter, events

_IDLE_S = 1.0  # after the last answer, for every block to be free
_REGEX = "(red|green|blue) [0-9]{1,3}"
_SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
    "additionalProperties": False,
}
_STRUCTURED = (
    {"structured_outputs": {"regex": _REGEX}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}},
)

Ids = list[int]
# What a kind of request adds to the body; drawn from the generator it gets.
KINDS: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "greedy": lambda rng: {"temperature": 0},
    "sampled": lambda rng: {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "seeded": lambda rng: {"seed": int(rng.integers(2**31))},
    "penalised": lambda rng: {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    },
    "logprobs": lambda rng: {"logprobs": 3},
    "stop strings": lambda rng: {"stop": [" the", "a", "\n"]},
    "n=2": lambda rng: {"n": 2},
    "structured": lambda rng: _STRUCTURED[rng.integers(2)],
    "shared prefix": lambda rng: {"temperature": 0},
    "leaves early": lambda rng: {},
}


@dataclass(frozen=True, kw_only=True)
class Saw:
    """What one client saw of one request. ``ttft_s`` is None when it left before a token."""

    kind: str
    tokens: int
    ttft_s: float | None
    gaps_s: tuple[float, ...]


@dataclass
class Tally:
    """What all clients saw, and what the server counted meanwhile.

    ``refused_s``: seconds to each refusal. ``dropped_tokens``: the server's own, computed past a
    stop string or for clients that had left. ``finished`` counts choices by their reason.
    """

    saw: list[Saw] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)
    open_streams: int = 0
    peak_streams: int = 0
    seconds: float = 0.0
    preemptions: int = 0
    cached_tokens: int = 0
    dropped_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that reached clients."""
        return sum(saw.tokens for saw in self.saw)

    @contextlib.contextmanager
    def one_open(self) -> Any:
        """A stream that the server took is open."""
        self.open_streams += 1
        self.peak_streams = max(self.peak_streams, self.open_streams)
        try:
            yield
        finally:
            self.open_streams -= 1


class _Stream:
    """One accepted stream, read chunk by chunk."""

    def __init__(self, kind: str, sent_s: float) -> None:
        self.kind = kind
        self.sent_s = sent_s
        self.times_s: defaultdict[int, list[float]] = defaultdict(list)
        self.text: defaultdict[int, str] = defaultdict(str)
        self.reasons: dict[int, str] = {}
        self.tokens = 0
        self.usage: dict[str, int] | None = None

    def take(self, event: dict[str, Any]) -> None:
        """Raises BenchError for an error."""
        if "error" in event:
            raise BenchError(f"a stream of kind {self.kind} failed: {event['error']['message']}")
        for choice in event["choices"]:
            index, ids = choice["index"], choice.get("token_ids", ())
            self.text[index] += choice["text"]
            self.tokens += len(ids)
            self.times_s[index] += [time.perf_counter()] * len(ids)
            if self.kind == "logprobs" and ids:
                values = choice["logprobs"]["token_logprobs"]
                if len(values) != len(ids) or max(values) > 0:
                    raise BenchError(f"{len(ids)} tokens came with the logprobs {values}")
            if choice["finish_reason"] is not None:
                self.reasons[index] = choice["finish_reason"]
        self.usage = event.get("usage") or self.usage

    def check(self, asked: dict[str, Any]) -> None:
        """The whole stream came. Raises BenchError where it is not what was asked for."""
        n = asked.get("n", 1)
        if self.usage is None or self.usage["completion_tokens"] != self.tokens:
            raise BenchError(f"{self.tokens} tokens streamed, and the usage says {self.usage}")
        if set(self.reasons) != set(range(n)) or not n <= self.tokens <= n * asked["max_tokens"]:
            raise BenchError(f"{self.tokens} tokens and ends {self.reasons} for {asked}")
        if "structured_outputs" in asked and self.reasons[0] == "stop":
            if not re.fullmatch(_REGEX, self.text[0]):
                raise BenchError(f"{self.text[0]!r} does not match {_REGEX}")
        elif "response_format" in asked and self.reasons[0] == "stop":
            json.loads(self.text[0])
        stops = [stop for stop in asked.get("stop", ()) if stop in self.text[0]]
        if stops:
            raise BenchError(f"the stop string {stops[0]!r} is in {self.text[0]!r}")

    def saw(self) -> Saw:
        times = [times for times in self.times_s.values() if times]
        return Saw(
            kind=self.kind,
            tokens=self.tokens,
            ttft_s=min(each[0] for each in times) - self.sent_s if times else None,
            gaps_s=tuple(b - a for each in times for a, b in itertools.pairwise(each)),
        )


def _request(kind: str, model: str, ids: Ids, rng: np.random.Generator) -> dict[str, Any]:
    """A body; a prompt is 8 to 40 tokens, after 64 that all of the kind share where it says so."""
    prompt = rng.choice(ids, rng.integers(8, 41)).tolist()
    if kind == "shared prefix":
        prompt = (ids * 3)[:64] + prompt
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": int(rng.integers(4, 21)),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **KINDS[kind](rng),
    }


async def _ask(
    client: httpx.AsyncClient, kind: str, asked: dict[str, Any], leaves_after: int, tally: Tally
) -> float | None:
    """One request; where it was refused, the seconds after which to come back.

    Raises BenchError.
    """
    sent = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=asked) as reply:
        if reply.status_code == 429:
            tally.refused_s.append(time.perf_counter() - sent)
            await reply.aread()
            return float(reply.headers["retry-after"])
        if reply.status_code != 200:
            raise BenchError(f"status {reply.status_code}: {(await reply.aread()).decode()}")
        stream = _Stream(kind, sent)
        with tally.one_open():
            async with contextlib.aclosing(events(reply.aiter_lines())) as chunks:
                leaves = False
                async for event in chunks:
                    stream.take(event)
                    leaves = kind == "leaves early" and stream.tokens >= leaves_after
                    if leaves:
                        break
    if not leaves:
        stream.check(asked)
        tally.finished.update(stream.reasons.values())
    tally.saw.append(stream.saw())
    return None


async def soak(url: str, *, clients: int, seconds: float, seed: int) -> Tally:
    """``clients`` at a time send one request after another for ``seconds``; all are answered.

    The server must have no other clients. Raises BenchError, httpx.HTTPError.
    """
    limits = httpx.Limits(max_connections=clients + 1, max_keepalive_connections=clients + 1)
    tally = Tally()
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        reply = await client.post("/tokenize", json={"model": model, "prompt": PASSAGE})
        ids = reply.raise_for_status().json()["tokens"]
        numbers = itertools.count()
        asked_of_leavers: list[int] = []
        start = time.perf_counter()

        async def one_after_another() -> None:
            while time.perf_counter() - start < seconds:
                number = next(numbers)
                rng = np.random.default_rng([seed, number])
                kind = list(KINDS)[number % len(KINDS)]
                asked = _request(kind, model, ids, rng)
                retry_s = await _ask(client, kind, asked, int(rng.integers(4)), tally)
                if retry_s is not None:
                    await asyncio.sleep(retry_s)
                elif kind == "leaves early":
                    asked_of_leavers.append(asked["max_tokens"])

        before = (await client.get("/metrics")).raise_for_status().text
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(clients):
                    tasks.create_task(one_after_another())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        tally.seconds = time.perf_counter() - start
        after = await _idle(client)
    _compare(before, after, tally, sum(asked_of_leavers))
    return tally


async def _idle(client: httpx.AsyncClient) -> str:
    """The metrics once nothing runs and every block is free. Raises BenchError: never."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.perf_counter() + _IDLE_S
    while True:
        text = (await client.get("/metrics")).raise_for_status().text
        left = {name: counter(text, name) for name in gauges}
        if not any(left.values()):
            return text
        if time.perf_counter() > deadline:
            raise BenchError(f"{_IDLE_S:g} s after the last answer: {left}")
        await asyncio.sleep(0.1)


def _compare(before: str, after: str, tally: Tally, asked_of_leavers: int) -> None:
    """The server's counts against the clients'. Raises BenchError."""

    def growth(name: str) -> int:
        return int((counter(after, name) or 0.0) - (counter(before, name) or 0.0))

    tally.preemptions = growth("num_preemptions_total")
    tally.cached_tokens = growth("prefix_cache_hits_total")
    told = growth("request_generation_tokens_sum")
    tally.dropped_tokens = growth("generation_tokens_total") - told
    leavers = [saw for saw in tally.saw if saw.kind == "leaves early"]
    certain = tally.tokens - sum(saw.tokens for saw in leavers)
    # What was sent to a client that left is known to the server only.
    if not tally.tokens <= told <= certain + asked_of_leavers:
        raise BenchError(
            f"clients got {tally.tokens} tokens, {asked_of_leavers} were asked for by those that "
            f"left, and the server counts {told}: it must have no other clients"
        )
    if tally.dropped_tokens < 0:
        raise BenchError(f"the server told of {-tally.dropped_tokens} tokens it did not generate")
    ended = growth("request_success_total")
    choices = sum(tally.finished.values())
    if not choices <= ended <= choices + len(leavers):
        raise BenchError(f"{choices} choices ended, {len(leavers)} clients left, server: {ended}")
    if compiles := growth("compiles_after_ready_total"):
        raise BenchError(f"{compiles} executables were compiled under the load")
