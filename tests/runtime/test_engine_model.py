"""The engine over the real steps: what a request gets depends on nobody else."""

from dataclasses import replace

import numpy as np
import pytest

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


def engine_with(booted, usable_blocks):
    """A new engine over the booted runner that hands out only some of its blocks."""
    config = replace(booted.config, num_blocks=usable_blocks)
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
    tokens = {name: [] for name in wanted}
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
