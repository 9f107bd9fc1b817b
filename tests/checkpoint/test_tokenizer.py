"""Tokenizers from tokenizer.json and from GGUF metadata; ids are judged by llama.cpp's."""

import contextlib
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from jaxserve.checkpoint.gguf_file import GGUFFile
from jaxserve.checkpoint.gguf_tokenizer import load_gguf_tokenizer
from jaxserve.checkpoint.tokenizer import TokenizerBundle, load_hf_tokenizer
from jaxserve.errors import BootError, CheckpointError, InvalidRequest, UnsupportedModel
from jaxserve.serve.text import Text
from tests.demo_model import demo_path
from tests.golden.gguf_fixture import write_gguf
from tests.golden.weights import HERE, family_config
from tests.mutations import mutated

GOLDEN: dict[str, Any] = json.loads((HERE / "tokenizers.json").read_text())
TEXTS: list[str] = GOLDEN["texts"]
CASES = [case for case in GOLDEN["ids"] if case != "smollm2"]
CONTROL, USER_DEFINED = 3, 4


def vocabulary_of(case: str) -> dict[str, Any]:
    if case.startswith("sentencepiece"):
        plain = GOLDEN["sentencepiece"]
        return plain | {"add_space_prefix": False} if case.endswith("no_prefix") else plain
    return GOLDEN["byte_level"] | {"pre": case}


def bundle_of(path: Path, vocabulary: dict[str, Any], **metadata: Any) -> TokenizerBundle:
    config = family_config("llama_tied")
    entries = {f"tokenizer.{key}": value for key, value in metadata.items()}
    write_gguf(path, config, {}, vocabulary=vocabulary, metadata=entries)
    bundle = load_gguf_tokenizer(GGUFFile(path))
    assert bundle is not None
    return bundle


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> dict[str, TokenizerBundle]:
    directory = tmp_path_factory.mktemp("vocabularies")
    return {case: bundle_of(directory / f"{case}.gguf", vocabulary_of(case)) for case in CASES}


@pytest.fixture(scope="module")
def smollm2() -> TokenizerBundle:
    bundle = load_gguf_tokenizer(GGUFFile(demo_path()))
    assert bundle is not None
    return bundle


def encode(bundle: TokenizerBundle, text: str) -> list[int]:
    return bundle.tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("case", CASES)
def test_ids_are_those_of_llama_cpp(bundles, case):
    for text, ids in zip(TEXTS, GOLDEN["ids"][case], strict=True):
        if case == "tekken" and any(unicodedata.category(c)[0] == "M" for c in text):
            continue  # llama.cpp's pattern leaves out the marks that the model's own one has
        assert encode(bundles[case], text) == ids, text


def test_the_pre_tokenizers_are_told_apart_by_these_texts():
    ids = [GOLDEN["ids"][case] for case in CASES]
    assert all(a != b for i, a in enumerate(ids) for b in ids[:i])


@pytest.mark.parametrize("case", CASES)
def test_every_text_comes_back(bundles, case):
    for text in TEXTS:
        if "</s>" in text and case == "sentencepiece":
            continue  # its space before a piece also follows a special token
        wanted = unicodedata.normalize("NFC", text) if case == "qwen2" else text
        got = bundles[case].tokenizer.decode(encode(bundles[case], text), skip_special_tokens=False)
        assert got == wanted


@given(text=st.text(max_size=60))
def test_any_text_comes_back_from_bytes(bundles, text):
    for case in ("llama-bpe", "smollm", "default", "sentencepiece_no_prefix"):
        bundle = bundles[case]
        assert bundle.tokenizer.decode(encode(bundle, text), skip_special_tokens=False) == text


def test_control_tokens_are_special_and_user_defined_ones_are_not(bundles):
    added = bundles["gpt-2"].tokenizer.get_added_tokens_decoder()
    assert {i: token.special for i, token in added.items()} == {
        0: True,
        1: True,
        2: True,
        3: False,
    }
    ids = encode(bundles["gpt-2"], "<|tool|>x<|im_end|>")
    assert ids[0] == 3
    assert ids[-1] == 2
    assert bundles["gpt-2"].tokenizer.decode(ids) == "<|tool|>x"


@pytest.mark.parametrize(
    ("case", "metadata", "add_bos"),
    [
        ("smollm", {}, False),
        ("qwen2", {}, False),
        ("llama-bpe", {}, True),
        ("tekken", {}, True),
        ("sentencepiece", {}, True),
        ("llama-bpe", {"ggml.add_bos_token": False}, False),
        ("smollm", {"ggml.add_bos_token": True}, True),
    ],
)
def test_a_bos_is_wanted_as_the_file_says_or_as_its_kind_has_it(tmp_path, case, metadata, add_bos):
    bundle = bundle_of(tmp_path / "m.gguf", vocabulary_of(case), **metadata)
    assert bundle.add_bos == add_bos
    assert bundle.bos_token_id == 1
    assert bundle.eos_token_id == 2
    assert bundle.special_tokens["eos_token"] == vocabulary_of(case)["tokens"][2]


def test_a_gguf_chat_template_is_kept(tmp_path):
    bundle = bundle_of(tmp_path / "m.gguf", vocabulary_of("gpt-2"), chat_template="{{ x }}")
    assert bundle.chat_template == "{{ x }}"


def test_an_unknown_pre_tokenizer_is_refused_with_the_list(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"ggml\.pre='newest' .*smollm.*tekken"):
        bundle_of(tmp_path / "m.gguf", GOLDEN["byte_level"] | {"pre": "newest"})


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("gpt-2", {"merges": ["a b c d"]}, "tokenizer: "),
        ("gpt-2", {"merges": ["no"]}, "tokenizer: "),
        ("gpt-2", {"merges": [1, 2]}, "merges must be an array of str"),
        ("gpt-2", {"types": [1, 2]}, "token_type has 2 items, tokenizer.ggml.tokens 900"),
        ("sentencepiece", {"scores": [0.0]}, "scores has 1 items"),
        (
            "sentencepiece",
            {"tokens": ["a", "b"], "types": [1, 1], "scores": [0.0, 0.0]},
            "eos_token has id 2.* 2 tokens",
        ),
    ],
)
def test_a_broken_vocabulary_is_one_line(tmp_path, case, change, message):
    with pytest.raises(CheckpointError, match=message) as error:
        bundle_of(tmp_path / "m.gguf", vocabulary_of(case) | change)
    assert "\n" not in str(error.value)


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", family_config("llama_tied"), {})
    assert load_gguf_tokenizer(GGUFFile(path)) is None


@pytest.mark.demo
def test_smollm2_gives_the_ids_of_llama_cpp_and_of_transformers(smollm2):
    for text, ids in zip(TEXTS, GOLDEN["ids"]["smollm2"], strict=True):
        assert encode(smollm2, text) == ids, text
    for case in json.loads((HERE / "smollm2.json").read_text(encoding="utf-8")):
        assert encode(smollm2, case["text"]) == case["prompt_token_ids"]


# Its vocabulary lacks a few control characters and the bytes F1 and F2, which begin unassigned
# planes; every tokenizer of the model drops those.
KNOWN_TO_SMOLLM2 = st.characters(
    max_codepoint=0x3FFFF, exclude_categories=("Cc", "Cs"), include_characters="\n\t\r\0"
)


@pytest.mark.demo
@given(text=st.text(KNOWN_TO_SMOLLM2, max_size=60))
def test_smollm2_brings_any_text_back_and_splits_every_digit(smollm2, text):
    text += " 1234"
    ids = encode(smollm2, text)
    assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [smollm2.tokenizer.id_to_token(i) for i in ids[-4:]] == ["1", "2", "3", "4"]


@pytest.mark.demo
def test_smollm2_has_its_special_tokens_and_chat_template(smollm2):
    assert encode(smollm2, "<|im_start|>user") == [1, *encode(smollm2, "user")]
    assert encode(smollm2, "<|im_end|>") == [2]
    assert not smollm2.add_bos
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert "<|im_start|>" in smollm2.chat_template


# Hugging Face directories


def save_tokenizer(directory: Path, *, bos: bool = False) -> Tokenizer:
    """A byte-level tokenizer of two special tokens and 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def write_config(directory: Path, **values: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(values))


def load(directory: Path) -> TokenizerBundle:
    bundle = load_hf_tokenizer(directory)
    assert bundle is not None
    return bundle


def test_truncation_and_padding_of_a_saved_tokenizer_are_dropped(tmp_path):
    save_tokenizer(tmp_path)
    assert len(encode(load(tmp_path), "abcdefgh")) == 8


@pytest.mark.parametrize(
    ("in_template", "said", "add_bos"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"add_bos_token": False}, False),
        (False, {"add_bos_token": True}, True),
    ],
)
def test_a_bos_is_wanted_as_the_config_says_or_as_the_tokenizer_does(
    tmp_path, in_template, said, add_bos
):
    save_tokenizer(tmp_path, bos=in_template)
    write_config(tmp_path, bos_token="<s>", **said)
    assert load(tmp_path).add_bos == add_bos


def test_special_tokens_are_read_as_strings_or_objects(tmp_path):
    save_tokenizer(tmp_path)
    write_config(tmp_path, bos_token="<s>", eos_token={"content": "</s>"}, pad_token=None)
    bundle = load(tmp_path)
    assert bundle.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (bundle.bos_token_id, bundle.eos_token_id) == (0, 1)


def test_the_chat_template_is_found_in_both_its_places_and_the_file_wins(tmp_path):
    save_tokenizer(tmp_path)
    assert load(tmp_path).chat_template is None
    write_config(tmp_path, chat_template="config")
    assert load(tmp_path).chat_template == "config"
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    write_config(tmp_path, chat_template=named)
    assert load(tmp_path).chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("file é\n", encoding="utf-8")
    assert load(tmp_path).chat_template == "file é\n"


def test_a_directory_without_a_tokenizer_has_none(tmp_path):
    assert load_hf_tokenizer(tmp_path) is None


def test_a_sentencepiece_model_alone_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model without tokenizer\.json"):
        load_hf_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_file_is_one_line(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: ") as error:
        load_hf_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chat_template": 3}, "chat_template=3"),
        ({"bos_token": 1}, "bos_token=1"),
        ({"add_bos_token": "yes"}, "add_bos_token='yes'"),
    ],
)
def test_a_wrong_value_in_the_tokenizer_config_is_named(tmp_path, config, message):
    save_tokenizer(tmp_path)
    write_config(tmp_path, **config)
    with pytest.raises(CheckpointError, match=message):
        load_hf_tokenizer(tmp_path)


# Hostile files: one clear error or a tokenizer that works, and nothing else.

PARTS: dict[str, Any] = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "NFC"},
            {"type": "Prepend", "prepend": "_"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "_"},
            {"type": "Strip", "strip_left": True, "strip_right": False},
        ],
    },
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": "[0-9]"},
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        ],
    },
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 16},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    },
}
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
TOKENIZER_CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True},
    "add_bos_token": True,
    "chat_template": [{"name": "default", "template": TEMPLATE}],
    "model_max_length": 10**30,
}


@pytest.fixture(scope="module")
def document(tmp_path_factory) -> dict[str, Any]:
    """A tokenizer.json that has every part, each in its richest form."""
    directory = tmp_path_factory.mktemp("whole")
    save_tokenizer(directory, bos=True)
    whole = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = dict(list(whole["model"]["vocab"].items())[:12]) | {"ab": 12}
    whole["model"] |= {"vocab": vocabulary, "merges": [["a", "b"]], "unk_token": "<s>"}
    whole["model"]["vocab"] |= {"a": 13, "b": 14}
    return whole | PARTS


def loaded_or_refused(directory: Path) -> str:
    """The refusal of a boot; empty: it takes the tokenizer, and a text goes through it."""
    try:
        text = Text.of(load(directory))
    except BootError as error:
        return str(error)
    text.decode(text.encode("ab 12 é"))
    with contextlib.suppress(InvalidRequest):  # what a template does costs its request alone
        text.render_chat([{"role": "user", "content": "x"}])
    return ""


def test_the_tokenizer_that_is_changed_below_works(tmp_path, document):
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    write_config(tmp_path, **TOKENIZER_CONFIG)
    bundle = load(tmp_path)
    assert (bundle.add_bos, bundle.chat_template) == (True, TEMPLATE)
    assert encode(bundle, "ab")[-1:] == [12]


@given(data=st.data())
@settings(max_examples=150)
def test_any_one_change_of_a_tokenizer_file_is_refused_or_harmless(
    tmp_path_factory, document, data
):
    directory = tmp_path_factory.mktemp("fuzz")
    changed = data.draw(mutated(document))
    (directory / "tokenizer.json").write_text(json.dumps(changed))
    assert "\n" not in loaded_or_refused(directory)


@given(config=mutated(TOKENIZER_CONFIG), at=st.integers(0, 5000), byte=st.integers(0, 255))
@settings(max_examples=60)
def test_any_one_change_of_what_lies_beside_a_tokenizer_is_refused_or_harmless(
    tmp_path_factory, config, at, byte
):
    directory = tmp_path_factory.mktemp("fuzz")
    save_tokenizer(directory)
    write_config(directory, **config)
    template = bytearray(TEMPLATE.encode())
    template[at % len(template)] = byte
    assert "\n" not in loaded_or_refused(directory)
    (directory / "chat_template.jinja").write_bytes(template)
    assert "\n" not in loaded_or_refused(directory)
    whole = bytearray((directory / "tokenizer.json").read_bytes())
    whole[at % len(whole)] = byte
    (directory / "tokenizer.json").write_bytes(whole)
    assert "\n" not in loaded_or_refused(directory)
