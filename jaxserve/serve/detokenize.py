"""Token ids to text, one token at a time, at a cost per token that does not grow with the text."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from jaxserve.errors import UnsupportedModel

SUPPORTED_DECODERS = "ByteLevel, Metaspace, or Replace + ByteFallback + Fuse + Strip"


def _byte_level_alphabet() -> dict[str, int]:
    """Character to byte of byte-level BPE (GPT-2's table).

    Printable bytes of Latin-1 stand for themselves, the rest for U+0100 and up, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    table = {chr(byte): byte for byte in printable}
    table.update((chr(0x100 + n), byte) for n, byte in enumerate(others))
    return table


_BYTE_OF_CHAR = _byte_level_alphabet()
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class DecoderRules:
    """A tokenizer's decoder, as bytes a token adds and what is dropped at the start of a text.

    ``token_bytes`` maps a token's string to bytes. ``first_token_bytes`` does so for the first
    token of a text. Up to ``strip_count`` leading ``strip`` are removed from the whole text.
    """

    token_bytes: Callable[[str], bytes]
    first_token_bytes: Callable[[str], bytes]
    strip: bytes = b""
    strip_count: int = 0


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:  # an added token with characters outside the alphabet stands for itself
        return token.encode()


def _replacing(
    replacements: Sequence[tuple[str, str]], byte_fallback: bool
) -> Callable[[str], bytes]:
    def token_bytes(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        if byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.encode()

    return token_bytes


def decoder_rules(decoder: dict[str, Any] | None) -> DecoderRules:
    """The rules of the ``decoder`` section of a tokenizer.json.

    Raises UnsupportedModel naming a decoder whose text cannot be built token by token here.
    """
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderRules(_byte_level_bytes, _byte_level_bytes)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        rest = _replacing([(mark, " ")], byte_fallback=False)
        keeps_first = steps[0].get("prepend_scheme", "always") == "never"
        return DecoderRules(rest, rest if keeps_first else _replacing([(mark, "")], False))
    replacements: list[tuple[str, str]] = []
    while kinds[:1] == ["Replace"] and "String" in steps[0]["pattern"]:
        replacements.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        steps, kinds = steps[1:], kinds[1:]
    byte_fallback = kinds[:1] == ["ByteFallback"]
    if byte_fallback:
        steps, kinds = steps[1:], kinds[1:]
    token_bytes = _replacing(replacements, byte_fallback)
    if kinds == ["Fuse"]:
        return DecoderRules(token_bytes, token_bytes)
    if kinds == ["Fuse", "Strip"] and steps[1]["stop"] == 0:
        strip = steps[1]
        return DecoderRules(token_bytes, token_bytes, strip["content"].encode(), strip["start"])
    named = "none" if decoder is None else json.dumps(decoder)[:200]
    raise UnsupportedModel(f"tokenizer decoder {named}: supported are {SUPPORTED_DECODERS}")


class Vocabulary:
    """The bytes of every token id, worked out when first asked for; shared by all requests.

    No token stands for more than ``longest_token_bytes`` bytes of text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        self.rules = decoder_rules(None if decoder is None else json.loads(decoder.__getstate__()))
        self.special_ids = frozenset(
            token_id
            for token_id, added in tokenizer.get_added_tokens_decoder().items()
            if added.special
        )
        self.longest_token_bytes = max(
            (len(token.encode()) for token in tokenizer.get_vocab()), default=0
        )
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes | None:
        """Bytes the token adds to a text it does not begin; None for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:  # not kept: foreign ids must not fill the memory
                return None
            known = self._bytes[token_id] = self.rules.token_bytes(token)
        return known

    def first_bytes_of(self, token_id: int) -> bytes | None:
        """Bytes the token adds as the first of a text, before leading characters are stripped."""
        token = self._tokenizer.id_to_token(token_id)
        return None if token is None else self.rules.first_token_bytes(token)


class StopStrings:
    """Finds the stop string that is complete first, and holds back what one may still claim.

    The result depends on the text alone, never on how it was cut into pieces: of the strings that
    end earliest, the longest counts. One that ends in a piece which may not stop is plain text.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """Text released by ``piece``; after a match, nothing more is ever released."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        if may_stop and (found := self._ends(text, len(self._held))):
            end, negative_length, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else end + negative_length]
        keep = min(self._longest - 1, len(text))
        while keep and not self._may_start_with(text[-keep:]):
            keep -= 1
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _ends(self, text: str, after: int) -> list[tuple[int, int, str]]:
        """Where the stop strings first end beyond ``after``, each with its negative length."""
        starts = ((text.find(stop, max(after - len(stop) + 1, 0)), stop) for stop in self._stops)
        return [(start + len(stop), -len(stop), stop) for start, stop in starts if start >= 0]

    def _may_start_with(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stops)

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held


class Detokenizer:
    """The text one request's tokens add to its prompt, handed out as soon as it is certain.

    The pieces joined are the text ``tokenizer.decode`` gives for the same tokens. A character
    whose bytes are spread over tokens appears when its last byte does; bytes that are no UTF-8
    become U+FFFD one invalid sequence at a time, also at the end of the output.

    ``continues`` says that the text does not start here, so no leading space is dropped.
    No stop string ends within the first ``min_tokens`` tokens. ``num_characters`` counts what the
    tokens so far decode to, held back or not: it is the offset of the next token in the text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        continues: bool = False,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset[int]()
        self._first = not continues
        self._to_strip = 0 if continues else vocabulary.rules.strip_count
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(stop, include_stop_str_in_output)
        self._num_unstoppable = min_tokens
        self.num_characters = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """Text that became certain with this token, often none."""
        self._num_unstoppable -= 1
        if token_id in self._skipped:
            return ""
        vocabulary = self._vocabulary
        data = (vocabulary.first_bytes_of if self._first else vocabulary.bytes_of)(token_id)
        if data is None:
            return ""
        self._first = False
        if self._to_strip:
            data = self._strip(data)
        text = self._utf8.decode(data)
        self.num_characters += len(text)
        return self._stops.push(text, may_stop=self._may_stop)

    def flush(self) -> str:
        """The rest, when the last token has been pushed."""
        rest = self._utf8.decode(b"", final=True)
        return self._stops.push(rest, may_stop=self._may_stop) + self._stops.flush()

    @property
    def _may_stop(self) -> bool:
        """True from the first token after ``min_tokens`` on."""
        return self._num_unstoppable < 0

    def _strip(self, data: bytes) -> bytes:
        strip = self._vocabulary.rules.strip
        while self._to_strip and data.startswith(strip):
            data = data[len(strip) :]
            self._to_strip -= 1
        if data:
            self._to_strip = 0
        return data
