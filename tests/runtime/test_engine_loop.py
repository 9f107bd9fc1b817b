"""The engine over a fake device: tokens, ends, overlap, audits and refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import EngineConfig, ModelConfig, SamplingParams
from jaxserve.plan.buckets import DecodeBuckets, PrefillBuckets
from jaxserve.runtime.engine import Engine
from jaxserve.sched.outputs import RequestUpdate
from tests.fakes import FakeRunner, draw

VOCAB = 17
EOS = 5


def model_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = dict(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position_embeddings=4096,
        eos_token_ids=(EOS,),
    )
    return ModelConfig(**values | changes)


def build(runner_class: type[FakeRunner] = FakeRunner, num_blocks: int = 100, **changes: Any):
    """An engine over a fake device; returns both."""
    values: dict[str, Any] = dict(
        max_model_len=64, max_num_seqs=4, max_num_batched_tokens=40, block_size=8
    )
    config = EngineConfig(**values | changes)
    runner = runner_class(
        max_num_seqs=config.max_num_seqs,
        blocks_per_row=config.blocks_per_row,
        num_blocks=num_blocks,
        block_size=config.block_size,
        vocab_size=VOCAB,
    )
    engine = Engine(
        model_config(),
        config,
        runner,
        num_blocks=num_blocks,
        decode_buckets=DecodeBuckets(config.max_num_seqs, config.max_model_len, 16),
        prefill_buckets=PrefillBuckets(config.max_num_batched_tokens),
    )
    return engine, runner


def expected(prompt: list[int], params: SamplingParams, max_model_len: int = 64):
    """What a request alone must give: (tokens, finish reason), straight from its own tokens."""
    high, low = divmod((params.seed or 0) % 2**64, 2**32)
    top_k = params.top_k if params.top_k > 0 else 0
    sampling = (params.temperature, top_k, params.top_p, params.min_p, (high, low))
    history = list(prompt)
    while True:
        history.append(draw(history, range(len(history)), sampling, VOCAB))
        output = history[len(prompt) :]
        if (output[-1] == EOS and not params.ignore_eos) or output[-1] in params.stop_token_ids:
            return output, "stop"
        if len(output) == params.max_tokens or len(history) == max_model_len:
            return output, "length"


@dataclass
class Outcome:
    tokens: list[int]
    last: RequestUpdate | None = None


def collect(outcomes: dict[str, Outcome], updates: list[RequestUpdate]) -> None:
    for update in updates:
        outcome = outcomes.setdefault(update.request_id, Outcome([]))
        assert outcome.last is None, "an update after the end"
        outcome.tokens += update.new_token_ids
        assert update.num_output_tokens == len(outcome.tokens)
        assert (update.timings is None) == (update.finish_reason is None)
        if update.finish_reason is not None:
            outcome.last = update


@st.composite
def traffic(draw_from: Any):
    requests = []
    for _ in range(draw_from(st.integers(1, 10))):
        temperature = draw_from(st.sampled_from([0.0, 0.7]))
        params = SamplingParams(
            max_tokens=draw_from(st.sampled_from([1, 2, 8, 9, 30, None])),
            temperature=temperature,
            top_k=draw_from(st.sampled_from([-1, 0, 5])),
            top_p=draw_from(st.sampled_from([0.5, 1.0])),
            seed=draw_from(st.integers(-(2**63), 2**63 - 1)),
            ignore_eos=draw_from(st.booleans()),
            stop_token_ids=draw_from(st.sampled_from([(), (3,)])),
        )
        prompt = draw_from(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=45))
        arrival = draw_from(st.integers(0, 30))
        abort = draw_from(st.one_of(st.none(), st.integers(0, 40)))
        requests.append((prompt, params, arrival, abort))
    return requests


@given(
    traffic(),
    st.integers(9, 30),
    st.integers(1, 5),
    st.sampled_from([5, 8, 17, 64]),
    st.sampled_from([0.0, 0.1, 0.9]),
)
def test_a_soak_gives_each_request_its_own_tokens_and_leaks_nothing(
    requests, num_blocks, max_num_seqs, budget, watermark
):
    engine, _ = build(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        watermark=watermark,
    )
    outcomes: dict[str, Outcome] = {}
    step = 0
    while engine.has_unfinished_requests() or step <= 40:
        for i, (prompt, params, arrival, _) in enumerate(requests):
            if arrival == step:
                engine.add_request(str(i), prompt, params)
        for i, (*_, abort) in enumerate(requests):
            if abort == step:
                engine.abort_request(str(i))
                engine.audit()
        collect(outcomes, engine.step())
        engine.audit()
        step += 1
        assert step < 10_000
    for i, (prompt, params, *_, abort) in enumerate(requests):
        tokens, reason = expected(prompt, params)
        outcome = outcomes[str(i)]
        assert outcome.last is not None
        if outcome.last.finish_reason == "abort":
            assert abort is not None
            assert outcome.tokens == tokens[: len(outcome.tokens)]
        else:
            assert (outcome.tokens, outcome.last.finish_reason) == (tokens, reason)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
