"""Stand-ins of the server's tests: small tokenizers and a scripted engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jaxserve.config import SamplingParams
from jaxserve.errors import InvalidRequest
from jaxserve.sched.outputs import EngineStats, FinishReason, RequestTimings, RequestUpdate

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again and again",
    "grüße aus köln, 你好世界你好世界, 😀😃😄 emoji, naïve façade",
    "one two three four five six seven eight nine ten 1234567890",
]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE of about 320 tokens whose merges split multi-byte characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("an added token", special=False)])
    return tokenizer


def sentencepiece_tokenizer(*, strips_leading_space: bool = True) -> Tokenizer:
    """A BPE with byte fallback, spelled and decoded as Llama-2's converted tokenizer.json is."""
    words = ["▁", "▁the", "▁fox", "fox", "a", "b", "c", "é", "▁▁", "你", "."]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: token_id for token_id, piece in enumerate(pieces)},
            merges=[("▁", "▁")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips_leading_space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace_tokenizer(prepend_scheme: str) -> Tokenizer:
    """A vocabulary of a few ▁-marked pieces under the Metaspace decoder."""
    pieces = ["▁", "▁the", "▁fox", "fox", "a▁b", "▁▁", "</s>"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: token_id for token_id, piece in enumerate(pieces)}, merges=[])
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer
