"""The tokenizer that a GGUF file's metadata describes, rebuilt for the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from jaxserve.checkpoint.gguf_file import GGUFFile
from jaxserve.checkpoint.tokenizer import SPECIAL_NAMES, TokenizerBundle, library_faults
from jaxserve.checkpoint.values import Values, short
from jaxserve.errors import CheckpointError, UnsupportedModel

SPACE = "▁"
# The patterns are facts of each model's published tokenizer.json.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What llama.cpp applies, one after the other, to a file that names no pre-tokenizer.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

# tokenizer.ggml.pre -> patterns that split the text, one after the other
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # and a bos unless told
_NFC = {"qwen2", "deepseek-r1-qwen"}
_GGUF_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # the format's spelling
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}


def load_gguf_tokenizer(file: GGUFFile) -> TokenizerBundle | None:
    """The tokenizer in ``file``; None when it holds none. Raises UnsupportedModel by name."""
    values = Values(file.metadata, str(file.path))
    kind = values.text("tokenizer.ggml.model")
    if kind is None:
        return None
    builders: dict[str, Callable[[Values], tuple[Tokenizer, bool]]] = {
        "gpt2": _byte_level_bpe,
        "llama": _sentencepiece_bpe,
    }
    if kind not in builders:
        raise UnsupportedModel(
            f"{file.path}: tokenizer.ggml.model={short(kind)} is not supported; supported: "
            f"{', '.join(builders)}"
        )
    with library_faults(f"{file.path}: tokenizer"):
        tokenizer, add_bos = builders[kind](values)
        _mark_added_tokens(tokenizer, values)
    return TokenizerBundle(
        tokenizer=tokenizer,
        chat_template=values.text("tokenizer.chat_template"),
        special_tokens=_special_tokens(values),
        add_bos=values.flag("tokenizer.ggml.add_bos_token", add_bos),
    )


def _byte_level_bpe(values: Values) -> tuple[Tokenizer, bool]:
    """GPT-2's kind; the flag is whether such a file wants a bos when it does not say."""
    pre = values.text("tokenizer.ggml.pre") or "default"
    if pre not in _SPLITS:
        raise UnsupportedModel(
            f"{values.file}: tokenizer.ggml.pre={short(pre)} is not supported; supported: "
            f"{', '.join(_SPLITS)}"
        )
    merges = []
    for merge in _list(values, "merges", str):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    whole = pre in _WHOLE_WORDS_FIRST
    tokenizer = Tokenizer(BPE(_vocabulary(values), merges, ignore_merges=whole))
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in _SPLITS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, whole


def _sentencepiece_bpe(values: Values) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE: pieces with scores, a higher score merges first; bytes as fallback."""
    vocabulary = _vocabulary(values)
    tokens = _list(values, "tokens", str)
    scores = _list(values, "scores", float)
    types = _list(values, "token_type", int)
    ranked: list[tuple[float, str, str]] = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind not in (TokenType.NORMAL, TokenType.USER_DEFINED):
            continue
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        ranked += [(score, a, b) for a, b in halves if a in vocabulary and b in vocabulary]
    ranked.sort(key=lambda merge: -merge[0])  # stable: equal scores keep the vocabulary's order
    unknown = [t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN]
    tokenizer = Tokenizer(
        BPE(
            vocabulary,
            [(a, b) for _, a, b in ranked],
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_mark: list[Any] = [normalizers.Replace(" ", SPACE)]
    to_text: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if values.flag("tokenizer.ggml.add_space_prefix", True):
        to_mark.insert(0, normalizers.Prepend(SPACE))
        to_text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(to_mark)
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer, True


def _list(values: Values, name: str, kind: type) -> list[Any]:
    """The metadata array ``tokenizer.ggml.<name>``, its items checked."""
    key = f"tokenizer.ggml.{name}"
    items = values.raw.get(key)
    if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
        raise CheckpointError(f"{values.file}: {key} must be an array of {kind.__name__}")
    if name in ("scores", "token_type") and len(items) != len(values.raw["tokenizer.ggml.tokens"]):
        raise CheckpointError(
            f"{values.file}: {key} has {len(items)} items, tokenizer.ggml.tokens "
            f"{len(values.raw['tokenizer.ggml.tokens'])}"
        )
    return items


def _vocabulary(values: Values) -> dict[str, int]:
    return {token: i for i, token in enumerate(_list(values, "tokens", str))}


def _mark_added_tokens(tokenizer: Tokenizer, values: Values) -> None:
    """Tokens matched in a text as a whole: control ones are special, user-defined ones are not."""
    tokens = _list(values, "tokens", str)
    types = _list(values, "token_type", int)
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _special_tokens(values: Values) -> dict[str, str]:
    tokens = _list(values, "tokens", str)
    special = {}
    for name in SPECIAL_NAMES:
        for i in values.ids(f"tokenizer.ggml.{_GGUF_NAMES[name]}_token_id"):
            if i >= len(tokens):
                raise CheckpointError(
                    f"{values.file}: {name} has id {i}, the vocabulary {len(tokens)} tokens"
                )
            special[name] = tokens[i]
    return special
