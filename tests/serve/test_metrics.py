"""Metrics carry vLLM's names and count what happened."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.sched.outputs import EngineStats, ExecutableStats, RequestTimings, RequestUpdate
from jaxserve.serve.metrics import Metrics
from jaxserve.serve.request_log import CallRecord


def samples(metrics: Metrics) -> dict[tuple, float]:
    return {
        (sample.name, *sorted(v for k, v in sample.labels.items() if k != "model_name")): (
            sample.value
        )
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_the_names_are_those_boards_look_for_under_any_prefix():
    metrics = Metrics("tiny", max_model_len=100, prefix="vllm")
    names = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    assert names >= {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens",
        "vllm:generation_tokens",
        "vllm:num_preemptions",
        "vllm:request_success",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:iteration_tokens_total",
    }
    for family in text_string_to_metric_families(metrics.render().decode()):
        assert family.name.startswith("vllm:")
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"


def test_every_metric_says_what_it_is_and_keeps_its_labels_few():
    """What `promtool check metrics` asks for; the names outside its rules are vLLM's."""
    metrics = Metrics("tiny", max_model_len=2048)
    metrics.observe_step(
        EngineStats(decode_replays={2**i: 1 for i in range(9)}, decode_step_seconds={8: (1, 0.1)}),
        [],
    )
    text = metrics.render().decode()
    families = list(text_string_to_metric_families(text))
    lines = text.splitlines()
    assert len({family.name for family in families}) == len(families) > 25
    for family in families:
        assert family.documentation.endswith(".")
        assert family.type in {"counter", "gauge", "histogram", "summary"}
        help_at = next(
            i for i, line in enumerate(lines) if line.startswith(f"# HELP {family.name}")
        )
        assert lines[help_at + 1].startswith(f"# TYPE {family.name}")
        name = family.name.removeprefix("jaxserve:").removesuffix("_created")
        assert re.fullmatch("[a-z][a-z0-9_]*[a-z0-9]", name)
        assert not re.search("milli|micro|minutes|_ms$|_(counter|gauge|histogram)$", name)
        if family.type != "counter" and name != "iteration_tokens_total":
            assert not name.endswith("_total")
        if re.search("time|latency", name):
            assert name.endswith("_seconds")
        allowed = {"model_name", "le", "finished_reason", "rows"}
        assert {label for sample in family.samples for label in sample.labels} <= allowed
        rows = {sample.labels.get("rows") for sample in family.samples}
        assert len(rows) <= 9  # one a row bucket


def test_two_servers_in_a_process_do_not_share_counts():
    one, other = (Metrics("tiny", max_model_len=100) for _ in range(2))
    one.call(CallRecord("a")).request(0.0).end("stop", 1, 1)
    name = ("jaxserve:request_success_total", "stop")
    assert (samples(one)[name], samples(other)[name]) == (1.0, 0.0)


def test_a_requests_latencies_are_those_of_the_clock():
    now = [10.0]
    metrics = Metrics("tiny", max_model_len=100, clock=lambda: now[0])
    record = CallRecord("a")
    request = metrics.call(record).request(10.0)
    for at in (10.5, 10.6, 10.8):
        now[0] = at
        request.token()
    now[0] = 11.0
    request.end("length", 7, 3)
    assert (record.prompt_tokens, record.output_tokens, record.finish_reasons) == (7, 3, ["length"])
    assert (record.ttft_s, round(record.decode_s or 0, 9)) == (0.5, 0.3)
    seen = samples(metrics)
    assert seen["jaxserve:time_to_first_token_seconds_sum",] == 0.5
    assert seen["jaxserve:inter_token_latency_seconds_count",] == 2
    assert abs(seen["jaxserve:inter_token_latency_seconds_sum",] - 0.3) < 1e-9
    assert seen["jaxserve:e2e_request_latency_seconds_sum",] == 1.0
    assert seen["jaxserve:request_prompt_tokens_sum",] == 7
    assert seen["jaxserve:request_generation_tokens_sum",] == 3
    assert seen["jaxserve:request_prompt_tokens_bucket", "5.0"] == 0
    assert seen["jaxserve:request_prompt_tokens_bucket", "10.0"] == 1
    assert ("jaxserve:request_prompt_tokens_bucket", "200.0") not in seen


def test_the_engines_totals_are_what_is_scraped():
    metrics = Metrics("tiny", max_model_len=100)
    ended = RequestUpdate("a", (), "stop", None, 4, 2, RequestTimings(0.5, 0.25, 2.0))
    for scheduled in (40, 100, 100):
        stats = EngineStats(
            num_running=2,
            num_waiting=3,
            num_blocks=10,
            num_free_blocks=4,
            num_preemptions=1,
            prompt_tokens=90,
            generation_tokens=10,
            scheduled_tokens=scheduled,
            padded_rows=6,
            prefix_cache_queries=90,
            prefix_cache_hits=48,
            weight_version=3,
            decode_replays={2: 5, 8: 1},
            decode_step_seconds={2: (4, 0.5)},
        )
        metrics.observe_step(stats, [ended] if scheduled == 40 else [])
    seen = samples(metrics)
    assert seen["jaxserve:num_requests_running",] == 2
    assert seen["jaxserve:num_requests_waiting",] == 3
    assert abs(seen["jaxserve:kv_cache_usage_perc",] - 0.6) < 1e-9
    assert seen["jaxserve:num_preemptions_total",] == 1
    assert seen["jaxserve:prompt_tokens_total",] == 90
    assert seen["jaxserve:generation_tokens_total",] == 10
    assert seen["jaxserve:padded_rows_total",] == 6
    assert seen["jaxserve:prefix_cache_queries_total",] == 90
    assert seen["jaxserve:prefix_cache_hits_total",] == 48
    assert seen["jaxserve:weight_version",] == 3
    assert seen["jaxserve:executable_replays_total", "2"] == 5
    assert seen["jaxserve:decode_step_seconds_count", "2"] == 4
    assert seen["jaxserve:decode_step_seconds_sum", "2"] == 0.5
    assert seen["jaxserve:iteration_tokens_total_count",] == 2
    assert seen["jaxserve:iteration_tokens_total_sum",] == 100
    assert seen["jaxserve:request_queue_time_seconds_sum",] == 0.5
    assert seen["jaxserve:request_prefill_time_seconds_sum",] == 0.25
    assert seen["jaxserve:request_decode_time_seconds_sum",] == 2.0


def test_the_list_of_executables_is_asked_for_when_it_is_scraped():
    now = [ExecutableStats(planned=10, ready=4, compile_seconds=2.5)]
    metrics = Metrics("tiny", max_model_len=100, executables=lambda: now[0])
    seen = samples(metrics)
    assert seen["jaxserve:executables_planned",] == 10
    assert seen["jaxserve:executables_ready",] == 4
    assert seen["jaxserve:compile_seconds_total",] == 2.5
    assert seen["jaxserve:compiles_after_ready_total",] == 0
    now[0] = ExecutableStats(planned=10, ready=10, compile_seconds=3.5, compiles_after_ready=1)
    seen = samples(metrics)
    assert seen["jaxserve:executables_ready",] == 10
    assert seen["jaxserve:compiles_after_ready_total",] == 1
