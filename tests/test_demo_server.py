"""The launcher with the default model, as a user runs it, and real clients in front of it."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from jaxserve.checkpoint import load_checkpoint
from tests.demo_model import demo_path

ROOT = Path(__file__).parents[1]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "smollm2.json").read_text())
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

pytestmark = [pytest.mark.demo, pytest.mark.timeout(540)]


@pytest.fixture(scope="module")
def server():
    """The URL of a small server of the default model; it must end cleanly on SIGTERM."""
    demo_path()
    flags = "--port 0 --max-num-seqs 4 --max-model-len 512 --max-num-batched-tokens 64"
    process = subprocess.Popen(
        [sys.executable, "scripts/serve.py", *flags.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("ready: "):
                break
        else:
            pytest.fail(f"the server did not come up: {''.join(said)}")
        yield line.removeprefix("ready: ").strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_a_chat_is_answered_streamed_and_whole_while_sixteen_others_run(server):
    async with AsyncOpenAI(base_url=server, api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id

        async def tell(i):
            answer = await client.completions.create(
                model=model, prompt=f"Story {i}: once upon a time", max_tokens=40, seed=i
            )
            return answer.usage.completion_tokens

        async def chat():
            answer = await client.chat.completions.create(
                model=model, messages=QUESTION, temperature=0
            )
            return answer.choices[0].message.content

        async def stream():
            chunks = await client.chat.completions.create(
                model=model, messages=QUESTION, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        whole, streamed, *told = await asyncio.gather(
            chat(), stream(), *[tell(i) for i in range(16)]
        )
    assert "Paris" in whole
    assert streamed == whole
    assert all(1 <= tokens <= 40 for tokens in told)


async def test_greedy_text_is_that_of_transformers(server):
    """Eight prompts at once on four rows; text as the token ids of the golden file decode."""
    tokenizer = load_checkpoint(str(demo_path())).tokenizer.tokenizer
    async with httpx.AsyncClient(base_url=server, timeout=300) as client:

        async def continued(case):
            body = {
                "model": "SmolLM2-135M-Instruct",
                "prompt": case["prompt_token_ids"],
                "max_tokens": len(case["greedy_token_ids"]),
                "temperature": 0,
                "ignore_eos": True,
                "skip_special_tokens": False,
            }
            answer = await client.post("/completions", json=body)
            return answer.json()["choices"][0]["text"]

        texts = await asyncio.gather(*map(continued, GOLDEN))
    for case, text in zip(GOLDEN, texts, strict=True):
        ids = case["greedy_token_ids"]
        assert text == tokenizer.decode(ids, skip_special_tokens=False), case["text"]


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "country": {"enum": ["France", "Spain"]},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "country", "capital"],
    "additionalProperties": False,
}


async def test_choices_forms_and_log_probabilities_are_what_they_say(server):
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    async with AsyncOpenAI(base_url=server, api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id

        async def score(text):
            scored = await client.completions.create(
                model=model, prompt=text, echo=True, logprobs=1, max_tokens=0
            )
            return sum(scored.choices[0].logprobs.token_logprobs[1:])

        ask = client.chat.completions.create
        formed, drawn, right, wrong = await asyncio.gather(
            ask(model=model, messages=QUESTION, n=3, seed=1, response_format=form),
            ask(
                model=model,
                messages=QUESTION,
                n=2,
                seed=1,
                max_completion_tokens=20,
                logprobs=True,
                top_logprobs=2,
            ),
            score("The capital of France is Paris"),
            score("The capital of France is zebra"),
        )
    for choice in formed.choices:
        place = json.loads(choice.message.content)
        assert place.keys() == {"city", "country", "capital"}
        assert isinstance(place["city"], str)
        assert place["country"] in ("France", "Spain")
        assert isinstance(place["capital"], bool)
        assert choice.finish_reason == "stop"
    for choice in drawn.choices:
        said = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        assert said.decode("utf-8", "replace").removesuffix("<|im_end|>") == choice.message.content
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    assert right > wrong


async def test_after_all_that_every_block_is_free_and_nothing_waits(server):
    async with httpx.AsyncClient(base_url=server.removesuffix("/v1")) as client:
        lines = (await client.get("/metrics")).text.splitlines()
        health = (await client.get("/health")).json()
    gauges = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("jaxserve:")
    }
    assert gauges["jaxserve:num_requests_running"] == 0
    assert gauges["jaxserve:num_requests_waiting"] == 0
    assert gauges["jaxserve:kv_cache_usage_perc"] == 0
    assert health["status"] == "alive"
