"""Incremental text equals the tokenizer's own, never early, never late, never twice."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from jaxserve.errors import UnsupportedModel
from jaxserve.serve.detokenize import Detokenizer, StopStrings, Vocabulary
from tests.serve_fakes import byte_level_tokenizer, metaspace_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
BYTE_LEVEL_VOCABULARY = Vocabulary(BYTE_LEVEL)
SENTENCEPIECE = sentencepiece_tokenizer()
SENTENCEPIECE_VOCABULARY = Vocabulary(SENTENCEPIECE)

byte_level_ids = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=40)
sentencepiece_ids = st.lists(st.integers(0, SENTENCEPIECE.get_vocab_size() + 3), max_size=40)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def pieces_of(vocabulary: Vocabulary, ids: list[int], **options) -> list[str]:
    detokenizer = Detokenizer(vocabulary, **options)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(ids=byte_level_ids, skip=st.booleans())
@settings(max_examples=300)
def test_byte_level_pieces_join_to_the_decoded_text_for_any_ids(ids, skip):
    expected = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces_of(BYTE_LEVEL_VOCABULARY, ids, skip_special_tokens=skip)) == expected


@given(text=texts)
@settings(max_examples=200)
def test_a_round_trip_shows_no_replacement_character_on_the_way(text):
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(BYTE_LEVEL_VOCABULARY, ids, skip_special_tokens=False)
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@given(text=texts)
@settings(max_examples=200)
def test_every_character_appears_with_the_token_that_completes_it(text):
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    shown = ""
    detokenizer = Detokenizer(BYTE_LEVEL_VOCABULARY, skip_special_tokens=False)
    for count, token_id in enumerate(ids, start=1):
        shown += detokenizer.push(token_id)
        so_far = BYTE_LEVEL.decode(ids[:count], skip_special_tokens=False)
        complete = so_far.rstrip("\ufffd") if "\ufffd" not in text else shown
        assert shown == complete


@given(ids=byte_level_ids, stop=st.lists(st.text("abo ", min_size=1, max_size=3), max_size=2))
@settings(max_examples=100)
def test_a_tokens_offset_counts_the_characters_before_it_held_back_or_not(ids, stop):
    stopped = Detokenizer(BYTE_LEVEL_VOCABULARY, stop=stop)
    free = Detokenizer(BYTE_LEVEL_VOCABULARY)
    shown = 0
    for token_id in ids:
        assert stopped.num_characters == free.num_characters == shown
        shown += len(free.push(token_id))
        stopped.push(token_id)


def test_a_character_cut_off_at_the_end_is_one_replacement_character():
    ids = BYTE_LEVEL.encode("fox 🦊", add_special_tokens=False).ids
    pieces = pieces_of(BYTE_LEVEL_VOCABULARY, ids[:-1])
    assert "\ufffd" not in "".join(pieces[:-1])
    assert pieces[-1] == "\ufffd"


def sentencepiece_oracle(ids: list[int], skip: bool) -> str:
    """The decoder written over the whole sequence: pieces to bytes, one lossy UTF-8 decode."""
    special = {0, 1, 2}
    data = b""
    for token_id in ids:
        token = SENTENCEPIECE.id_to_token(token_id)
        if token is None or (skip and token_id in special):
            continue
        if 3 <= token_id < 259:
            data += bytes([token_id - 3])
        else:
            data += token.replace("▁", " ").encode()
    return data.removeprefix(b" ").decode("utf-8", "replace")


@given(ids=sentencepiece_ids, skip=st.booleans())
@settings(max_examples=300)
def test_byte_fallback_pieces_join_to_a_lossy_decode_of_the_whole(ids, skip):
    joined = "".join(pieces_of(SENTENCEPIECE_VOCABULARY, ids, skip_special_tokens=skip))
    assert joined == sentencepiece_oracle(ids, skip)


@given(text=texts)
@settings(max_examples=200)
def test_byte_fallback_text_that_is_valid_equals_the_tokenizers_decode(text):
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(SENTENCEPIECE_VOCABULARY, ids, skip_special_tokens=False)
    assert "".join(pieces) == SENTENCEPIECE.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("strips", [True, False])
def test_an_output_that_continues_a_prompt_keeps_its_leading_space(strips):
    tokenizer = sentencepiece_tokenizer(strips_leading_space=strips)
    prompt, output = tokenizer.encode("the").ids, [tokenizer.token_to_id("▁fox")]
    added = tokenizer.decode(prompt + output)[len(tokenizer.decode(prompt)) :]
    pieces = pieces_of(Vocabulary(tokenizer), output, continues=True)
    assert "".join(pieces) == added == " fox"


def test_a_text_that_starts_here_drops_one_leading_space_across_tokens():
    ids = [SENTENCEPIECE.token_to_id(piece) for piece in ("<s>", "▁", "▁fox")]
    assert "".join(pieces_of(SENTENCEPIECE_VOCABULARY, ids)) == " fox"


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@given(ids=st.lists(st.integers(0, 8), max_size=12), skip=st.booleans())
@settings(max_examples=60)
def test_metaspace_pieces_join_to_the_decoded_text(scheme, ids, skip):
    tokenizer = metaspace_tokenizer(scheme)
    joined = "".join(pieces_of(Vocabulary(tokenizer), ids, skip_special_tokens=skip))
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (None, "none"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Strip"),
    ],
)
def test_a_decoder_that_cannot_be_followed_token_by_token_is_refused_by_name(decoder, named):
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(UnsupportedModel, match=named):
        Vocabulary(tokenizer)


def stop_oracle(
    text: str, stops: list[str], include: bool, free: int = 0
) -> tuple[str, str | None]:
    """Reads the text a character at a time and stops at the first, longest, complete match that
    ends behind the first ``free`` characters.
    """
    for end in range(free + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    text=st.text("ab\u00e9 ", max_size=30),
    stops=st.lists(st.text("ab\u00e9 ", min_size=1, max_size=4), max_size=4),
    include=st.booleans(),
    data=st.data(),
)
@settings(max_examples=500)
def test_the_stop_string_found_does_not_depend_on_how_the_text_was_cut(text, stops, include, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    free = data.draw(st.sampled_from(bounds))
    finder = StopStrings(stops, include)
    shown = ""
    for start, end in itertools.pairwise(bounds):
        shown += finder.push(text[start:end], may_stop=end > free)
        # What is held back can still be the beginning of a stop string.
        held = text[len(shown) : end]
        assert finder.matched or any(stop.startswith(held) for stop in stops) or not held
    shown += finder.flush()
    assert (shown, finder.matched) == stop_oracle(text, stops, include, free)


@given(
    ids=byte_level_ids, stop=st.sampled_from(["a", "o", "th", "e "]), min_tokens=st.integers(0, 9)
)
@settings(max_examples=200)
def test_no_stop_string_ends_within_the_tokens_that_are_asked_for_at_least(ids, stop, min_tokens):
    counts = Detokenizer(BYTE_LEVEL_VOCABULARY)
    for token_id in ids[:min_tokens]:
        counts.push(token_id)
    text = BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    # Bytes that are no whole character yet belong to the token that completes it.
    expected, _ = stop_oracle(text, [stop], False, counts.num_characters)
    options = {"stop": [stop], "min_tokens": min_tokens}
    assert "".join(pieces_of(BYTE_LEVEL_VOCABULARY, ids, **options)) == expected


def test_a_stop_string_over_token_boundaries_is_never_partly_shown():
    ids = BYTE_LEVEL.encode("the quick brown fox", add_special_tokens=False).ids
    assert len(ids) > 5
    pieces = pieces_of(BYTE_LEVEL_VOCABULARY, ids, stop=["k bro"])
    assert "".join(pieces) == "the quic"


def test_a_stop_string_that_never_completes_is_released_at_the_end():
    ids = BYTE_LEVEL.encode("the quick b", add_special_tokens=False).ids
    pieces = pieces_of(BYTE_LEVEL_VOCABULARY, ids, stop=["k brown"])
    assert "".join(pieces) == "the quick b"
    assert pieces[-1] == "k b"


def test_a_stop_string_may_hold_a_replacement_character_of_the_tail():
    ids = BYTE_LEVEL.encode("fox 🦊", add_special_tokens=False).ids[:-1]
    assert "".join(pieces_of(BYTE_LEVEL_VOCABULARY, ids, stop=["\ufffd"])) == "fox "


def test_the_cost_of_a_token_does_not_grow_with_the_text():
    """Even for bytes that never become valid, which make a re-decoding stream quadratic."""
    broken = BYTE_LEVEL_VOCABULARY
    invalid_byte = BYTE_LEVEL.token_to_id("Ģ")
    assert broken.bytes_of(invalid_byte) == b"\x80"

    def seconds(count: int) -> float:
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            assert len("".join(pieces_of(broken, [invalid_byte] * count, stop=["zz"]))) == count
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(40_000) < 40 * seconds(4_000)
