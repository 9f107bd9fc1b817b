"""Stand-ins of the server's tests: small tokenizers and a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import uvicorn
from starlette.types import ASGIApp
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from jaxserve.config import SamplingParams
from jaxserve.errors import InvalidRequest
from jaxserve.sched.outputs import (
    EngineStats,
    FinishReason,
    RequestTimings,
    RequestUpdate,
    TokenLogprobs,
)
from jaxserve.sched.request import TokenMask
from jaxserve.serve.app import AppParts, create_app
from jaxserve.serve.async_engine import AsyncEngine
from jaxserve.serve.metrics import Metrics
from jaxserve.serve.structured import Grammars
from jaxserve.serve.text import Text

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again and again",
    "grüße aus köln, 你好世界你好世界, 😀😃😄 emoji, naïve façade",
    "one two three four five six seven eight nine ten 1234567890",
]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE of about 320 tokens whose merges split multi-byte characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("an added token", special=False)])
    return tokenizer


def sentencepiece_tokenizer(*, strips_leading_space: bool = True) -> Tokenizer:
    """A BPE with byte fallback, spelled and decoded as Llama-2's converted tokenizer.json is."""
    words = ["▁", "▁the", "▁fox", "fox", "a", "b", "c", "é", "▁▁", "你", "."]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: token_id for token_id, piece in enumerate(pieces)},
            merges=[("▁", "▁")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips_leading_space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace_tokenizer(prepend_scheme: str) -> Tokenizer:
    """A vocabulary of a few ▁-marked pieces under the Metaspace decoder."""
    pieces = ["▁", "▁the", "▁fox", "fox", "a▁b", "▁▁", "</s>"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: token_id for token_id, piece in enumerate(pieces)}, merges=[])
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def scripted_logprobs(token_id: int, top: int, vocab_size: int = 1000) -> TokenLogprobs:
    """Made up, and a function of the token alone; odd tokens are not among the likeliest."""
    rank = 1 if token_id % 2 == 0 else 30
    likeliest = [(token_id + 2 * i + rank - 1) % vocab_size for i in range(top)]
    logprobs = [-0.125 * (i + 1) - token_id % 5 for i in range(30)]
    pairs = zip(likeliest, logprobs, strict=False)
    return TokenLogprobs(token_id, logprobs[rank - 1], rank, tuple(pairs))


@dataclass
class _Job:
    prompt: list[int]
    params: SamplingParams
    emitted: int = 0
    mask: TokenMask | None = None


@dataclass
class ScriptedEngine:
    """The engine's interface over a fixed script: request r's token i is ``script[i]``.

    ``gate`` makes every step wait for a permit, so a test decides when tokens come. ``fault`` is
    raised by the next step. Tokens repeat the script when it is too short. A token that a request's
    mask forbids gives way to one drawn from those it allows. ``cached`` is what every prompt is
    said to have found in the cache; ``failing`` ends every request after its first token.
    """

    script: Sequence[int]
    vocab_size: int = 1000
    max_model_len: int = 64
    eos_token_id: int | None = None
    gate: threading.Semaphore | None = None
    fault: BaseException | None = None
    cached: int = 0
    failing: str | None = None
    step_started: threading.Event = field(default_factory=threading.Event)
    jobs: dict[str, _Job] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    seen: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    options: list[tuple[str, str | None]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    _updates: list[RequestUpdate] = field(default_factory=list)
    _steps: int = 0
    _tokens: int = 0

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        mask: TokenMask | None = None,
        cache_salt: str = "",
        group: str | None = None,
    ) -> None:
        self.threads.add(threading.get_ident())
        prompt = list(prompt_token_ids)
        if not prompt:
            raise InvalidRequest("the prompt has 0 tokens, it needs at least 1", "prompt")
        if len(prompt) >= self.max_model_len:
            raise InvalidRequest(f"the prompt has {len(prompt)} tokens, too many", "prompt")
        if not all(0 <= token_id < self.vocab_size for token_id in prompt):
            raise InvalidRequest("a prompt token is outside the vocabulary", "prompt")
        assert request_id not in self.jobs
        self.jobs[request_id] = _Job(prompt, params, mask=mask)
        self.seen.append((prompt, params))
        self.options.append((cache_salt, group))

    def abort_request(self, request_id: str) -> None:
        self.threads.add(threading.get_ident())
        job = self.jobs.pop(request_id, None)
        if job is not None:
            self.aborted.append(request_id)
            self._updates.append(self._update(request_id, job, (), "abort"))

    def has_unfinished_requests(self) -> bool:
        return bool(self.jobs or self._updates)

    def step(self) -> list[RequestUpdate]:
        self.threads.add(threading.get_ident())
        self.step_started.set()
        if self.gate is not None and self.jobs:
            self.gate.acquire()
        if self.fault is not None:
            raise self.fault
        self._steps += 1
        updates, self._updates = self._updates, []
        for request_id, job in list(self.jobs.items()):
            updates.append(self._advanced(request_id, job))
            if updates[-1].finish_reason is not None:
                del self.jobs[request_id]
        return updates

    def _advanced(self, request_id: str, job: _Job) -> RequestUpdate:
        if self._limit(job) == 0:
            return self._update(request_id, job, (), "length")
        token_id = self.script[job.emitted % len(self.script)]
        if job.mask is not None:
            try:
                token_id = self._masked(job.mask, token_id, job.emitted)
            except ValueError as error:
                return self._update(request_id, job, (), "error")._replace(error=str(error))
        job.emitted += 1
        self._tokens += 1
        update = self._update(request_id, job, (token_id,), self._reason(job, token_id))
        if self.failing is not None:
            return update._replace(finish_reason="error", error=self.failing)
        return update

    def _masked(self, mask: TokenMask, token_id: int, position: int) -> int:
        words = np.zeros(-(-self.vocab_size // 32), np.uint32)
        mask.fill(words)
        allowed = [t for t in range(self.vocab_size) if int(words[t // 32]) >> (t % 32) & 1]
        if token_id not in allowed:
            token_id = random.Random(position).choice(allowed)
        mask.accept(token_id)
        return token_id

    def audit(self) -> None:
        assert not self.jobs

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.jobs),
            num_blocks=100,
            num_free_blocks=100 - len(self.jobs),
            num_steps=self._steps,
            prompt_tokens=sum(len(prompt) for prompt, _ in self.seen),
            generation_tokens=self._tokens,
            scheduled_tokens=self._tokens,
            decode_replays={1: self._steps},
        )

    def _reason(self, job: _Job, token_id: int) -> FinishReason | None:
        if token_id in self._stop_ids(job):
            return "stop"
        if job.mask is not None and job.mask.done:
            return "stop"
        return "length" if job.emitted >= self._limit(job) else None

    def _stop_ids(self, job: _Job) -> set[int]:
        eos = set() if job.params.ignore_eos or self.eos_token_id is None else {self.eos_token_id}
        return eos | set(job.params.stop_token_ids)

    def _limit(self, job: _Job) -> int:
        room = self.max_model_len - len(job.prompt)
        return room if job.params.max_tokens is None else min(job.params.max_tokens, room)

    def _update(
        self,
        request_id: str,
        job: _Job,
        new_token_ids: tuple[int, ...],
        reason: FinishReason | None,
    ) -> RequestUpdate:
        top, prompt_top = job.params.logprobs, job.params.prompt_logprobs
        shows_prompt = prompt_top is not None and job.emitted == len(new_token_ids)
        return RequestUpdate(
            request_id=request_id,
            new_token_ids=new_token_ids,
            finish_reason=reason,
            stop_token_id=next((t for t in new_token_ids if t in self._stop_ids(job)), None),
            num_prompt_tokens=len(job.prompt),
            num_output_tokens=job.emitted,
            timings=None if reason is None else RequestTimings(0.5, 0.25, 0.125),
            logprobs=(
                None if top is None else tuple(scripted_logprobs(t, top) for t in new_token_ids)
            ),
            prompt_logprobs=(
                (None, *(scripted_logprobs(t, prompt_top or 0) for t in job.prompt[1:]))
                if shows_prompt
                else None
            ),
            num_cached_tokens=self.cached,
        )


def app_parts(scripted: ScriptedEngine, **changes: Any) -> AppParts:
    """The parts of an app over a scripted engine; ``changes`` replace some of them."""
    metrics = Metrics("tiny", max_model_len=scripted.max_model_len)
    if "engine" not in changes:
        changes["engine"] = AsyncEngine(scripted, max_requests=64, on_step=metrics.observe_step)
    text = changes.get("text") or Text(byte_level_tokenizer(), chat_template=CHAT_TEMPLATE)
    parts: dict[str, Any] = {
        "text": text,
        "grammars": Grammars(text, vocab_size=scripted.vocab_size, eos_token_ids=(2,)),
        "metrics": metrics,
        "served_names": ("tiny", "tiny-alias"),
        "root": "owner/tiny",
        "max_model_len": scripted.max_model_len,
        "version": "0.0.test",
        "boot_info": lambda: {"capture": {"count": 3}},
        "wall_clock": lambda: 1234.5,
    }
    return AppParts(**{**parts, **changes})


@contextlib.asynccontextmanager
async def client_of(engine: ScriptedEngine, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client that calls the app in this loop, without sockets."""
    parts = app_parts(engine, **changes)
    transport = httpx.ASGITransport(create_app(parts))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
            yield client
    finally:
        if engine.gate is not None:
            engine.gate.release(100_000)
        assert isinstance(parts.engine, AsyncEngine)
        await asyncio.wait_for(parts.engine.shutdown(0.0), 30)


@contextlib.contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """The app on a socket of this machine, in a thread; gives its URL."""
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", ws="none", log_config=None))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Returns when the condition holds, fails when it never does."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        pause.wait(0.005)
