"""What Prometheus scrapes: vLLM's names and bucket edges under a prefix of our own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from jaxserve.sched.outputs import EngineStats, ExecutableStats, RequestUpdate
from jaxserve.serve.request_log import CallRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def _up_to(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... not above ``limit``."""
    edges = [step * 10**power for power in range(len(str(limit))) for step in (1, 2, 5)]
    return [edge for edge in edges if edge <= limit]


class _EngineCollector(Collector):
    """Turns the engine's latest totals into samples when scraped."""

    def __init__(
        self, prefix: str, model_name: str, executables: Callable[[], ExecutableStats]
    ) -> None:
        self.stats = EngineStats()
        self._executables = executables
        self._prefix = prefix
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        stats = self.stats
        compiled = self._executables()
        gauges = (
            ("num_requests_running", "Requests in decode rows or prefill.", stats.num_running),
            ("num_requests_waiting", "Requests in the queue.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", stats.kv_cache_usage),
            ("weight_version", "How often the weights were replaced.", stats.weight_version),
            ("executables_planned", "Executables the boot planned.", compiled.planned),
            ("executables_ready", "Planned executables that have run.", compiled.ready),
        )
        counters = (
            ("num_preemptions", "Requests sent back to the queue.", stats.num_preemptions),
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_cache_queries,
            ),
            (
                "prefix_cache_hits",
                "Prompt tokens found in the prefix cache.",
                stats.prefix_cache_hits,
            ),
            ("prompt_tokens", "Prompt tokens of requests prefilled.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("padded_rows", "Decode rows computed for no request.", stats.padded_rows),
            (
                "compile_seconds",
                "Seconds traced, lowered and compiled, all threads together.",
                compiled.compile_seconds,
            ),
            (
                "compiles_after_ready",
                "Shapes compiled in front of a request.",
                compiled.compiles_after_ready,
            ),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(self._prefix + name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(self._prefix + name, text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        replays = CounterMetricFamily(
            f"{self._prefix}executable_replays",
            "Decode steps run, by row bucket.",
            labels=["model_name", "rows"],
        )
        for rows, count in sorted(stats.decode_replays.items()):
            replays.add_metric([self._model_name, str(rows)], count)
        yield replays
        steps = SummaryMetricFamily(
            f"{self._prefix}decode_step_seconds",
            "Between two steps' tokens, where the second only decoded, by row bucket.",
            labels=["model_name", "rows"],
        )
        for rows, (count, seconds) in sorted(stats.decode_step_seconds.items()):
            steps.add_metric([self._model_name, str(rows)], count, seconds)
        yield steps


class Metrics:
    """The process's metrics in a registry of their own. ``clock`` is in seconds."""

    def __init__(
        self,
        model_name: str,
        *,
        max_model_len: int,
        prefix: str = "jaxserve",
        executables: Callable[[], ExecutableStats] = ExecutableStats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(f"{prefix}:", model_name, executables)
        self._registry.register(self._engine)
        self._scheduled_tokens = 0

        def histogram(name: str, text: str, edges: Sequence[float]) -> Histogram:
            return Histogram(
                f"{prefix}:{name}", text, ["model_name"], registry=self._registry, buckets=edges
            ).labels(model_name)

        lengths = _up_to(max_model_len)
        self.first_token_s = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S
        )
        self.inter_token_s = histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", _TOKEN_S
        )
        self.e2e_s = histogram("e2e_request_latency_seconds", "Arrival to end.", _REQUEST_S)
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens.", lengths)
        self.generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated.", lengths
        )
        self._queue_s = histogram(
            "request_queue_time_seconds", "Arrival to first scheduled.", _REQUEST_S
        )
        self._prefill_s = histogram(
            "request_prefill_time_seconds", "First scheduled to first token.", _REQUEST_S
        )
        self._decode_s = histogram(
            "request_decode_time_seconds", "First token to last.", _REQUEST_S
        )
        self._iteration_tokens = histogram(
            "iteration_tokens_total", "Tokens computed by an engine step.", _ITERATION_TOKENS
        )
        success = Counter(
            f"{prefix}:request_success",
            "Requests ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        reasons = ("stop", "length", "abort", "error")
        self.ended = {reason: success.labels(model_name, reason) for reason in reasons}

    def observe_step(self, stats: EngineStats, ended: Sequence[RequestUpdate]) -> None:
        """Takes the engine's totals and what ended with one step. Called on the engine thread."""
        self._engine.stats = stats
        tokens = stats.scheduled_tokens - self._scheduled_tokens
        self._scheduled_tokens = stats.scheduled_tokens
        if tokens:
            self._iteration_tokens.observe(tokens)
        for update in ended:
            if update.timings is not None:
                self._queue_s.observe(update.timings.queue_s)
                self._prefill_s.observe(update.timings.prefill_s)
                self._decode_s.observe(update.timings.decode_s)

    def call(self, record: CallRecord) -> CallMetrics:
        """A recorder for the requests of one HTTP call, which also fills in ``record``."""
        return CallMetrics(self, record)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)


class CallMetrics:
    """One HTTP call: its requests count in the metrics and in the call's log line."""

    def __init__(self, metrics: Metrics, record: CallRecord) -> None:
        self._metrics = metrics
        self._record = record

    def request(self, arrived: float, *, shares_prompt: bool = False) -> RequestMetrics:
        """A recorder for a request that arrived at ``arrived`` of the metrics' clock.

        ``shares_prompt``: its prompt is counted by another choice of the call.
        """
        return RequestMetrics(self._metrics, self._record, arrived, shares_prompt)


class RequestMetrics:
    """One request, as its client sees it."""

    def __init__(
        self, metrics: Metrics, record: CallRecord, arrived: float, shares_prompt: bool
    ) -> None:
        self._metrics = metrics
        self._record = record
        self._arrived = arrived
        self._shares_prompt = shares_prompt
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._num_cached_tokens = 0

    def update(self, update: RequestUpdate) -> None:
        """The engine reported on the request; call it before ``token`` and ``end``."""
        self._num_cached_tokens = max(self._num_cached_tokens, update.num_cached_tokens)
        if update.timings is not None:
            self._record.time(update.timings)

    def token(self) -> None:
        """A token reached the server."""
        now = self._metrics.clock()
        if self._last_token is None:
            self._first_token = now
            self._metrics.first_token_s.observe(now - self._arrived)
        else:
            self._metrics.inter_token_s.observe(now - self._last_token)
        self._last_token = now

    def end(self, reason: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """The request is over: ``reason`` is stop, length, abort or error."""
        self._metrics.ended[reason].inc()
        self._metrics.e2e_s.observe(self._metrics.clock() - self._arrived)
        self._metrics.generation_tokens.observe(num_output_tokens)
        record = self._record
        record.count(output=num_output_tokens)
        if not self._shares_prompt:
            self._metrics.prompt_tokens.observe(num_prompt_tokens)
            record.count(prompt=num_prompt_tokens, cached=self._num_cached_tokens)
        record.finish_reasons.append(reason)
        if self._first_token is not None and self._last_token is not None:
            record.ttft_s = max(record.ttft_s or 0.0, self._first_token - self._arrived)
            record.decode_s = max(record.decode_s or 0.0, self._last_token - self._first_token)
