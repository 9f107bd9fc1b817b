"""A request's prompts fit the context, cut or refused before anything long is done to them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequest
from jaxserve.serve.prompts import PromptReader
from jaxserve.serve.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from jaxserve.serve.records import parse_request
from jaxserve.serve.text import Text
from tests.serve_fakes import CHAT_TEMPLATE, byte_level_tokenizer, sentencepiece_tokenizer

TOKENIZER = byte_level_tokenizer()
TEXT = Text(TOKENIZER, chat_template=CHAT_TEMPLATE)
WITH_BOS = Text(sentencepiece_tokenizer(), bos_token_id=1, add_bos=True)
HELLO = [{"role": "user", "content": "hello"}]


def reader(text: Text = TEXT, **options) -> PromptReader:
    return PromptReader(text, **{"max_model_len": 64, **options})


def completion(**fields) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps(fields).encode())


def chat(**fields) -> ChatRequest:
    return parse_request(ChatRequest, json.dumps({"messages": HELLO, **fields}).encode())


class Unused(Text):
    """A text whose tokenizer must not be asked."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("tokenised")


def test_a_text_far_beyond_the_context_is_refused_before_it_is_tokenised():
    longest = max(len(token.encode()) for token in TOKENIZER.get_vocab())
    lazy = Unused(TOKENIZER, chat_template=CHAT_TEMPLATE)
    too_long = "x" * (64 * longest + 1)
    for call, field in (
        (lambda: reader(lazy).of_completion(completion(prompt=["a", too_long][1:])), "prompt"),
        (
            lambda: reader(lazy).of_chat(chat(messages=[{"role": "user", "content": too_long}])),
            "messages",
        ),
    ):
        with pytest.raises(InvalidRequest, match=f"no text of more than {64 * longest}") as refused:
            call()
        assert (refused.value.param, refused.value.code) == (field, "context_length_exceeded")


def test_no_text_that_fits_is_refused_by_its_characters():
    token = max(TOKENIZER.get_vocab(), key=lambda token: len(token.encode()))
    text = TOKENIZER.decode([TOKENIZER.token_to_id(token)], skip_special_tokens=False) * 64
    prompt = reader().of_completion(completion(prompt=text))[0]
    assert len(prompt.token_ids) == 64


@given(
    prompt=st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
    | st.sampled_from(["the fox " * 300, "<s>the", "<s>" * 90]),
    kept=st.integers(1, 64),
    with_bos=st.booleans(),
)
@settings(max_examples=100)
def test_a_truncated_prompt_is_the_end_of_the_whole_one_with_its_bos(prompt, kept, with_bos):
    text = WITH_BOS if with_bos else TEXT
    ids = text.encode(prompt)
    cut = reader(text).of_completion(completion(prompt=prompt, truncate_prompt_tokens=kept))[0]
    if len(ids) <= kept:
        assert list(cut.token_ids) == ids
        return
    assert len(cut.token_ids) == kept
    added = 1 if with_bos and text.adds_bos(prompt) else 0
    assert list(cut.token_ids[:added]) == ids[:added]
    assert list(cut.token_ids[added:]) == ids[len(ids) - kept + added :]


def test_ids_beyond_the_context_are_refused_before_they_are_spelled(monkeypatch):
    monkeypatch.setattr(TEXT, "spell", None)
    with pytest.raises(InvalidRequest, match="has 65 tokens, the context 64") as refused:
        reader().of_completion(completion(prompt=[5] * 65, echo=True))
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")


def test_ids_and_conversations_are_truncated_too():
    ids = list(range(3, 50))
    assert (
        reader().of_completion(completion(prompt=ids, truncate_prompt_tokens=5))[0].token_ids
        == (ids[-5:])
    )
    whole = reader().of_chat(chat()).token_ids
    assert reader().of_chat(chat(truncate_prompt_tokens=4)).token_ids == whole[-4:]


@pytest.mark.parametrize(("max_tokens", "kept"), [(None, 63), (0, 63), (1, 63), (20, 44)])
def test_minus_one_truncates_to_what_leaves_room_for_the_answer(max_tokens, kept):
    call = completion(prompt=[5] * 500, truncate_prompt_tokens=-1, max_tokens=max_tokens)
    assert len(reader().of_completion(call)[0].token_ids) == kept


def test_more_than_the_context_cannot_be_kept():
    with pytest.raises(InvalidRequest, match="65 is more than the context of 64") as refused:
        reader().of_completion(completion(prompt="x", truncate_prompt_tokens=65))
    assert refused.value.param == "truncate_prompt_tokens"


@given(prompt=st.sampled_from(["the fox", "", "<s", "é <s>", "<s><s>"]))
@settings(max_examples=12)
def test_an_echo_leaves_out_a_bos_that_the_client_did_not_write(prompt):
    echoed = reader(WITH_BOS).of_completion(completion(prompt=prompt, echo=True))[0]
    assert len(echoed.offsets) == len(echoed.token_ids)
    assert echoed.token_ids[0] == 1
    assert echoed.text == prompt


def test_an_echo_of_ids_shows_every_token():
    ids = [1, *WITH_BOS.encode("the fox", add_special_tokens=False)]
    echoed = reader(WITH_BOS).of_completion(completion(prompt=ids, echo=True))[0]
    assert echoed.text.startswith("<s>")
    assert echoed.offsets[:2] == [0, 3]


def test_bad_words_are_spelled_as_they_begin_a_text_and_as_they_follow_one():
    params = completion(prompt="x", bad_words=["fox", " fox", "é"]).sampling_params()
    spelled = reader().spelled(params)
    assert set(spelled.bad_words_token_ids) == {
        tuple(TOKENIZER.encode(text).ids) for text in ("fox", " fox", "é", " é")
    }
    assert reader().spelled(completion(prompt="x").sampling_params()).bad_words_token_ids == ()


def test_tokenize_reads_a_prompt_or_messages():
    def tokens(**fields) -> list[int]:
        return reader().tokens(parse_request(TokenizeRequest, json.dumps(fields).encode()))

    assert tokens(prompt="the fox") == TOKENIZER.encode("the fox").ids
    rendered = "<|im_start|>user\nhello<|im_end|>\n"
    assert tokens(messages=HELLO, add_generation_prompt=False) == TOKENIZER.encode(rendered).ids


def test_tokenize_bounds_a_text_before_it_is_tokenised():
    lazy = Unused(TOKENIZER, chat_template=CHAT_TEMPLATE)
    long = "x" * (2**20 + 1)
    for fields in ({"prompt": long}, {"messages": [{"role": "user", "content": long}]}):
        call = parse_request(TokenizeRequest, json.dumps(fields).encode())
        with pytest.raises(InvalidRequest, match=f"at most {2**20}") as refused:
            reader(lazy).tokens(call)
        assert refused.value.param in fields


def test_a_requests_own_template_is_refused_unless_trusted():
    call = chat(chat_template="{{ messages[0].content }}", chat_template_kwargs={"a": 1})
    with pytest.raises(InvalidRequest, match="--trust-request-chat-template") as refused:
        reader().of_chat(call)
    assert refused.value.param == "chat_template"
    trusted = reader(trust_templates=True).of_chat(call)
    assert trusted.token_ids == TOKENIZER.encode("hello").ids
