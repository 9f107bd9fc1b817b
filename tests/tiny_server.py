"""A tiny model served on a socket of this machine: the real engine behind the real routes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace

from jaxserve import LLM, EngineConfig
from jaxserve.boot import serve_engine
from jaxserve.model.definition import LlamaForCausalLM
from jaxserve.serve.logs import no_log
from jaxserve.serve.settings import ServerSettings
from jaxserve.serve.text import Text
from tests.models import TINY, module_of
from tests.serve_fakes import CHAT_TEMPLATE, byte_level_tokenizer, served

MODEL = replace(TINY, vocab_size=384, eos_token_ids=(2,))
TOKENIZER = byte_level_tokenizer()
TEXT = Text(TOKENIZER, chat_template=CHAT_TEMPLATE)
CONFIG = EngineConfig(
    max_model_len=128, max_num_seqs=2, max_num_batched_tokens=32, block_size=8, num_blocks=33
)


@functools.cache
def tiny_llm() -> tuple[LLM, LlamaForCausalLM]:
    """The engine, compiled once a process, and the module whose weights it has."""
    module = module_of(MODEL, seed=1)
    return LLM(params=module, config=CONFIG, use_tqdm=False), module


@contextlib.contextmanager
def tiny_server(max_queued_requests: int = 62) -> Iterator[str]:
    """The URL of a server, one at a time; nothing may be left in its engine at the end."""
    llm, _ = tiny_llm()
    server = ServerSettings(max_queued_requests=max_queued_requests)
    deaths: list[BaseException] = []
    serving = serve_engine(llm.engine, TEXT, ("tiny",), server, deaths.append, no_log, root="tiny")
    with served(serving.app) as url:
        yield url
    asyncio.run(asyncio.wait_for(serving.engine.shutdown(10.0), 30))
    assert deaths == []
    stats = llm.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks
