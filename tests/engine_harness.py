"""An engine over the fake device, what its requests must give, and a loop that audits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from jaxserve.config import EngineConfig, ModelConfig, SamplingParams
from jaxserve.plan.buckets import DecodeBuckets, PrefillBuckets
from jaxserve.runtime.engine import Engine
from jaxserve.sched.outputs import RequestUpdate, TokenLogprobs
from tests.fakes import FakeRunner, draw

VOCAB = 17
EOS = 5


MODEL = ModelConfig(
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


def build(runner_class: type[Any] = FakeRunner, num_blocks: int = 100, **changes: Any):
    """An engine over a fake device; returns both."""
    clock = changes.pop("clock", time.monotonic)
    values: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 40,
        "block_size": 8,
    }
    config = EngineConfig(**values | changes)
    runner = runner_class(
        max_num_seqs=config.max_num_seqs,
        blocks_per_row=config.blocks_per_row,
        num_blocks=num_blocks,
        block_size=config.block_size,
        vocab_size=VOCAB,
    )
    engine = Engine(
        MODEL,
        config,
        runner,
        num_blocks=num_blocks,
        decode_buckets=DecodeBuckets(config.max_num_seqs, config.max_model_len, 16),
        prefill_buckets=PrefillBuckets(config.max_num_batched_tokens),
        clock=clock,
    )
    return engine, runner


def expected(prompt: list[int], params: SamplingParams, max_model_len: int = 64, weights: int = 0):
    """What a request alone must give: (tokens, finish reason), straight from its own tokens."""
    high, low = divmod((params.seed or 0) % 2**64, 2**32)
    top_k = params.top_k if params.top_k > 0 else 0
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    sampling = (params.temperature, top_k, params.top_p, params.min_p, (high, low), *penalties, 0)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    history, output = list(prompt), []
    if params.max_tokens == 0:
        return [], "length"
    while True:
        banned = {
            word[-1]
            for word in params.bad_words_token_ids
            if word[:-1] == tuple(output[len(output) - len(word) + 1 :])
        }
        if len(output) < params.min_tokens:
            banned |= ends
        if params.allowed_token_ids is not None:
            banned |= set(range(VOCAB)) - set(params.allowed_token_ids)
        token = draw(
            [token + weights * VOCAB for token in history],
            range(len(history)),
            sampling,
            VOCAB,
            counts=[(int(t in prompt), output.count(t)) for t in range(VOCAB)],
            bias=params.logit_bias,
            allowed=lambda t, banned=banned: t not in banned,
        )
        history.append(token)
        output.append(token)
        if token in ends:
            return output, "stop"
        if len(output) == params.max_tokens or len(history) == max_model_len:
            return output, "length"


@dataclass
class Outcome:
    """What a request has been given so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    last: RequestUpdate | None = None

    @property
    def result(self) -> tuple[list[int], str | None]:
        return self.tokens, self.last.finish_reason if self.last else None


def collect(outcomes: dict[str, Outcome], updates: list[RequestUpdate]) -> None:
    for update in updates:
        outcome = outcomes.setdefault(update.request_id, Outcome())
        assert outcome.last is None, "an update after the end"
        outcome.tokens += update.new_token_ids
        assert update.num_output_tokens == len(outcome.tokens)
        outcome.logprobs += update.logprobs or ()
        if update.prompt_logprobs is not None:
            assert outcome.prompt_logprobs is None, "the prompt's log probabilities came twice"
            assert len(outcome.tokens) <= 1, "they came late"
            outcome.prompt_logprobs = update.prompt_logprobs
        assert (update.error is None) == (update.finish_reason != "error")
        assert (update.timings is None) == (update.finish_reason is None)
        if update.finish_reason is not None:
            outcome.last = update


def drain(engine: Engine, outcomes: dict[str, Outcome] | None = None) -> dict[str, Outcome]:
    """Step until nothing is left, auditing between all steps."""
    outcomes = {} if outcomes is None else outcomes
    for _ in range(5000):
        if not engine.has_unfinished_requests():
            break
        collect(outcomes, engine.step())
        engine.audit()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    return outcomes


def greedy(max_tokens: int | None = 8, **changes: Any) -> SamplingParams:
    """Greedy, and past the eos token unless asked."""
    values: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    return SamplingParams(**values | changes)
