"""What a grammar lets through matches its constraint, and no constraint may stall the server."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequest
from jaxserve.serve.structured import Constraint, Grammar, GrammarMask, Grammars
from jaxserve.serve.text import Text
from tests.serve_fakes import byte_level_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL = Text(byte_level_tokenizer())
EOS = 2
VOCAB = 384  # more than the tokenizer has, as models often do
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["é", ""]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def grammars(text: Text = BYTE_LEVEL, **options) -> Grammars:
    return Grammars(text, vocab_size=VOCAB, eos_token_ids=(EOS, 0), **options)


SHARED = grammars()


def compiled(kind, value, source: Grammars = SHARED) -> Grammar:
    return asyncio.run(source.compile(Constraint(kind, value), "response_format"))


def allowed(mask: GrammarMask) -> list[int]:
    """Ids of the set bits, read one at a time."""
    words = np.full(-(-VOCAB // 32), 0xDEADBEEF, np.uint32)
    mask.fill(words)
    return [t for t in range(VOCAB) if int(words[t // 32]) >> (t % 32) & 1]


def random_answer(mask: GrammarMask, seed: int, text: Text = BYTE_LEVEL, limit: int = 400) -> str:
    """The text of tokens drawn evenly from those allowed, which must come to an end."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    while not mask.done:
        assert len(ids) < limit, "no end"
        token_id = int(rng.choice(allowed(mask)))
        mask.accept(token_id)
        if token_id in (EOS, 0):
            assert mask.done
            break
        ids.append(token_id)
    return text.decode(ids)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30)
def test_whatever_a_schema_lets_through_is_json_that_fits_it(seed):
    value = json.loads(random_answer(compiled("json_schema", SCHEMA).mask(), seed))
    assert set(value) == {"a", "b"}
    assert type(value["a"]) is int
    assert 0 <= value["a"] <= 99
    assert value["b"] in ("é", "")


@pytest.mark.parametrize(
    "pattern", ["[ab]{3}x?", "(grüß|你好)+ ?[0-9]{2}", r"[0-9]{1,3}(\.[0-9])?"]
)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=15)
def test_whatever_a_regex_lets_through_matches_it_whole(pattern, seed):
    assert re.fullmatch(pattern, random_answer(compiled("regex", pattern).mask(), seed))


@given(
    choices=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_an_answer_with_choices_is_one_of_them(choices, seed):
    assert random_answer(compiled("choice", choices).mask(), seed) in choices


def test_a_grammar_is_followed():
    grammar = 'start: "(" start ")" | "x"'
    answer = random_answer(compiled("grammar", grammar).mask(), 4)
    assert re.fullmatch(r"\(*x\)*", answer)
    assert answer.count("(") == answer.count(")")


def test_a_schema_may_be_text_and_blanks_between_its_tokens_are_bounded():
    mask = compiled("json_schema", json.dumps(SCHEMA)).mask()
    for token_id in BYTE_LEVEL.encode("{" + " " * 32):
        assert token_id in allowed(mask)
        mask.accept(token_id)
    assert BYTE_LEVEL.encode(" ")[0] not in allowed(mask)


def test_a_tokenizer_with_byte_fallback_is_followed_too():
    tokenizer = sentencepiece_tokenizer()
    text = Text(tokenizer)
    source = grammars(text)
    answer = random_answer(compiled("regex", "(the|你| fox){4}é", source).mask(), 1, text)
    assert re.fullmatch("(the|你| ?fox){4}é", answer)


def test_an_answer_ends_where_it_may_and_only_there():
    mask = compiled("regex", "ab?").mask()
    assert EOS not in allowed(mask)
    mask.accept(BYTE_LEVEL.encode("a")[0])
    assert not mask.done
    assert set(allowed(mask)) == {EOS, 0, BYTE_LEVEL.encode("b")[0]}
    mask.accept(BYTE_LEVEL.encode("b")[0])
    assert mask.done


def test_two_answers_of_one_grammar_go_their_own_ways():
    grammar = compiled("regex", "ab|cd")
    first, second = grammar.mask(), grammar.mask()
    first.accept(BYTE_LEVEL.encode("a")[0])
    assert allowed(first) == [BYTE_LEVEL.encode("b")[0]]
    assert BYTE_LEVEL.encode("c")[0] in allowed(second)


def test_a_token_outside_the_grammar_is_an_error_and_stays_one():
    mask = compiled("regex", "a").mask()
    with pytest.raises(ValueError, match=r"."):
        mask.accept(BYTE_LEVEL.encode("b")[0])
    with pytest.raises(ValueError, match=r"."):
        allowed(mask)


def test_a_mask_of_another_vocabulary_is_an_error():
    with pytest.raises(ValueError, match=r"."):
        compiled("regex", "a").mask().fill(np.zeros(3, np.uint32))


LOOP = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("regex", "(a|b", "unclosed"),
        ("json_schema", {"type": "foo"}, "foo"),
        ("json_schema", {"type": "object", "not": {}}, "not"),
        ("json_schema", {"$ref": "http://example.com/x"}, "example.com"),
        ("json_schema", {"$ref": "file:///etc/passwd"}, "passwd"),
        ("json_schema", "{", "JSON"),
        ("json_schema", "5", "."),
        ("json_schema", LOOP, "no token"),
        ("grammar", "start", "Expected"),
        ("grammar", "start: missing", "missing"),
        ("regex", "a" * 70_000, "70000 characters, at most 65536"),
        ("regex", "a" * 9_000, "a string of 9000 characters, at most 8192"),
        ("json_schema", {"properties": {"a": {"pattern": "a" * 9_000}}}, "9000 characters"),
        ("json_schema", {"type": "integer", "maximum": 10**4000}, "not JSON serializable"),
    ],
)
def test_a_constraint_that_cannot_be_is_refused_with_its_reason(kind, value, said):
    with pytest.raises(InvalidRequest, match=said) as refused:
        compiled(kind, value)
    assert refused.value.param == "response_format"
    assert len(refused.value.message) < 1000
    assert "<state>" not in refused.value.message


def test_a_compiler_that_panics_shows_no_backtrace(monkeypatch):
    def panic(pattern: str) -> str:
        raise ValueError("panic: index out of bounds\n   0: std::backtrace\n   1: llguidance")

    monkeypatch.setattr("llguidance.LLMatcher.grammar_from_regex", panic)
    with pytest.raises(InvalidRequest) as refused:
        compiled("regex", "a")
    assert refused.value.message == "response_format: panic: index out of bounds"


NESTED = '{"type":"array","items":' * 2500 + "{}" + "}" * 2500
HOSTILE = [
    ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    ("regex", "(.*){1,100}" * 500),
    ("regex", "|".join("a" * i + ".*" + "b" * i for i in range(120))),
    ("regex", "a" * 8_192),
    ("json_schema", NESTED),
    ("json_schema", {"type": "array", "items": {"minLength": 10**6}, "minItems": 10**6}),
    ("json_schema", {"properties": {f"p{i}": {"pattern": f".*{i}.{{20}}$"} for i in range(800)}}),
    ("json_schema", {"enum": ["x" * i for i in range(350)]}),
    ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ("grammar", "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)) + '\na40: "x"\nstart: a0'),
]


@pytest.mark.parametrize(("kind", "value"), HOSTILE)
def test_a_hostile_constraint_is_compiled_or_refused_soon_and_each_token_is_bounded(kind, value):
    longest, step = 20.0, 5.0  # seconds, far above what is seen: this catches a hang
    started = time.monotonic()
    try:
        mask = compiled(kind, value).mask()
    except InvalidRequest:
        assert time.monotonic() - started < longest
        return
    assert time.monotonic() - started < longest
    rng = np.random.default_rng(0)
    for _ in range(20):
        started = time.monotonic()
        try:
            choices = allowed(mask)
            mask.accept(int(rng.choice(choices)))
        except ValueError:
            break
        finally:
            assert time.monotonic() - started < step
        if mask.done:
            break


def test_a_model_without_an_end_token_refuses_constraints():
    endless = Grammars(BYTE_LEVEL, vocab_size=VOCAB, eos_token_ids=())
    with pytest.raises(InvalidRequest, match="no token that ends"):
        compiled("regex", "a", endless)


async def test_a_constraint_that_takes_too_long_is_refused():
    with pytest.raises(InvalidRequest, match="not compiled in 0 s"):
        await grammars(timeout_s=0.0).compile(Constraint("regex", "a"), "structured_outputs")


async def test_compiling_leaves_the_event_loop_free():
    threads: set[int] = set()

    class Watched(Grammars):
        def _compile(self, constraint: Constraint, field: str) -> Grammar:
            threads.add(threading.get_ident())
            return super()._compile(constraint, field)

    source = Watched(BYTE_LEVEL, vocab_size=VOCAB, eos_token_ids=(EOS,))
    await asyncio.gather(*(source.compile(Constraint("regex", "a"), "x") for _ in range(4)))
    assert threading.get_ident() not in threads
    assert threads
