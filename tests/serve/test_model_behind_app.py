"""A tiny model behind the real routes: every option of a request does what it says."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from jaxserve.boot import build_engine
from jaxserve.checkpoint import Checkpoint
from jaxserve.config import EngineConfig
from jaxserve.serve.app import AppParts, create_app
from jaxserve.serve.async_engine import AsyncEngine
from jaxserve.serve.metrics import Metrics
from jaxserve.serve.structured import Grammars
from jaxserve.serve.text import Text
from tests.models import TINY
from tests.serve_fakes import CHAT_TEMPLATE, byte_level_tokenizer

MODEL = replace(TINY, vocab_size=384, eos_token_ids=(2,))
TOKENIZER = byte_level_tokenizer()
CONFIG = EngineConfig(
    max_model_len=128, max_num_seqs=2, max_num_batched_tokens=32, block_size=8, num_blocks=65
)
TEXT = Text(TOKENIZER, chat_template=CHAT_TEMPLATE)
PROMPT = "the quick brown fox jumps"


@pytest.fixture(scope="module")
def booted():
    return build_engine(Checkpoint(name="tiny", config=MODEL, tokenizer=None, tensors=None), CONFIG)


def answers(booted, *calls: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
    """The answers of calls made at once: an object each, or the chunks of a stream."""

    async def run() -> list[httpx.Response]:
        metrics = Metrics("tiny", max_model_len=128)
        engine = AsyncEngine(booted.engine, max_requests=64, on_step=metrics.observe_step)
        parts = AppParts(
            engine=engine,
            text=TEXT,
            grammars=Grammars(TEXT, vocab_size=MODEL.vocab_size, eos_token_ids=(2,)),
            metrics=metrics,
            served_names=("tiny",),
            root="tiny",
            max_model_len=128,
            version="0",
            enable_prompt_tokens_details=True,
        )
        transport = httpx.ASGITransport(create_app(parts))
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
            replies = await asyncio.gather(*(client.post(path, json=call) for call in calls))
        await engine.shutdown(10.0)
        return replies

    replies = asyncio.run(run())
    assert [reply.status_code for reply in replies] == [200] * len(calls), replies[0].text
    return [
        [json.loads(line[6:]) for line in reply.text.strip().split("\n\n")[:-1]]
        if call.get("stream")
        else reply.json()
        for call, reply in zip(calls, replies, strict=True)
    ]


def asking(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, **fields}


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_choices_are_those_of_requests_with_their_seeds_and_share_the_prompt(booted):
    together, *alone = answers(
        booted,
        asking(n=3, seed=7, max_tokens=20),
        *(asking(seed=7 + i, max_tokens=20) for i in range(3)),
    )
    assert texts(together) == [text for answer in alone for text in texts(answer)]
    assert len(set(texts(together))) == 3
    tokens = len(TEXT.encode(PROMPT))
    assert together["usage"]["prompt_tokens"] == tokens
    assert together["usage"]["completion_tokens"] == 60
    assert 0 <= together["usage"]["prompt_tokens_details"]["cached_tokens"] < tokens


def test_an_answers_logprobs_are_those_of_a_prompt_that_holds_it(booted):
    drawn = answers(booted, asking(temperature=0, logprobs=3, return_token_ids=True))[0]
    choice = drawn["choices"][0]
    prompt = choice["prompt_token_ids"] + choice["token_ids"]
    scoring = {"prompt": prompt, "echo": True, "logprobs": 3, "max_tokens": 0}
    scored, ranked = answers(
        booted, scoring, {"prompt": prompt, "prompt_logprobs": 3, "max_tokens": 1}
    )
    echoed = scored["choices"][0]["logprobs"]
    count = len(choice["token_ids"])
    assert scored["choices"][0]["text"].startswith(PROMPT)
    assert echoed["tokens"][-count:] == choice["logprobs"]["tokens"]
    tail = echoed["token_logprobs"][-count:]
    assert tail == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-3)
    assert [max(top.values()) for top in echoed["top_logprobs"][-count:]] == tail  # greedy
    ranks = [
        entry[str(token)]["rank"]
        for token, entry in zip(prompt, ranked["choices"][0]["prompt_logprobs"], strict=True)
        if entry is not None
    ]
    assert ranks[-count:] == [1] * count


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_with_logprobs_and_stop_strings_says_what_the_whole_answer_says(booted, path):
    chat = path.endswith("chat/completions")
    asked = {"max_tokens": 40, "seed": 3, "n": 2, "ignore_eos": True}
    asked |= {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    plain = answers(booted, asked, path=path)[0]["choices"]
    said = plain[0]["message"]["content"] if chat else plain[0]["text"]
    asked |= {"stop": said[len(said) // 2 :][:3], "logprobs": True, "top_logprobs": 2}
    if not chat:
        asked = {**asked, "logprobs": 2}
        del asked["top_logprobs"]
    whole, chunks = answers(booted, asked, {**asked, "stream": True}, path=path)
    for choice in whole["choices"]:
        parts = [c for e in chunks for c in e["choices"] if c["index"] == choice["index"]]
        pieces = [p["delta"].get("content", "") if chat else p["text"] for p in parts]
        assert "".join(pieces) == (choice["message"]["content"] if chat else choice["text"])
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        column = "content" if chat else "token_logprobs"
        streamed = [x for p in parts if p["logprobs"] for x in p["logprobs"][column]]
        assert streamed == choice["logprobs"][column]
    assert whole["choices"][0]["finish_reason"] == "stop"


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
    "additionalProperties": False,
}


def test_structured_answers_fit_their_forms_and_change_nobody_elses(booted):
    free = asking(seed=11, max_tokens=60)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    alone = answers(booted, free)[0]
    bound = {"ignore_eos": False, "max_tokens": 100}
    crowd = answers(
        booted,
        free,
        asking(response_format=form, n=3, seed=1, **bound),
        asking(structured_outputs={"regex": "(fox|dog){3}[0-9]{2}"}, seed=2, **bound),
        asking(structured_outputs={"choice": ["grüße", "the fox"]}, seed=3, **bound),
        asking(response_format={"type": "json_object"}, seed=4, max_tokens=30),
    )
    assert texts(crowd[0]) == texts(alone)
    for choice in crowd[1]["choices"]:
        value = json.loads(choice["text"])
        assert set(value) == {"n", "b"}
        assert 0 <= value["n"] <= 99
        assert type(value["b"]) is bool
        assert choice["finish_reason"] == "stop"
    assert re.fullmatch("(fox|dog){3}[0-9]{2}", texts(crowd[2])[0])
    assert texts(crowd[3])[0] in ("grüße", "the fox")
    assert texts(crowd[4])[0].startswith("{")


def test_options_that_ban_or_favour_tokens_are_seen_in_the_text(booted):
    fox = TOKENIZER.encode("fox").ids
    few = TOKENIZER.encode("abc").ids
    plain = answers(booted, asking(temperature=0, return_token_ids=True))[0]
    ids = plain["choices"][0]["token_ids"]
    banned = next(t for t in ids if TOKENIZER.encode(TOKENIZER.decode([t])).ids == [t])
    forced, allowed, polite, favoured, penalised = answers(
        booted,
        asking(logit_bias={str(few[0]): 100}),
        asking(allowed_token_ids=few),
        asking(temperature=0, bad_words=[TOKENIZER.decode([banned])], return_token_ids=True),
        asking(temperature=0, logit_bias={str(t): 100 for t in fox}, bad_words=["zz"]),
        asking(temperature=0, frequency_penalty=2.0, presence_penalty=2.0, max_tokens=80),
    )
    assert texts(forced)[0] == "a" * 12
    assert set(texts(allowed)[0]) <= set("abc")
    assert banned not in polite["choices"][0]["token_ids"]
    assert set(texts(favoured)[0]) <= set("fox ")
    repeated = answers(booted, asking(temperature=0, max_tokens=80))[0]
    assert len(set(texts(penalised)[0])) > len(set(texts(repeated)[0]))


def test_an_answer_is_as_long_as_min_tokens_asks(booted):
    eos_soon = {"ignore_eos": False, "logit_bias": {"2": 100}}
    short, long = answers(booted, asking(**eos_soon), asking(**eos_soon, min_tokens=8))
    assert short["usage"]["completion_tokens"] == 1
    assert long["usage"]["completion_tokens"] == 9
    assert long["choices"][0]["finish_reason"] == "stop"
