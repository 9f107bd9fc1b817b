"""Log probabilities name every token so that no two of them are mistaken for each other."""

from __future__ import annotations

import json

from jaxserve.sched.outputs import TokenLogprobs
from jaxserve.serve.detokenize import Vocabulary
from jaxserve.serve.logprobs import ShownToken, chat_logprobs, completion_logprobs, prompt_logprobs
from tests.serve_fakes import byte_level_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL = Vocabulary(byte_level_tokenizer())
SENTENCEPIECE = Vocabulary(sentencepiece_tokenizer())
HALF = byte_level_tokenizer().token_to_id("Ģ")  # the byte 0x80
A, BYTE_A = (sentencepiece_tokenizer().token_to_id(token) for token in ("a", "<0x61>"))
NO_TOKEN = 5000


def shown(*entries: TokenLogprobs) -> list[ShownToken]:
    return [ShownToken(entry.token_id, 0, entry) for entry in entries]


def test_half_a_character_is_written_as_its_bytes_and_is_no_key_of_a_text():
    entry = TokenLogprobs(HALF, -1.0, 1, ((HALF, -1.0),))
    content = chat_logprobs(BYTE_LEVEL, shown(entry), 1)["content"][0]
    assert (content["token"], content["bytes"]) == ("\\x80", [0x80])
    assert content["top_logprobs"][0]["token"] == "\\x80"
    columns = completion_logprobs(BYTE_LEVEL, shown(entry), 1)
    assert columns["tokens"] == ["bytes:\\x80"]
    assert columns["top_logprobs"] == [{"bytes:\\x80": -1.0}]


def test_of_tokens_with_one_text_the_drawn_one_counts_and_then_the_likeliest():
    assert SENTENCEPIECE.bytes_of(A) == SENTENCEPIECE.bytes_of(BYTE_A) == b"a"
    top = ((BYTE_A, -0.5), (A, -2.0))
    drawn = completion_logprobs(SENTENCEPIECE, shown(TokenLogprobs(A, -2.0, 2, top)), 2)
    assert drawn["top_logprobs"] == [{"a": -2.0}]
    eos = max(SENTENCEPIECE.special_ids)
    drawn = completion_logprobs(SENTENCEPIECE, shown(TokenLogprobs(eos, -9.0, 9, top)), 2)
    assert drawn["top_logprobs"] == [{"</s>": -9.0, "a": -0.5}]
    prompt = prompt_logprobs(SENTENCEPIECE, [None, TokenLogprobs(A, -2.0, 2, top)], 2)
    assert prompt[0] is None
    assert [(key, entry["rank"]) for key, entry in prompt[1].items()] == [
        (str(A), 2),
        (str(BYTE_A), 1),
    ]


def test_fewer_likeliest_are_shown_than_were_worked_out():
    entry = TokenLogprobs(A, -2.0, 3, ((3, -0.5), (4, -1.0), (A, -2.0)))
    assert len(chat_logprobs(SENTENCEPIECE, shown(entry), 2)["content"][0]["top_logprobs"]) == 2
    assert len(completion_logprobs(SENTENCEPIECE, shown(entry), 0)["top_logprobs"][0]) == 1
    assert len(prompt_logprobs(SENTENCEPIECE, [entry], 1)[0]) == 2


def test_an_id_without_a_token_and_an_impossible_one_are_still_json():
    entry = TokenLogprobs(NO_TOKEN, float("-inf"), 384, ((NO_TOKEN, float("-inf")),))
    content = chat_logprobs(BYTE_LEVEL, shown(entry), 1)["content"][0]
    assert (content["token"], content["bytes"], content["logprob"]) == ("", [], -9999.0)
    assert prompt_logprobs(BYTE_LEVEL, [entry], 1) == [
        {str(NO_TOKEN): {"logprob": -9999.0, "rank": 384, "decoded_token": ""}}
    ]


def test_what_broken_weights_give_is_json_too():
    nan = TokenLogprobs(1, float("nan"), 1, ((1, float("nan")),))
    columns = completion_logprobs(SENTENCEPIECE, shown(nan), 1)
    assert columns["token_logprobs"] == [-9999.0]
    assert json.dumps(columns, allow_nan=False)
