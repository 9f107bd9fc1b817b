"""Deterministic mode: what a request gets is bit for bit what it gets alone."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.boot import build_engine
from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig, SamplingParams
from jaxserve.errors import ConfigError
from jaxserve.plan.buckets import DecodeShape
from jaxserve.runtime.engine import Engine
from jaxserve.runtime.sizing import decode_buckets, prefill_buckets
from tests.models import TINY, module_of

MODEL = replace(TINY, vocab_size=324, eos_token_ids=(7,))  # no whole number of vector lanes
CONFIG = EngineConfig(
    max_model_len=96,
    max_num_seqs=5,
    max_num_batched_tokens=32,
    block_size=8,
    num_blocks=60,
    deterministic=True,
)
SYSTEM = list(range(20, 47))  # three full blocks that prompts may begin with

Told = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]


@pytest.fixture(scope="module")
def booted():
    checkpoint = Checkpoint(name="tiny", config=MODEL, tokenizer=None, tensors=None)
    booted = build_engine(checkpoint, CONFIG, params=module_of(MODEL, seed=1))
    assert [b.name for b in booted.executables.all if "w" not in b.name] == [
        "permute",
        "decode 5x96",
        "prefill 32",
    ]
    return booted


def engine_with(booted, usable_blocks=60, caching=True, runner=None):
    config = replace(booted.config, enable_prefix_caching=caching)
    booted.runner.permute_rows(np.full(config.max_num_seqs, -1, np.int32))
    return Engine(
        MODEL,
        config,
        runner or booted.runner,
        num_blocks=usable_blocks,
        decode_buckets=decode_buckets(config),
        prefill_buckets=prefill_buckets(config),
    )


class Run:
    """Requests that join an engine one by one, and all that they are told."""

    def __init__(self, engine):
        self.engine = engine
        self.told = {}

    def add(self, name, prompt, params, **options):
        self.told[name] = ([], [], [])
        self.engine.add_request(name, prompt, params, **options)

    def step(self):
        for update in self.engine.step():
            tokens, logprobs, prompt = self.told[update.request_id]
            tokens += update.new_token_ids
            logprobs += [
                x for t in update.logprobs or () for x in (t.logprob, *dict(t.top).values())
            ]
            if update.prompt_logprobs:
                prompt += [t.logprob for t in update.prompt_logprobs if t is not None]
        self.engine.audit()

    def finish(self) -> dict[str, Told]:
        while self.engine.has_unfinished_requests():
            self.step()
        return {name: tuple(map(tuple, told)) for name, told in self.told.items()}


def alone(booted, prompt, params) -> Told:
    run = Run(engine_with(booted, caching=False))
    run.add("r", prompt, params)
    return run.finish()["r"]


class WatchedRunner:
    """The runner, noting the rows requests were seated in and whether a prompt came in parts."""

    def __init__(self, runner):
        self._runner = runner
        self.rows = set()
        self.chunked = False

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def prefill(self, batch):
        segments = np.count_nonzero(np.diff(batch.cu_query_lens_S1))
        seated = batch.rows_S[:segments] < len(batch.rows_S)
        self.rows |= set(batch.rows_S[:segments][seated].tolist())
        self.chunked |= not seated.all()
        return self._runner.prefill(batch)


PROMPTS = st.lists(st.integers(8, 130), min_size=1, max_size=40).flatmap(
    lambda tail: st.sampled_from([tail, SYSTEM + tail[:10], SYSTEM[:16] + tail[:20]])
)
PARAMS = st.builds(
    lambda temperature, seed, length, penalty, prompt: SamplingParams(
        temperature=temperature,
        top_p=0.9 if seed % 2 else 1.0,
        seed=seed,
        max_tokens=length,
        frequency_penalty=penalty,
        logprobs=2,
        prompt_logprobs=0 if prompt else None,
    ),
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 2**32),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([0.0, 0.7]),
    st.booleans(),
)
BATCH = st.lists(
    st.tuples(PROMPTS, PARAMS, st.integers(0, 3)), min_size=1, max_size=8
)  # and the steps before the next one joins
# Of 8 usable blocks: three such requests never fit together to their end.
CROWD = st.lists(
    st.tuples(
        st.lists(st.integers(8, 130), min_size=9, max_size=40).flatmap(
            lambda tail: st.sampled_from([tail, SYSTEM + tail[:10]])
        ),
        PARAMS.map(lambda params: replace(params, max_tokens=16, ignore_eos=True)),
        st.just(0),
    ),
    min_size=3,
    max_size=5,
)
BATCHES = 220


def test_tokens_and_log_probabilities_are_bit_for_bit_those_alone(booted):
    """In any row, with any neighbours, chunked, cached, or preempted (9 blocks are few)."""
    batches = Counter()  # of each kind

    @settings(max_examples=BATCHES, deadline=None, derandomize=True)  # so each kind occurs
    @given(st.tuples(BATCH, st.just(60)) | st.tuples(CROWD, st.just(9)), st.booleans())
    def check(pressed, caching):
        batch, blocks = pressed
        runner = WatchedRunner(booted.runner)
        run = Run(engine_with(booted, blocks, caching, runner))
        for i, (prompt, params, steps) in enumerate(batch):
            run.add(str(i), prompt, params)
            for _ in range(steps):
                run.step()
        told = run.finish()
        for i, (prompt, params, _) in enumerate(batch):
            assert told[str(i)] == alone(booted, prompt, params)
        batches["drawn"] += 1
        batches["cached"] += run.engine.stats().prefix_cache_hits > 0
        batches["chunked"] += runner.chunked
        batches["preempted"] += run.engine.stats().num_preemptions > 0
        batches.update(f"row {row}" for row in runner.rows)

    check()
    assert batches["drawn"] >= BATCHES
    assert min(batches["cached"], batches["chunked"], batches["preempted"]) >= 10, batches
    assert all(batches[f"row {row}"] for row in range(CONFIG.max_num_seqs)), batches


def test_preemptions_replay_what_was_told_and_tell_it_once(booted):
    rng = np.random.default_rng(4)
    batch = [
        (
            rng.integers(8, 130, 20).tolist(),
            SamplingParams(
                temperature=1.0, seed=i, max_tokens=40, logprobs=1, ignore_eos=True, min_tokens=3
            ),
        )
        for i in range(4)
    ]
    run = Run(engine_with(booted, 20))
    for i, (prompt, params) in enumerate(batch):
        run.add(str(i), prompt, params)
    told = run.finish()
    assert run.engine.stats().num_preemptions > 0
    assert run.engine.stats().generation_tokens == 4 * 40
    for i, (prompt, params) in enumerate(batch):
        assert told[str(i)] == alone(booted, prompt, params)


def test_a_forced_continuation_scores_what_was_generated_bit_for_bit(booted):
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=0, ignore_eos=True)
    tokens, logprobs, _ = alone(booted, SYSTEM, params)
    run = Run(engine_with(booted))
    run.add("r", SYSTEM, replace(params, temperature=1.0, seed=3), continuation=tokens)
    run.add("other", SYSTEM[:9], replace(params, temperature=1.0, seed=5))
    again = run.finish()["r"]
    assert again[0] == tokens
    assert again[1] == logprobs


def test_without_the_mode_some_request_is_told_otherwise():
    """The test above can fail: buckets of other sizes sum in another order."""
    checkpoint = Checkpoint(name="tiny", config=MODEL, tokenizer=None, tensors=None)
    config = replace(
        CONFIG, deterministic=False, persist_inputs=False, capture_decode=False
    )  # steps are compiled when they are met
    free = build_engine(checkpoint, config, params=module_of(MODEL, seed=1))
    params = SamplingParams(temperature=0.0, max_tokens=14, logprobs=2, ignore_eos=True)
    prompts = [SYSTEM[i:] + SYSTEM[:i] for i in range(2)]
    run = Run(engine_with(free))
    for i, prompt in enumerate(prompts):
        run.add(str(i), prompt, params)
    together = run.finish()
    assert any(together[str(i)] != alone(free, prompt, params) for i, prompt in enumerate(prompts))


def test_the_rectangle_is_refused():
    with pytest.raises(ConfigError, match="--attention-backend streamed"):
        EngineConfig(deterministic=True, attention_backend="rectangle")


def test_the_list_has_one_size_of_everything():
    assert decode_buckets(replace(CONFIG, attention_backend="streamed")).shapes == (
        DecodeShape(5, 96),
    )
    assert prefill_buckets(CONFIG).tokens == (32,)
