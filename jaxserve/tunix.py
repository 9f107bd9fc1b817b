"""Rollouts for Tunix: what its RL cluster asks of a rollout engine, answered by an ``LLM``.

    llm = LLM(params=engine_weights, model_config=model, config=config)
    ClusterConfig(rollout_engine=rollout_engine(llm, canonical=...), ...)

The protocol is that of ``tunix.rl.rollout.base_rollout.BaseRollout`` (google-tunix 0.1.7), which
is imported when ``rollout_engine`` is called and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.config import SamplingParams
from jaxserve.llm import LLM
from jaxserve.model.canonical import pure_tree

Canonical = Callable[[Any], Any]
"""From the state of the trainer's model to a canonical tree, see jaxserve/model/canonical.py."""


@dataclass(frozen=True)
class RolloutOutput:
    """What ``generate`` gives a trainer, a list entry a prompt; the fields are Tunix's.

    ``tokens`` int32, unpadded, the one that ended the text included. ``logits`` are not kept.
    ``left_padded_prompt_tokens`` int32 [prompts, length]. ``logprobs`` float32, a token each, of
    the distribution that was drawn from; None where not asked for.
    """

    text: list[str]
    tokens: list[np.ndarray]
    left_padded_prompt_tokens: np.ndarray
    logprobs: list[np.ndarray] | None
    logits: None = None


class TunixRollout:
    """A rollout engine around ``llm``, which needs no tokenizer: the trainer brings its own.

    ``rollout_actor`` is the trainer's nnx module. ``canonical`` turns its state into weights of
    ``llm``; the default is for modules whose paths are Hugging Face's names, as jaxserve's own.
    LoRA is merged there: it is given the whole state at every update. Weights are cast to the
    engine's dtype. The engine's context must hold a prompt, a completion and a token more.
    """

    def __init__(
        self,
        *,
        llm: LLM,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Any = None,
        rollout_config: Any = None,
        canonical: Canonical = lambda state: state,
    ) -> None:
        """``mesh`` and ``rollout_config`` come with the protocol; ``llm`` has decided both."""
        del mesh, rollout_config
        self._llm = llm
        self._actor = rollout_actor
        self._tokenizer = tokenizer
        self._canonical = canonical
        self._load()

    def generate(self, prompts: list[str], rollout_config: Any, **kwargs: Any) -> RolloutOutput:
        """One completion a prompt. A seed gives every prompt of the call one of its own.

        Raises InvalidRequest, RequestFailed.
        """
        del kwargs
        token_ids = [self._encode(prompt) for prompt in prompts]
        seeds = _seeds(rollout_config.seed, len(prompts))
        settings = [self._settings(rollout_config, seed) for seed in seeds]
        outputs = self._llm.generate(token_ids, settings, use_tqdm=False)
        choices = [output.outputs[0] for output in outputs]
        logprobs = None
        if rollout_config.return_logprobs:
            logprobs = [
                np.asarray([entry.logprob for entry in choice.logprobs or ()], np.float32)
                for choice in choices
            ]
        return RolloutOutput(
            text=[self._tokenizer.decode(list(choice.token_ids)) for choice in choices],
            tokens=[np.asarray(choice.token_ids, np.int32) for choice in choices],
            left_padded_prompt_tokens=self._left_padded(
                token_ids, rollout_config.max_prompt_length
            ),
            logprobs=logprobs,
        )

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> jax.Array:
        """float32 [B, C]: the model's own log probability of each completion token, 0 at padding.

        ``prompt_tokens`` [B, P] padded on the left, ``completion_tokens`` [B, C] on the right.
        """
        pad = self.pad_id()
        prompts = [_stripped(row[::-1], pad)[::-1].tolist() for row in np.asarray(prompt_tokens)]
        rows = np.asarray(completion_tokens)
        completions = [_stripped(row, pad) for row in rows]
        if pad == self.eos_id():  # the first of the trailing ones ended the text
            completions = [
                row[: len(kept) + 1] for row, kept in zip(rows, completions, strict=True)
            ]
        outputs = self._llm.generate(
            [prompt + kept.tolist() for prompt, kept in zip(prompts, completions, strict=True)],
            SamplingParams(max_tokens=0, prompt_logprobs=0),
            use_tqdm=False,
        )
        logps = np.zeros(rows.shape, np.float32)
        for i, output in enumerate(outputs):
            entries = (output.prompt_logprobs or ())[len(prompts[i]) :]
            logps[i, : len(entries)] = [entry.logprob for entry in entries if entry is not None]
        return jnp.asarray(logps)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Roll out with other weights from now on: all of the actor's, or those of a filter.

        Raises InvalidWeights before the engine changes.
        """
        del filter_types  # the tree says which it holds
        nnx.update(self._actor, params)
        self._load()

    def pad_id(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """None: a trainer that found its own module here would take the weights for shared.

        It would then send none, and the engine, which has them in a layout of its own, would roll
        out with the first ones for ever.
        """

    def _load(self) -> None:
        dtype = jnp.dtype(self._llm.engine.config.dtype)
        tree = pure_tree(self._canonical(nnx.state(self._actor)))
        self._llm.update_params(jax.tree.map(lambda leaf: leaf.astype(dtype), tree))

    def _encode(self, prompt: str) -> list[int]:
        token_ids = list(self._tokenizer.encode(prompt))
        bos = self._tokenizer.bos_id()
        return token_ids if not bos or token_ids[:1] == [bos] else [bos, *token_ids]

    def _settings(self, config: Any, seed: int | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=config.top_k or 0,
            seed=seed,
            stop_token_ids=tuple(config.eos_tokens or (self.eos_id(),)),
            ignore_eos=True,  # Tunix's tokenizer says what ends a text, not the model's config
            logprobs=0 if config.return_logprobs else None,
            logprobs_mode="processed_logprobs",
        )

    def _left_padded(self, token_ids: Sequence[list[int]], length: int | None) -> np.ndarray:
        longest = max(map(len, token_ids))
        if length is None or length < longest:  # few lengths: a trainer compiles for each
            length = 1 << (longest - 1).bit_length()
        padded = np.full((len(token_ids), length), self.pad_id(), np.int32)
        for row, ids in zip(padded, token_ids, strict=True):
            row[length - len(ids) :] = ids
        return padded


def rollout_engine(llm: LLM, *, canonical: Canonical = lambda state: state) -> partial[Any]:
    """What Tunix takes as ``ClusterConfig(rollout_engine=...)``; ImportError where it is not."""
    from tunix.rl.rollout.base_rollout import (  # pyright: ignore[reportMissingImports]
        BaseRollout,
    )

    BaseRollout.register(TunixRollout)
    return partial(TunixRollout, llm=llm, canonical=canonical)


def _stripped(row: np.ndarray, pad: int) -> np.ndarray:
    """``row`` without the padding at its end."""
    kept = np.flatnonzero(row != pad)
    return row[: kept[-1] + 1 if kept.size else 0]


def _seeds(seed: Any, count: int) -> list[int | None]:
    """A seed a prompt from an int, an array or a JAX key; Nones from None."""
    if seed is None:
        return [None] * count
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = np.asarray(seed).astype(np.uint32).ravel()
    drawn = np.random.SeedSequence(words.tolist()).generate_state(count, np.uint64)
    return [int(word >> np.uint64(1)) for word in drawn]
