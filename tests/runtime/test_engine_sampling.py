"""Every option over the real steps: tokens and scores against whole forward passes and numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.config import EngineConfig, SamplingParams
from jaxserve.model.definition import params_of
from jaxserve.plan.batch import bias_specs, decode_state_specs
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape, PrefillBuckets
from jaxserve.runtime.compiler import compile_executables
from jaxserve.runtime.engine import Engine
from jaxserve.runtime.executables import StepShapes
from jaxserve.runtime.runner import ModelRunner
from tests.engine_harness import Outcome, drain
from tests.models import TINY, module_of

VOCAB = TINY.vocab_size
CONFIG = EngineConfig(max_model_len=64, max_num_seqs=3, max_num_batched_tokens=32, block_size=8)
DECODE = DecodeShape(CONFIG.max_num_seqs, CONFIG.max_model_len)


@pytest.fixture(scope="module")
def runner():
    """A runner with one decode shape and one prefill bucket that can compile no other."""
    shapes = StepShapes(
        model=TINY,
        dtype="float32",
        backend="streamed",
        num_blocks=40,
        block_size=CONFIG.block_size,
        blocks_per_row=CONFIG.blocks_per_row,
        max_num_seqs=CONFIG.max_num_seqs,
        decode=(DECODE,),
        prefill_tokens=(32,),
    )
    return ModelRunner(params_of(module_of(TINY)), compile_executables(shapes, workers=2), shapes)


@pytest.fixture(scope="module")
def logits_after():
    """``logits_after(tokens)``: float64 [T, V] of a whole forward pass, position by position."""
    module = module_of(TINY)
    forward = nnx.jit(lambda m, tokens: m(tokens))

    def run(tokens: list[int]) -> np.ndarray:
        padded = tokens + [0] * (CONFIG.max_model_len - len(tokens))
        logits = forward(module, jnp.asarray([padded], jnp.int32))
        return np.asarray(logits[0, : len(tokens)], np.float64)

    return run


def engine_over(runner: ModelRunner, num_blocks: int = 40) -> Engine:
    runner.permute_rows(np.full(CONFIG.max_num_seqs, -1, np.int32))
    return Engine(
        TINY,
        CONFIG,
        runner,
        num_blocks=num_blocks,
        decode_buckets=DecodeBuckets(CONFIG.max_num_seqs, CONFIG.max_model_len),
        prefill_buckets=PrefillBuckets(CONFIG.max_num_batched_tokens),
        decode_shape=lambda rows, width: DECODE,
    )


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def greedy(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.logaddexp.reduce(x, axis=-1, keepdims=True)


def by_hand(logits_after, prompt: list[int], params: SamplingParams) -> list[int]:
    """Greedy tokens under bias, penalties and bans, each from a whole forward pass."""
    output: list[int] = []
    for _ in range(params.max_tokens or 0):
        x = logits_after(prompt + output)[-1]
        for token, bias in params.logit_bias:
            x[token] += bias
        for token in {*prompt, *output}:
            x[token] *= params.repetition_penalty ** (-1 if x[token] > 0 else 1)
        for token in set(output):
            x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
        if params.allowed_token_ids is not None:
            x[[t for t in range(VOCAB) if t not in params.allowed_token_ids]] = -np.inf
        for *before, last in params.bad_words_token_ids:
            if output[len(output) - len(before) :] == before:
                x[last] = -np.inf
        output.append(int(x.argmax()))
    return output


WANTED = {
    "plain": (prompt_of(1, 5), greedy(24)),
    "frequency": (prompt_of(2, 9), greedy(24, frequency_penalty=1.5)),
    "presence": (prompt_of(3, 20), greedy(7, presence_penalty=2.0)),
    "repetition": (prompt_of(4, 33), greedy(20, repetition_penalty=2.5)),
    "bias": (prompt_of(5, 3), greedy(24, logit_bias=((7, 3.0), (9, -50.0)))),
    "allowed": (prompt_of(6, 12), greedy(11, allowed_token_ids=tuple(range(1, VOCAB, 3)))),
    "all": (
        prompt_of(7, 16),
        greedy(
            22,
            frequency_penalty=0.7,
            presence_penalty=-0.4,
            repetition_penalty=1.3,
            logit_bias=((3, 2.0),),
        ),
    ),
}


@pytest.fixture(scope="module")
def expected(logits_after):
    plain = by_hand(logits_after, *WANTED["plain"])
    words = ((plain[0],), *((plain[i], plain[i + 1]) for i in (1, 4, 9)))
    wanted = WANTED | {"bad_words": (WANTED["plain"][0], greedy(24, bad_words_token_ids=words))}
    return {name: (*of, by_hand(logits_after, *of)) for name, of in wanted.items()}


def run(engine: Engine, wanted: dict) -> dict[str, Outcome]:
    for name, (prompt, params, *_) in wanted.items():
        engine.add_request(name, prompt, params)
    return drain(engine)


@pytest.mark.parametrize("num_blocks", [40, 13], ids=["roomy", "pressed"])
def test_each_row_draws_under_its_own_options_however_rows_move(num_blocks, runner, expected):
    engine = engine_over(runner, num_blocks)
    outcomes = run(engine, expected)
    assert {n: o.tokens for n, o in outcomes.items()} == {n: of[2] for n, of in expected.items()}
    assert (engine.stats().num_preemptions > 0) == (num_blocks < 40)


def test_the_options_of_those_tests_change_tokens(expected, logits_after):
    """The trap for the test above: an option that does nothing would pass it."""
    for name, (prompt, params, tokens) in expected.items():
        if name != "plain":
            assert tokens != by_hand(logits_after, prompt, greedy(params.max_tokens)), name


@pytest.mark.parametrize("num_blocks", [40, 13], ids=["roomy", "pressed"])
def test_raw_log_probabilities_are_the_models_own_whatever_the_options(
    num_blocks, runner, expected, logits_after
):
    wanted = {
        name: (prompt, SamplingParams(**(vars_of(params) | {"logprobs": 5, "prompt_logprobs": 3})))
        for name, (prompt, params, _) in expected.items()
    }
    outcomes = run(engine_over(runner, num_blocks), wanted)
    for name, (prompt, _, tokens) in expected.items():
        outcome = outcomes[name]
        assert outcome.tokens == tokens
        exact = log_softmax(logits_after(prompt + tokens))
        told = [*(outcome.prompt_logprobs or ()), *outcome.logprobs]
        assert told[0] is None
        for position, entry in enumerate(told[1:], 1):
            count = 3 if position < len(prompt) else 5
            check_entry(entry, (prompt + tokens)[position], exact[position - 1], count)


def vars_of(params: SamplingParams) -> dict:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def check_entry(entry, token: int, exact: np.ndarray, count: int) -> None:
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(exact[token], abs=2e-4)
    near = int((abs(exact - exact[token]) < 1e-4).sum())  # those that may change places with it
    assert abs(entry.rank - 1 - int((exact > exact[token]).sum())) < near
    assert len(entry.top) == count
    for (listed, logprob), likely in zip(entry.top, np.sort(exact)[::-1], strict=False):
        assert logprob == pytest.approx(likely, abs=2e-4)
        assert exact[listed] == pytest.approx(likely, abs=2e-4)


def test_a_prompt_alone_is_scored_as_a_whole_forward_pass_scores_it(runner, logits_after):
    prompt = prompt_of(8, 50)
    engine = engine_over(runner)
    for turn in range(2):  # the second could be found in the cache
        outcome = run(engine, {str(turn): (prompt, greedy(0, prompt_logprobs=20))})[str(turn)]
        exact = log_softmax(logits_after(prompt))
        assert outcome.result == ([], "length")
        assert outcome.prompt_logprobs is not None
        assert len(outcome.prompt_logprobs) == len(prompt)
        for position in range(1, len(prompt)):
            entry = outcome.prompt_logprobs[position]
            check_entry(entry, prompt[position], exact[position - 1], 20)


def test_no_option_compiles_anything(runner, expected):
    """The runner of these tests refuses a step outside its list; nothing else is traced either."""
    engine = engine_over(runner)
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: events.append(event)
    )
    outcomes = run(engine, expected)
    assert all(outcome.tokens for outcome in outcomes.values())
    assert [event for event in events if "compile" in event or "trace" in event] == []
    jax.jit(lambda x: x + 1)(jnp.zeros(3))
    assert any("compile" in event for event in events), "the listener would hear nothing"


class Spy:
    """Stands before a runner's executables and keeps what each call was given."""

    def __init__(self, executables) -> None:
        self._executables = executables
        self.calls: list[tuple] = []

    def __getattr__(self, name):
        find = getattr(self._executables, name)

        def found(*key):
            step = find(*key)

            def call(*arguments):
                self.calls.append((name, arguments))
                return step(*arguments)

            return call

        return found


def host_bytes(arguments) -> int:
    leaves = jax.tree.leaves(arguments)
    return sum(x.nbytes for x in leaves if isinstance(x, np.ndarray))


def test_what_nobody_asks_for_is_sent_once_and_never_again(runner, monkeypatch):
    spy = Spy(runner._executables)
    monkeypatch.setattr(runner, "_executables", spy)
    for turn in range(2):
        run(engine_over(runner), {f"{turn}": (prompt_of(turn, 9), greedy(12))})
    names = [name for name, _ in spy.calls]
    assert (names.count("prefill_for"), names.count("decode_for")) == (2, 22)
    neutral: dict[str, set[int]] = {"prefill_for": set(), "decode_for": set()}
    for name, arguments in spy.calls:
        if name == "decode_for":
            neutral[name].add(id(arguments[4]))
            # Where a token opens a block, an int32 a row.
            assert host_bytes(arguments) in (0, 4 * CONFIG.max_num_seqs)
        elif name == "prefill_for":
            batch = arguments[3]
            for array in (*batch.bias, batch.mask_SW, batch.targets_T):
                assert isinstance(array, jax.Array)
                neutral[name].add(id(array))
    assert {name: len(ids) for name, ids in neutral.items()} == {"prefill_for": 4, "decode_for": 1}


def test_the_state_of_the_device_counts_its_biases_and_its_token_counts(runner):
    specs = decode_state_specs(CONFIG.max_num_seqs, CONFIG.blocks_per_row, VOCAB)
    assert specs.counts_BV.nbytes == CONFIG.max_num_seqs * VOCAB * 2
    assert bias_specs(CONFIG.max_num_seqs) == specs.bias
