"""Write tokenizers.json: token ids of llama.cpp for small vocabularies under every pre-tokenizer.

Never needed to run the tests. In a virtual environment of its own:

    pip install cyllama tokenizers gguf safetensors
    python tests/golden/tokenizer_oracle.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

The file holds ``texts``; ``byte_level`` and ``sentencepiece``, two vocabularies trained here on the
texts without any splitting, so that tokens span words, digits and spaces and a wrong split shows;
and ``ids``, for each case the ids of every text as llama.cpp encodes it, without a bos. Cases are
the values of tokenizer.ggml.pre over ``byte_level``; ``sentencepiece`` and
``sentencepiece_no_prefix``; and ``smollm2``, the real model. Models that normalise to NFC are given
NFC text, which llama.cpp leaves to its caller. Its tekken takes combining marks for no letters,
unlike the model's own tokenizer: those texts hold for nothing there.
"""

from __future__ import annotations

import json
import sys
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

from cyllama.llama import llama_cpp
from gguf_fixture import write_gguf
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from weights import HERE, draw_tensors

PRES = ("default", "gpt-2", "smollm", "llama-bpe", "qwen2", "tekken")
NFC = ("qwen2",)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = (
    "",
    " ",
    "Hello, world!",
    "  two  spaces   three ",
    "In 1969,  2 astronauts; 12345678 x 1,000.50 = $9",
    "I don't, they've, we'LL, IT'S, you're 'round",
    "tabs\t\tand\r\nlines\n\n\n  indented\n",
    "def f(x):\n    return x ** 2  # square\n",
    "CamelCaseWords HTTPServer iPhone McDonald",
    "https://example.com/a/b?c=d&e=%20#frag",
    "naïve café, Ünïcödé, Straße, ſ's",
    "cafe\u0301 A\u030a decomposed",
    "Быстрая лиса 2024 года",
    "你好,世界!今天是2024年。",
    "こんにちは 世界 カタカナ",
    "한국어 텍스트 안녕하세요",
    "مرحبا بالعالم ٣٤٥",
    "हिन्दी पाठ १२३",
    "🙂👩‍👩‍👧‍👦🇫🇷 emoji",
    "² ½ Ⅷ ① numbers",
    "\u00a0nbsp\u2003em space\u200bzero",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|tool|>x<|tool|> <s>y</s>",
    "+++===<<>>~~^^||!!??...---___",
    "a" * 40 + " " * 20 + "\n" * 8,
    "\x00\x07 control \x7f",
)
# llama.cpp takes any token spelt </s> for an end mark, so none is learned.
CORPUS = [
    *(t for t in TEXTS if "</s>" not in t),
    " ".join(f"{n} {n * 37}" for n in range(150)),
    "the cat and the dog " * 20,
] * 3


def byte_level_vocabulary() -> dict[str, Any]:
    """Byte-level tokens whose merges cross every boundary that a pre-tokenizer might set."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = BpeTrainer(
        vocab_size=900,
        max_token_length=6,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * (len(tokens) - 4)
    return {
        "model": "gpt2",
        "tokens": tokens,
        "types": types,
        "merges": [" ".join(merge) for merge in model["merges"]],
    }


def sentencepiece_vocabulary() -> dict[str, Any]:
    """Pieces with scores and byte tokens, as a Llama 2 file has them."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = BpeTrainer(
        vocab_size=500, max_token_length=6, limit_alphabet=120, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    special = ["<unk>", "<s>", "</s>"]
    merged = [p for p in pieces if len(p) > 1 and p not in special and "\0" not in p]
    single = [p for p in pieces if len(p) == 1 and p != "\0"]
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    ordinary = merged + single
    return {
        "model": "llama",
        "tokens": special + byte_tokens + ordinary,
        "types": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(ordinary),
        "scores": [0.0] * 259 + [-float(i) for i in range(len(ordinary))],
    }


def llama_cpp_ids(path: Path, texts: list[str]) -> list[list[int]]:
    """Ids of each text, special tokens recognised, none added."""
    model = llama_cpp.LlamaModel(str(path), llama_cpp.LlamaModelParams())
    vocabulary = model.get_vocab()
    return [list(vocabulary.tokenize(text, False, True)) if text else [] for text in texts]


def tiny_model(path: Path, vocabulary: dict[str, Any]) -> Path:
    """The smallest model llama.cpp loads around a vocabulary."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary["tokens"]),
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    return write_gguf(path, config, draw_tensors(config), vocabulary=vocabulary)


def main(argv: list[str]) -> None:
    """See the top."""
    (smollm2,) = argv
    llama_cpp.disable_logging()
    llama_cpp.ggml_backend_load_all()
    byte_level, sentencepiece = byte_level_vocabulary(), sentencepiece_vocabulary()
    cases = {pre: {**byte_level, "pre": pre} for pre in PRES}
    cases["sentencepiece"] = sentencepiece
    cases["sentencepiece_no_prefix"] = {**sentencepiece, "add_space_prefix": False}
    ids = {"smollm2": llama_cpp_ids(Path(smollm2), list(TEXTS))}
    with tempfile.TemporaryDirectory() as tmp:
        for name, vocabulary in cases.items():
            texts = [unicodedata.normalize("NFC", t) if name in NFC else t for t in TEXTS]
            ids[name] = llama_cpp_ids(tiny_model(Path(tmp) / f"{name}.gguf", vocabulary), texts)
    golden = {
        "texts": TEXTS,
        "byte_level": byte_level,
        "sentencepiece": sentencepiece,
        "ids": ids,
    }
    text = json.dumps(golden, ensure_ascii=True, separators=(",", ":"))
    (HERE / "tokenizers.json").write_text(text.replace('],"', '],\n"') + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
