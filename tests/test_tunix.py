"""The rollout protocol of Tunix: a small trainer that uses it, and Tunix itself where it is."""

import abc
import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve import LLM, EngineConfig
from jaxserve.errors import InvalidWeights
from jaxserve.tunix import TunixRollout, rollout_engine
from tests.models import TINY, module_of

CONFIG = EngineConfig(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=32, block_size=8)
PROTOCOL = (
    "__init__",
    "generate",
    "get_per_token_logps",
    "update_params",
    "pad_id",
    "eos_id",
    "model",
)


@nnx.jit
def forward(module, tokens_T):
    """Logits [T, V] of one whole sequence, without any cache."""
    return module(tokens_T[None])[0]


def greedy(module, prompt, count):
    """The likeliest continuation, each token from a whole forward pass."""
    tokens = list(prompt)
    for _ in range(count):
        padded = jnp.asarray(tokens + [0] * (64 - len(tokens)), jnp.int32)
        tokens.append(int(forward(module, padded)[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


class Letters:
    """A tokenizer with the methods Tunix asks of one; a letter is a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) for i in ids)

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 0


@dataclass
class RolloutConfig:
    """The fields of Tunix's RolloutConfig that are read."""

    max_tokens_to_generate: int = 6
    temperature: float = 0.0
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 8
    eos_tokens: list[int] | None = None
    return_logprobs: bool = True


@pytest.fixture(scope="module")
def llm():
    with LLM(params=module_of(TINY, seed=9), config=CONFIG, use_tqdm=False) as llm:
        yield llm
        assert llm.num_late_compiles == 0


@pytest.fixture
def rollout(llm):
    return TunixRollout(llm=llm, rollout_actor=module_of(TINY, seed=1), tokenizer=Letters())


def own_logprobs(module, tokens):
    padded = jnp.asarray(tokens + [0] * (64 - len(tokens)), jnp.int32)
    logprobs = jax.nn.log_softmax(forward(module, padded), axis=-1)
    return [float(logprobs[i, token]) for i, token in enumerate(tokens[1:])]


def test_rollouts_are_of_the_actors_weights_and_padded_as_a_trainer_wants(rollout):
    output = rollout.generate(["hello", "ab"], RolloutConfig())
    module = module_of(TINY, seed=1)
    for i, prompt in enumerate(([1, *b"hello"], [1, *b"ab"])):
        tokens = output.tokens[i].tolist()
        expected = greedy(module, prompt, 6)
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == 6 or tokens[-1] == 2
        padded = output.left_padded_prompt_tokens[i].tolist()
        assert padded == [0] * (8 - len(prompt)) + prompt
        assert output.text[i] == Letters().decode(tokens)
        assert output.logprobs is not None
        assert len(output.logprobs[i]) == len(tokens)
    chex.assert_type(output.left_padded_prompt_tokens, np.int32)


def test_a_trainer_finds_no_module_here_that_it_could_take_for_its_own(rollout):
    assert rollout.model() is None


def test_a_prompt_longer_than_the_padding_widens_it_to_a_power_of_two(rollout):
    output = rollout.generate(["abcdefghijk"], RolloutConfig())
    chex.assert_shape(output.left_padded_prompt_tokens, (1, 16))


def test_equal_prompts_of_a_group_draw_apart_and_a_seed_repeats_them(rollout):
    config = RolloutConfig(temperature=1.0, seed=jax.random.key(3), max_tokens_to_generate=12)
    first, again = (rollout.generate(["abc"] * 4, config) for _ in range(2))
    tokens = [row.tolist() for row in first.tokens]
    assert tokens == [row.tolist() for row in again.tokens]
    assert len(set(map(tuple, tokens))) == 4
    other = rollout.generate(["abc"] * 4, replace(config, seed=jax.random.PRNGKey(4)))
    assert tokens != [row.tolist() for row in other.tokens]


def test_an_eos_token_of_the_config_ends_a_rollout_and_is_part_of_it(rollout):
    whole = rollout.generate(["abc"], RolloutConfig()).tokens[0].tolist()
    ends = whole[3]
    cut = rollout.generate(["abc"], RolloutConfig(eos_tokens=[ends], return_logprobs=False))
    assert cut.tokens[0].tolist() == whole[: whole.index(ends) + 1]
    assert cut.logprobs is None


def test_log_probabilities_of_padded_rows_are_the_modules(rollout):
    prompts = np.asarray([[0, 0, 1, 7, 9], [1, 4, 5, 6, 7]], np.int32)
    completions = np.asarray([[33, 2, 0, 0], [8, 9, 10, 11]], np.int32)
    logps = rollout.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(completions))
    chex.assert_shape(logps, (2, 4))
    module = module_of(TINY, seed=1)
    np.testing.assert_allclose(logps[0, :2], own_logprobs(module, [1, 7, 9, 33, 2])[2:], atol=2e-5)
    np.testing.assert_array_equal(logps[0, 2:], 0)
    np.testing.assert_allclose(
        logps[1], own_logprobs(module, [1, 4, 5, 6, 7, 8, 9, 10, 11])[4:], atol=2e-5
    )


def test_a_pad_that_is_the_eos_counts_once_at_the_end(rollout, monkeypatch):
    monkeypatch.setattr(Letters, "pad_id", Letters.eos_id)
    logps = rollout.get_per_token_logps(np.asarray([[2, 1, 7]]), np.asarray([[33, 2, 2, 2]]))
    assert np.flatnonzero(np.asarray(logps[0])).tolist() == [0, 1]


def test_an_update_changes_the_rollouts_and_a_partial_one_keeps_the_rest(rollout):
    other = module_of(TINY, seed=5)
    rollout.update_params(nnx.state(other))
    tokens = rollout.generate(["abc"], RolloutConfig()).tokens[0].tolist()
    assert tokens == greedy(other, [1, *b"abc"], 6)[: len(tokens)]
    norm = nnx.state(other, lambda path, _: "norm" in path)
    half = jax.tree.map(lambda a: a * -1.0, norm)
    assert 0 < len(jax.tree.leaves(half)) < len(jax.tree.leaves(nnx.state(other)))
    rollout.update_params(half, (nnx.Param,))
    nnx.update(other, half)
    tokens = rollout.generate(["abc"], RolloutConfig()).tokens[0].tolist()
    assert tokens == greedy(other, [1, *b"abc"], 6)[: len(tokens)]


def test_a_trainers_own_names_and_dtype_become_the_engines(llm):
    module = module_of(TINY, seed=2)
    rollout = TunixRollout(
        llm=llm,
        rollout_actor=nnx.Dict({"policy": module}),
        tokenizer=Letters(),
        canonical=lambda state: jax.tree.map(
            lambda a: a.astype(jnp.bfloat16), nnx.to_pure_dict(state)["policy"]
        ),
    )
    assert len(rollout.generate(["abc"], RolloutConfig()).tokens[0]) > 0
    with pytest.raises(InvalidWeights, match="missing"):
        TunixRollout(llm=llm, rollout_actor=nnx.Dict({"a": module}), tokenizer=Letters())


def test_a_cluster_gets_a_subclass_to_call_with_its_own_arguments(llm, monkeypatch):
    methods = {name: abc.abstractmethod(lambda self, **kwargs: None) for name in PROTOCOL}
    base = ModuleType("tunix.rl.rollout.base_rollout")
    base.BaseRollout = abc.ABCMeta("BaseRollout", (), methods)  # type: ignore[attr-defined]
    names = ("tunix", "tunix.rl", "tunix.rl.rollout")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    engine = rollout_engine(llm)
    assert issubclass(engine.func, base.BaseRollout)
    made = engine(
        rollout_actor=module_of(TINY, seed=1),
        tokenizer=Letters(),
        mesh=None,
        rollout_config=RolloutConfig(),
    )
    assert made.eos_id() == 2


def test_the_class_answers_all_that_tunix_itself_asks_for(llm):
    tunix = pytest.importorskip(
        "tunix.rl.rollout.base_rollout",
        reason="NOT CHECKED, Tunix's own base class: pip install google-tunix brings it",
        exc_type=ImportError,
    )
    assert tunix.BaseRollout.__abstractmethods__ == set(PROTOCOL)
    assert issubclass(rollout_engine(llm).func, tunix.BaseRollout)
    output = rollout_engine(llm)(
        rollout_actor=module_of(TINY, seed=1), tokenizer=Letters()
    ).generate(["abc"], tunix.RolloutConfig(temperature=0.0, max_tokens_to_generate=3))
    for field in tunix.RolloutOutput.__dataclass_fields__:
        assert hasattr(output, field), field


class Actor(nnx.Module):
    """A policy as Tunix calls one; its prompts need no padding here, so no mask."""

    def __init__(self, policy):
        self.policy = policy

    def __call__(self, input_tokens, positions, cache, attention_mask):
        return self.policy(input_tokens), cache


@pytest.fixture
def loose_promotion():
    """Tunix mixes dtypes and ranks, in threads of its own too."""
    options = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    strict = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in strict.items():
        jax.config.update(name, value)


@pytest.mark.filterwarnings("ignore")  # Tunix's own
def test_tunixs_own_grpo_learner_raises_a_reward_and_sends_its_weights_every_step(
    llm, loose_promotion
):
    """The reward is the share of even letters."""
    why = "NOT CHECKED, a GRPO loop of Tunix itself: pip install google-tunix brings it"
    cluster = pytest.importorskip("tunix.rl.rl_cluster", reason=why, exc_type=ImportError)
    grpo = pytest.importorskip("tunix.rl.grpo.grpo_learner", reason=why, exc_type=ImportError)
    base = pytest.importorskip("tunix.rl.rollout.base_rollout", reason=why, exc_type=ImportError)
    optax = pytest.importorskip("optax", reason=why)
    steps, first = 10, llm.weight_version
    rewards, versions = [], []

    def even_letters(prompts, completions, **columns):
        shares = [np.mean([ord(c) % 2 == 0 for c in text] or [0]) for text in completions]
        rewards.append(np.mean(shares))
        versions.append(llm.weight_version - first)
        return [float(share) for share in shares]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = (cluster.Role.ACTOR, cluster.Role.REFERENCE, cluster.Role.ROLLOUT)
    engine = rollout_engine(llm, canonical=lambda state: nnx.to_pure_dict(state)["policy"])
    config = cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=engine,
        training_config=cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(2e-2), eval_every_n_steps=steps + 1, max_steps=steps
        ),
        rollout_config=base.RolloutConfig(
            max_tokens_to_generate=8, max_prompt_length=8, temperature=1.0, return_logprobs=True
        ),
    )
    learner = grpo.GRPOLearner(
        rl_cluster=cluster.RLCluster(
            actor=Actor(module_of(TINY, seed=1)),
            reference=Actor(module_of(TINY, seed=1)),
            tokenizer=Letters(),
            cluster_config=config,
        ),
        algo_config=grpo.GRPOConfig(num_generations=8, beta=0.0),
        reward_fns=even_letters,
    )
    learner.train([{"prompts": np.array(["abcdefg"])}] * steps)
    assert versions == list(range(1, steps + 1))
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.2
