"""The engine over the real steps: what a request gets depends on nobody else, cached or not."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.boot import build_engine
from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig, SamplingParams
from jaxserve.plan.buckets import PrefillBuckets
from jaxserve.runtime.engine import Engine
from jaxserve.runtime.sizing import decode_buckets
from tests.models import TINY

CONFIG = EngineConfig(
    max_model_len=96, max_num_seqs=3, max_num_batched_tokens=32, block_size=8, num_blocks=40
)


@pytest.fixture(scope="module")
def booted():
    checkpoint = Checkpoint(name="tiny", config=TINY, tokenizer=None, tensors=None)
    return build_engine(checkpoint, CONFIG)


def engine_with(booted, usable_blocks, caching=True):
    """A new engine over the booted runner that hands out only some of its blocks."""
    config = replace(booted.config, num_blocks=usable_blocks, enable_prefix_caching=caching)
    booted.runner.permute_rows(np.full(config.max_num_seqs, -1, np.int32))
    return Engine(
        TINY,
        config,
        booted.runner,
        num_blocks=usable_blocks,
        decode_buckets=decode_buckets(config),
        prefill_buckets=PrefillBuckets(config.max_num_batched_tokens),
    )


def requests():
    rng = np.random.default_rng(11)
    settings = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "top_k": 20, "seed": 6},
        {"temperature": 1.2, "top_p": 0.9, "seed": 5},
        {"temperature": 1.0, "min_p": 0.05, "seed": -1},
        {"temperature": 0.0},
    ]
    lengths = [1, 8, 33, 50, 17, 5]
    return {
        f"r{i}": (
            rng.integers(0, TINY.vocab_size, length).tolist(),
            SamplingParams(max_tokens=30, ignore_eos=True, **setting),
        )
        for i, (length, setting) in enumerate(zip(lengths, settings, strict=True))
    }


def run(engine, wanted):
    """All requests at once; the tokens of each."""
    tokens = defaultdict(list)
    for name, (prompt, params) in wanted.items():
        engine.add_request(name, prompt, params)
    while engine.has_unfinished_requests():
        for update in engine.step():
            tokens[update.request_id] += update.new_token_ids
        engine.audit()
    return tokens


def test_tokens_are_the_same_alone_in_a_crowd_and_under_memory_pressure(booted):
    wanted = requests()
    engine = engine_with(booted, 40)
    alone = {name: run(engine, {name: request})[name] for name, request in wanted.items()}
    assert all(len(tokens) == 30 for tokens in alone.values())
    assert run(engine, wanted) == alone
    pressed = engine_with(booted, 14)
    assert run(pressed, wanted) == alone
    assert pressed.stats().num_preemptions > 0
    assert pressed.stats().num_free_blocks == pressed.stats().num_blocks


def test_a_boot_compiles_its_list_and_runs_nothing_else(booted):
    run(booted.engine, requests())
    assert booted.executable_stats().compiles_after_ready == 0
    assert {shape.rows for shape in booted.executables.decode} == {1, 2, 3}


@st.composite
def shared_starts(draw_from):
    """Rounds of requests that come together; most begin as an earlier one did."""
    rng = np.random.default_rng(draw_from(st.integers(0, 10**6)))
    stems = [rng.integers(0, TINY.vocab_size, n).tolist() for n in (8, 24, 45)]
    rounds = []
    for i in range(3):
        wanted = {}
        for j in range(draw_from(st.integers(1, 4))):
            stem = draw_from(st.sampled_from(stems))
            tail = rng.integers(0, TINY.vocab_size, draw_from(st.integers(0, 12))).tolist()
            params = SamplingParams(
                max_tokens=draw_from(st.sampled_from([1, 9, 24])),
                temperature=draw_from(st.sampled_from([0.0, 1.0])),
                seed=draw_from(st.integers(0, 3)),
                ignore_eos=True,
            )
            wanted[f"r{i}.{j}"] = ((stem + tail)[draw_from(st.sampled_from([0, 1])) :], params)
        rounds.append(wanted)
    return rounds


@settings(max_examples=8, derandomize=True)
@given(shared_starts())
def test_tokens_are_the_same_with_the_cache_and_without_it(booted, rounds):
    # One after the other: they write to the same pool.
    plain = engine_with(booted, 40, caching=False)
    uncached = [run(plain, wanted) for wanted in rounds]
    for usable_blocks in (40, 14):
        engine = engine_with(booted, usable_blocks)
        assert [run(engine, wanted) for wanted in rounds] == uncached


def test_a_prompt_shares_blocks_with_one_that_the_same_step_computes(booted):
    prompt = np.random.default_rng(3).integers(0, TINY.vocab_size, 20).tolist()
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    wanted = {
        "first": (prompt, params),
        "second": (prompt, params),
        "longer": ([*prompt, 5], params),
    }
    plain = engine_with(booted, 40, caching=False)
    alone = {name: run(plain, {name: request})[name] for name, request in wanted.items()}
    engine = engine_with(booted, 40)
    assert run(engine, wanted) == alone
    stats = engine.stats()
    assert stats.prefix_cache_hits == 2 * 16
    assert stats.num_steps == 12  # all three prompts in the first: 20 + 4 + 5 of 32 tokens


def test_choices_of_one_answer_share_their_prompt_without_the_cache(booted):
    prompt = np.random.default_rng(4).integers(0, TINY.vocab_size, 19).tolist()
    choices = {
        str(seed): SamplingParams(max_tokens=12, seed=seed, ignore_eos=True) for seed in range(3)
    }
    plain = engine_with(booted, 40, caching=False)
    alone = {name: run(plain, {name: (prompt, params)})[name] for name, params in choices.items()}
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    engine = engine_with(booted, 40, caching=False)
    for name, params in choices.items():
        engine.add_request(name, prompt, params, group="g")
    got = run(engine, {})
    assert got == alone
    assert engine.stats().prefix_cache_hits == 2 * 16
