"""The page at /, in a real browser: it chats, stops, shows the engine, asks no other host."""

from __future__ import annotations

import re
import threading

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.serve.app import create_app
from jaxserve.serve.async_engine import AsyncEngine
from jaxserve.serve.metrics import Metrics
from jaxserve.serve.page import page_response
from tests.browser import chromium
from tests.serve_fakes import ScriptedEngine, app_parts, byte_level_tokenizer, served, wait_until

TOKENIZER = byte_level_tokenizer()
ANSWER = "grüße 😀 the quick brown fox <b>你好</b>\n\ndata: x"
BOOT = {
    "pool": {"num_blocks": 100, "block_size": 16, "pool_bytes": 3 * 2**20, "sized_by": "memory"},
    "capture": {"count": 2, "shapes": ["1x64", "2x64"], "replays": {"2x64": 7}, "read": "streamed"},
    "executables": {"planned": 5, "ready": 5, "compiles_after_ready": 0, "workspace_bytes": 2048},
    "boot_seconds": {"import": 1.5, "compile": 2.5},
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def engine():
    eos = TOKENIZER.token_to_id("<|im_end|>")
    script = [*TOKENIZER.encode(ANSWER, add_special_tokens=False).ids, eos]
    return ScriptedEngine(
        script=script, eos_token_id=eos, gate=threading.Semaphore(0), max_model_len=256
    )


@pytest.fixture(scope="module")
def url(engine):
    metrics = Metrics("tiny", max_model_len=64, prefix="vllm")
    bridge = AsyncEngine(engine, max_requests=64, on_step=metrics.observe_step)
    parts = app_parts(
        engine, engine=bridge, metrics=metrics, boot_info=lambda: BOOT, api_keys=("sesame",)
    )
    with served(create_app(parts)) as url:
        yield url
        engine.gate.release(10**6)


@pytest.fixture
def page(browser, url):
    browser.open(url)
    wait_until(lambda: browser.text("#status") == "ready")
    browser.complaints()
    return browser


def bubbles(page, role: str) -> list[str]:
    return page.run(
        f"return [...document.querySelectorAll('.message.{role}')].map((m) => m.textContent)"
    )


def ask(page, engine, text: str, key: str = "sesame") -> None:
    page.type("#key", key)
    page.type("#prompt", text)
    page.click("#send")


def test_an_answer_streams_in_as_text_and_says_how_fast_it_was(page, engine):
    page.run(
        "window.seen = new Set(); new MutationObserver(() => window.seen.add("
        "document.querySelector('.assistant').textContent)).observe("
        "document.querySelector('#log'), {childList: true, subtree: true})"
    )
    ask(page, engine, "hello <script>alert(1)</script>")
    for _ in range(len(engine.script)):
        engine.gate.release()
    wait_until(
        lambda: (
            page.text("#send") == "Send"
            and bool(page.run("return document.querySelector('.note')"))
        )
    )
    [answer] = bubbles(page, "assistant")
    shown, note = answer[: len(ANSWER)], answer[len(ANSWER) :]
    assert shown == ANSWER
    assert re.fullmatch(rf"{len(engine.script)} tokens, .* a second, first after .* s", note)
    assert bubbles(page, "user") == ["hello <script>alert(1)</script>"]
    assert page.run("return window.seen.size") > 2  # piece by piece
    assert page.complaints() == []


def test_stop_ends_the_answer_and_the_request_in_the_engine(page, engine):
    aborted = len(engine.aborted)
    ask(page, engine, "hello")
    wait_until(lambda: engine.gate.release() or len(bubbles(page, "assistant")[0]) > 3)
    page.click("#send")
    wait_until(lambda: engine.gate.release() or len(engine.aborted) == aborted + 1)
    wait_until(lambda: page.text("#send") == "Send")
    assert bubbles(page, "assistant")[0].endswith("stopped")
    assert bubbles(page, "error") == []


def test_a_wrong_key_is_said_and_the_question_can_be_asked_again(page, engine):
    ask(page, engine, "hello", key="wrong")
    wait_until(lambda: bubbles(page, "error") != [])
    assert "api key" in bubbles(page, "error")[0]
    assert bubbles(page, "assistant") == []
    assert page.text("#send") == "Send"


def test_the_panels_show_the_engine_its_latencies_the_list_and_the_boot(page):
    wait_until(lambda: page.text("#rate") != "–")
    assert page.text("#model") == "tiny"
    figures = ("#running", "#waiting", "#rate", "#pool")
    assert [page.text(s) for s in figures] == ["0", "0", "0.0", "0%"]
    assert "2 requests ended" in page.text("#totals")
    rows = page.run(
        "return [...document.querySelectorAll('#latency tr')].map((row) =>"
        " [...row.children].map((cell) => cell.textContent))"
    )
    assert [row[0] for row in rows][:2] == ["to first token", "between tokens"]
    assert all(re.fullmatch(r"[\d.e+]+ m?s", cell) for row in rows for cell in row[1:4])
    assert [row[4] for row in (rows[0], *rows[2:])] == ["2"] * 3
    assert page.run(
        "return [...document.querySelectorAll('#shapes tr')].map((row) => row.textContent)"
    ) == ["1 × 640", "2 × 647"]
    assert page.text("#capture_count") == "5 of 5 warm"
    assert "streamed read" in page.text("#capture")
    assert "import 1.50 s" in page.text("#boot_legend")
    assert "100 blocks of 16 tokens · 3.00 MiB · sized by memory" in page.text("#boot_facts")
    assert page.complaints() == []


@given(
    counts=st.lists(st.integers(0, 50), min_size=4, max_size=4),
    share=st.sampled_from([0.5, 0.9, 0.99]),
)
@settings(max_examples=30, deadline=None)
def test_percentiles_lie_in_the_bucket_that_holds_them(browser, url, counts, share):
    if not browser.run("return location.href").startswith(url):
        browser.open(url)
    edges = ["0.1", "0.5", "2.5", "+Inf"]
    buckets = [
        {"labels": {"le": edge}, "value": sum(counts[: i + 1])} for i, edge in enumerate(edges)
    ]
    found = browser.run(f"return quantile({buckets!s}, {share})")
    if not sum(counts):
        assert found is None
        return
    at = next(i for i in range(4) if sum(counts[: i + 1]) >= share * sum(counts))
    bounds = [0.0, 0.1, 0.5, 2.5, 2.5]
    assert bounds[at] <= found <= bounds[at + 1]


def test_the_policy_runs_what_the_file_holds_and_nothing_else(page):
    page.run(
        "const s = document.createElement('script'); s.textContent = 'window.injected = 1';"
        "document.body.append(s)"
    )
    assert page.run("return window.injected") is None
    assert any("Content Security Policy" in said for said in page.complaints())
    with pytest.raises(AssertionError, match="Failed to fetch"):
        page.run("return fetch('http://127.0.0.1:9/').then(() => 1)")
    assert any("connect-src" in said for said in page.complaints())


async def test_the_file_names_no_other_host_and_needs_no_key(url):
    text = bytes(page_response().body).decode()
    assert re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", text) == ["http://www.w3.org"]
    reply = httpx.get(url)
    assert reply.status_code == 200
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
