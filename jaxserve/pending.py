"""The requests of an LLM while its engine runs them."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from jaxserve.config import SamplingParams
from jaxserve.errors import ConfigError, InvalidRequest, NotReady, RequestFailed
from jaxserve.outputs import Choice, PendingRequest
from jaxserve.runtime.engine import Engine
from jaxserve.serve.calls import child_params
from jaxserve.serve.text import Text

PromptType = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or one of them as vLLM's ``{"prompt": text}``, ``{"prompt_token_ids": ids}``."""


def text_or_ids(prompt: PromptType) -> str | Sequence[int]:
    """What a prompt holds. Raises InvalidRequest."""
    if not isinstance(prompt, Mapping):
        return prompt
    known = sorted(prompt.keys() & {"prompt", "prompt_token_ids"})
    if len(prompt) != 1 or not known:
        raise InvalidRequest(
            f"a prompt with {', '.join(map(repr, prompt)) or 'nothing in it'}: give 'prompt' or "
            "'prompt_token_ids', and nothing else",
            "prompt",
        )
    return prompt[known[0]]


class PendingRequests:
    """Requests of ``engine``, told apart by their choices; without a ``text``, of token ids only.

    Whoever waits steps the engine, for everyone.
    """

    def __init__(self, engine: Engine, text: Text | None) -> None:
        self._engine: Engine | None = engine
        self._text = text
        self._owners: dict[str, PendingRequest] = {}  # by the id of a choice
        self._num_requests = 0

    @property
    def text(self) -> Text:
        """The text layer; raises ConfigError where there is none."""
        if self._text is None:
            raise ConfigError("this LLM has no tokenizer; pass token ids, or tokenizer=")
        return self._text

    def add(
        self, prompt: PromptType, params: SamplingParams, continuation: Sequence[int] = ()
    ) -> PendingRequest:
        """Queue all choices of a request; a refused one leaves nothing behind."""
        engine = self._open()
        given = text_or_ids(prompt)
        text = given if isinstance(given, str) else None
        tokens = self.text.encode(given) if isinstance(given, str) else given
        try:
            ids = tuple(map(operator.index, tokens))
        except TypeError:
            raise InvalidRequest(
                f"prompt={str(tokens)[:40]}: a text, or a list of token ids", "prompt"
            ) from None
        params = self._spelled(params)
        name = str(self._num_requests)
        self._num_requests += 1
        request = PendingRequest(name, text, ids, {})
        try:
            for index in range(params.n):
                child = child_params(params, index)
                choice_id = f"{name}-{index}"
                detokenizer = None if self._text is None else self._text.detokenizer(ids, child)
                engine.add_request(
                    choice_id,
                    ids,
                    child,
                    group=name if params.n > 1 else None,
                    continuation=continuation,
                )
                scored = params.logprobs is not None
                request.choices[choice_id] = Choice(index, detokenizer, scored)
                self._owners[choice_id] = request
        except BaseException:
            self.drop(request)
            raise
        return request

    def step(self) -> None:
        """One step of the engine, its updates given to whom they belong."""
        engine = self._open()
        updates = engine.step()
        if not updates and not engine.has_unfinished_requests():
            raise NotReady("the engine sleeps: call wake() first; what was asked before is kept")
        for update in updates:
            request = self._owners.get(update.request_id)
            if request is None:
                continue
            choice = request.choices[update.request_id]
            choice.push(update)
            if update.finish_reason == "error":  # its own reader is told; the others go on
                request.error = update.error or "the request failed"
            request.changed = True
            request.num_cached_tokens = update.num_cached_tokens
            if update.prompt_logprobs is not None:
                request.prompt_logprobs = update.prompt_logprobs
            if choice.finish_reason is not None:
                del self._owners[update.request_id]
                if update.finish_reason is None:  # a stop string, which the engine knows not
                    engine.abort_request(update.request_id)

    def finish(self, requests: Sequence[PendingRequest], *, use_tqdm: bool) -> None:
        """Step until all of them have ended. Raises RequestFailed."""
        engine = self._open()
        waiting = deque(requests)
        with tqdm(
            total=len(requests), desc="prompts", disable=not use_tqdm, dynamic_ncols=True
        ) as bar:
            tokens = engine.stats().generation_tokens
            while waiting:
                self.step()
                while waiting and waiting[0].finished:
                    if waiting[0].error is not None:
                        raise RequestFailed(waiting[0].error)
                    waiting.popleft()
                    if use_tqdm:
                        made = engine.stats().generation_tokens - tokens
                        rate = made / max(bar.format_dict["elapsed"], 1e-9)
                        bar.set_postfix_str(f"{rate:.1f} tok/s", refresh=False)
                    bar.update()

    def drop(self, request: PendingRequest) -> None:
        """Forget a request, wherever it stands."""
        if self._engine is None:
            return
        for choice_id in request.choices:
            if self._owners.pop(choice_id, None) is not None:
                self._engine.abort_request(choice_id)

    def close(self) -> None:
        """Forget the engine and everything it runs."""
        self._engine = None
        self._owners.clear()

    def _open(self) -> Engine:
        if self._engine is None:
            raise NotReady("this LLM is closed")
        return self._engine

    def _spelled(self, params: SamplingParams) -> SamplingParams:
        """``params`` with its bad words as tokens; ConfigError for text that cannot be read."""
        spell = params.bad_words and not params.bad_words_token_ids
        text = self.text if params.stop or spell else None  # refused where there is none
        if text is None or not spell:
            return params
        spelled = [s for word in params.bad_words for s in text.spellings(word)]
        return replace(params, bad_words_token_ids=tuple(dict.fromkeys(spelled)))
