"""What is asked of the engine, checked and made a request."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from jaxserve.config import EngineConfig, ModelConfig, SamplingParams
from jaxserve.errors import InvalidRequest
from jaxserve.sched.masks import TokenLimits
from jaxserve.sched.request import Request, TokenMask, seed_key


class Admission:
    """Makes the requests of one engine."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self._config = config
        self._vocab_size = model.vocab_size
        self._limits = TokenLimits(frozenset(model.eos_token_ids), model.vocab_size)

    def admit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        mask: TokenMask | None,
        cache_salt: str,
        group: str | None,
        continuation: Sequence[int],
        arrival: int,
        now: float,
    ) -> Request:
        """The request, the ``arrival``-th at ``now``; see ``Engine.add_request``.

        Raises InvalidRequest.
        """
        prompt = [operator.index(token) for token in prompt_token_ids]
        self._check_prompt(prompt, alone=params.max_tokens == 0)
        room = self._config.max_model_len - len(prompt)
        ending, rules = self._limits.of(params)
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=params,
            max_output_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=ending,
            key=seed_key(params.seed, self._config.seed, arrival),
            arrival=arrival,
            arrived_at=now,
            cache_salt=cache_salt,
            group=group,
            rules=rules.with_mask(mask),
            forced=check_tokens(continuation, "continuation", self._vocab_size),
        )

    def _check_prompt(self, prompt: list[int], *, alone: bool) -> None:
        """``alone``: nothing is drawn after it."""
        if not prompt:
            raise InvalidRequest("the prompt has 0 tokens, it needs at least 1", "prompt")
        longest = self._config.max_model_len - (not alone)
        if len(prompt) > longest:
            room = "fit" if alone else "leave room for an answer"
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens, at most {longest} {room}; "
                "shorten it or raise --max-model-len",
                "prompt",
                "context_length_exceeded",
            )
        check_tokens(prompt, "prompt", self._vocab_size)


def check_tokens(tokens: Sequence[int], field: str, vocab_size: int) -> tuple[int, ...]:
    """``tokens``. Raises InvalidRequest for one that is outside the vocabulary."""
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise InvalidRequest(
            f"{field} token {wrong} is outside the vocabulary, 0 to {vocab_size - 1}", field
        )
    return tuple(tokens)
