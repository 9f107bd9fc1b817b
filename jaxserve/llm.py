"""LLM: the engine in this process, for scripts, notebooks and training loops."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from tqdm import tqdm

from jaxserve.boot import build_engine
from jaxserve.checkpoint.export import write_about
from jaxserve.checkpoint.load import LoadFormat
from jaxserve.checkpoint.orbax_files import PARAMS
from jaxserve.config import BootConfig, EngineConfig, ModelConfig, SamplingParams
from jaxserve.errors import ConfigError, InvalidRequest, NotReady, RequestFailed
from jaxserve.outputs import PendingRequest, RequestOutput
from jaxserve.pending import PendingRequests, PromptType
from jaxserve.runtime.booted import BootedEngine
from jaxserve.runtime.residency import OnSleep, OnUpdate
from jaxserve.runtime.weights import Saving, save_params
from jaxserve.sched.outputs import EngineStats
from jaxserve.serve.text import Text
from jaxserve.sources import config_for, find_checkpoint


class LLM:
    """A model and its engine in this process; not for use by two threads at once.

        with LLM() as llm:
            print(llm.generate("The sky is", SamplingParams(max_tokens=20))[0].outputs[0].text)

    ``model``: what the server's --model takes; None is the demo model. Or ``params``: the weights
    themselves, ``Params`` or canonical (see jaxserve/model/canonical.py), of ``model_config``,
    which an nnx module brings along; such an engine takes token ids, and with a ``tokenizer`` text.

    No process is started. Of a GPU the engine takes what ``config`` says: the pool is
    ``kv_cache_memory_bytes`` or ``num_blocks``, or what ``gpu_memory_utilization`` leaves. JAX
    itself takes three quarters of a card at its first use in a process, unless
    XLA_PYTHON_CLIENT_PREALLOCATE=false is set before: set it in a notebook that shares a card.
    ``boot`` may name a directory that keeps executables for the next time.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        params: Any = None,
        model_config: ModelConfig | None = None,
        tokenizer: str | Path | None = None,
        load_format: LoadFormat = "auto",
        config: EngineConfig | None = None,
        boot: BootConfig | None = None,
        use_tqdm: bool = True,
    ) -> None:
        self._use_tqdm = use_tqdm
        bars: dict[str, tqdm[Any]] = {}

        def progress(what: str, done: int, total: int) -> None:
            if use_tqdm and what not in bars:
                bars[what] = tqdm(total=total, desc=what, leave=False)
            if what in bars:
                bars[what].update(done - bars[what].n)

        try:
            checkpoint = find_checkpoint(
                model, params, model_config, tokenizer, load_format, progress
            )
            bundle = None if checkpoint.tokenizer is None else checkpoint.fitting_tokenizer()
            self._tokenizer = checkpoint.tokenizer
            self._booted: BootedEngine | None = build_engine(
                checkpoint,
                config_for(config, params),
                boot,
                params=params,
                progress=progress,
            )
        finally:
            for bar in bars.values():
                bar.close()
        text = None if bundle is None else Text.of(bundle)
        self._pending = PendingRequests(self.engine.engine, text)

    # What is asked.

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Finished outputs in the order of ``prompts``; see ``PromptType``.

        One SamplingParams for all, or one a prompt. A refused prompt refuses the call. Raises
        InvalidRequest, RequestFailed.
        """
        batch = _batch(prompts)
        settings = _settings(sampling_params, len(batch))
        requests: list[PendingRequest] = []
        try:
            for prompt, params in zip(batch, settings, strict=True):
                requests.append(self._pending.add(prompt, params))
            self._pending.finish(
                requests, use_tqdm=self._use_tqdm if use_tqdm is None else use_tqdm
            )
        finally:
            for request in requests:
                self._pending.drop(request)
        return [request.output() for request in requests]

    def stream(
        self, prompt: PromptType, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """The output of one prompt each time it grows, the finished one last.

        Several streams may be read in turn. Leaving one early aborts it.
        """
        request = self._pending.add(prompt, sampling_params or SamplingParams())
        try:
            told = False  # the finished output; others' calls may have brought it
            while not told:
                while not request.changed:
                    self._pending.step()
                request.changed = False
                if request.error is not None:
                    raise RequestFailed(request.error)
                told = request.finished
                yield request.output()
        finally:
            self._pending.drop(request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """``generate`` over conversations: one, or a list of them."""
        text = self._pending.text
        if isinstance(messages, str):
            raise InvalidRequest(
                "a conversation is a list of messages such as {'role': 'user', 'content': ...}, "
                f"not {messages[:20]!r}; generate takes a text",
                "messages",
            )
        if messages and isinstance(messages[0], Mapping):
            messages = [messages]  # type: ignore[list-item]
        rendered = [
            text.render_chat(
                [dict(message) for message in conversation],  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                template=chat_template,
                variables=chat_template_kwargs,
            )
            for conversation in messages
        ]
        prompts = [text.encode(one, add_special_tokens=False) for one in rendered]
        outputs = self.generate(prompts, sampling_params, use_tqdm=use_tqdm)
        return [replace(output, prompt=one) for output, one in zip(outputs, rendered, strict=True)]

    def score(
        self, token_ids: Sequence[int], *, num_prompt_tokens: int | None = None
    ) -> list[float | None]:
        """The model's own log probability of each token given those before it, None for the first.

        Computed by prefill, all at once; that equals what decode steps give up to rounding. With
        ``num_prompt_tokens`` the tokens after so many go through decode steps, one after the
        other, as they did when they were generated from that prompt: in deterministic mode the
        result is then bit for bit what ``generate`` returned.
        """
        if not len(token_ids) or not all(hasattr(token, "__index__") for token in token_ids):
            raise InvalidRequest(
                f"token_ids={str(token_ids)[:40]!r}: at least one token id; encode makes them of a "
                "text",
                "token_ids",
            )
        if num_prompt_tokens is None:
            num_prompt_tokens = len(token_ids)
        if not 1 <= num_prompt_tokens <= len(token_ids):
            raise InvalidRequest(
                f"num_prompt_tokens={num_prompt_tokens}, must be from 1 to the "
                f"{len(token_ids)} tokens given"
            )
        prompt = list(token_ids[:num_prompt_tokens])
        rest = list(map(operator.index, token_ids[num_prompt_tokens:]))
        params = SamplingParams(
            max_tokens=len(rest),
            prompt_logprobs=0,
            logprobs=0 if rest else None,
            temperature=0.0,
            ignore_eos=True,
        )
        request = self._pending.add(prompt, params, continuation=rest)
        try:
            self._pending.finish([request], use_tqdm=False)
        finally:
            self._pending.drop(request)
        (choice,) = request.choices.values()
        entries = [*(request.prompt_logprobs or ()), *choice.logprobs]
        return [None if entry is None else entry.logprob for entry in entries]

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, as ``generate`` makes them."""
        return self._pending.text.encode(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._pending.text.decode(token_ids, skip_special_tokens=skip_special_tokens)

    # The engine itself.

    @property
    def engine(self) -> BootedEngine:
        """The engine, its runner, executables and plan; raises NotReady when closed."""
        if self._booted is None:
            raise NotReady("this LLM is closed")
        return self._booted

    @property
    def weight_version(self) -> int:
        """Which weights compute what comes next."""
        return self.engine.engine.weight_version

    @property
    def num_late_compiles(self) -> int:
        """Steps compiled after the boot: 0, unless the boot allowed them."""
        return len(self.engine.executables.late)

    def stats(self) -> EngineStats:
        """The engine's gauges and totals."""
        return self.engine.engine.stats()

    def update_params(
        self, tree: Any, version: int | None = None, *, requests: OnUpdate = "keep"
    ) -> int:
        """Other weights from the next step on; returns their version.

        See ``Engine.update_params`` and ``fitting_weights`` in jaxserve/runtime/weights.py: a tree
        in any canonical form, ``Params``, or the path of a checkpoint. Nothing is recompiled, and
        nothing changes when the tree is refused.
        """
        return self.engine.engine.update_params(tree, version=version, requests=requests)

    def save(self, directory: str | Path) -> Saving:
        """Start to save the model as a directory with config.json and an Orbax checkpoint.

        ``Saving.wait`` says when it is whole; the engine may run and be updated meanwhile. What is
        saved is what ``LLM(directory)`` and the server load. The nnx module takes it, with or
        without jaxserve, as its pure dict::

            tree = ocp.StandardCheckpointer().restore(saving.wait())
            state = nnx.state(module)
            nnx.replace_by_pure_dict(state, nnx.restore_int_paths(tree))
            nnx.update(module, state)
        """
        directory = Path(directory).expanduser()
        if directory.exists():
            raise ConfigError(f"{directory} exists; name a directory that does not")
        booted = self.engine
        directory.mkdir(parents=True)
        write_about(directory, None, booted.model, self._tokenizer)
        return save_params(booted.runner.params, booted.model, directory / PARAMS)

    def reset_prefix_cache(self) -> None:
        """Share nothing that is computed so far."""
        self.engine.engine.reset_prefix_cache()

    def sleep(self, level: int = 1, *, requests: OnSleep = "keep") -> None:
        """Give the pool's memory back, at level 2 the weights' too; see ``Engine.sleep``."""
        if level not in (1, 2):
            raise ConfigError(f"sleep level {level}: use 1 (the pool) or 2 (the weights too)")
        self.engine.engine.sleep(level=level, requests=requests)

    def wake(self) -> None:
        """Take the memory again."""
        self.engine.engine.wake()

    def close(self) -> None:
        """Give everything back; a closed LLM refuses what it is asked."""
        self._booted = None
        self._pending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _batch(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    # numpy's integers too, not its arrays
    first: Any = prompts[0] if len(prompts) else None
    if hasattr(first, "__index__") and not np.ndim(first):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _settings(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequest(f"{len(params)} sampling_params for {count} prompts")
    return list(params)
