"""A model's tokenizer, with what the files around it say about special tokens and chat."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from jaxserve.checkpoint.values import Values, load_json, short
from jaxserve.errors import CheckpointError

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
# Some faults show only with a text, and this has what few vocabularies know.
_ANY_TEXT = "a 0\t\0é你\U0010ffff"
# The names transformers gives to a chat template.
SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, kw_only=True)
class TokenizerBundle:
    """Encode with ``add_special_tokens=False``, and put ``bos_token_id`` first if ``add_bos``.

    ``special_tokens`` are the strings by SPECIAL_NAMES. The ids of all special tokens are those of
    the tokenizer's added tokens marked special.
    """

    tokenizer: Tokenizer
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool = False

    @property
    def bos_token_id(self) -> int | None:
        """Id of ``bos_token``, None when there is none."""
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of ``eos_token``, None when there is none."""
        return self._id("eos_token")

    def _id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.tokenizer.token_to_id(token)


def load_hf_tokenizer(directory: Path) -> TokenizerBundle | None:
    """The tokenizer of a Hugging Face directory; None when it holds none.

    Raises CheckpointError when a file is broken, or when only a SentencePiece model is there.
    """
    path = directory / TOKENIZER
    if not path.is_file():
        if (directory / "tokenizer.model").is_file():
            raise CheckpointError(
                f"{directory}: tokenizer.model without {TOKENIZER}; save the tokenizer once with "
                "transformers (it writes one), or pass --tokenizer"
            )
        return None
    with library_faults(path):
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config_path = directory / TOKENIZER_CONFIG
    config = load_json(config_path) if config_path.is_file() else {}
    values = Values(config, str(config_path))
    special_tokens = _special_tokens(values)
    bos_id = tokenizer.token_to_id(special_tokens.get("bos_token", ""))
    with library_faults(path):
        added = tokenizer.encode("").ids  # what the post-processor puts around a text
        tokenizer.encode(_ANY_TEXT)
    return TokenizerBundle(
        tokenizer=tokenizer,
        chat_template=_chat_template(directory, values),
        special_tokens=special_tokens,
        add_bos=values.flag("add_bos_token", bos_id is not None and added[:1] == [bos_id]),
    )


@contextlib.contextmanager
def library_faults(where: Path | str) -> Iterator[None]:
    """Whatever the library raises as a CheckpointError: bare Exceptions, and its panics no less."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, CheckpointError):
        raise
    except BaseException as error:
        said = str(error).partition("\n")[0]
        raise CheckpointError(f"{where}: {said or type(error).__name__}") from error


def _special_tokens(values: Values) -> dict[str, str]:
    """Each is a string or an object with the string as its content."""
    tokens = {}
    for name in SPECIAL_NAMES:
        value: Any = values.raw.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise CheckpointError(f"{values.file}: {name}={short(value)}, must be a string")
        tokens[name] = value
    return tokens


def _chat_template(directory: Path, values: Values) -> str | None:
    """The template: a file of its own goes before the config's string or list of named ones."""
    path = directory / CHAT_TEMPLATE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: {error}") from error
    template = values.raw.get("chat_template")
    if isinstance(template, list):
        named = (t for t in template if isinstance(t, dict) and t.get("name") == "default")
        template = next((t.get("template") for t in named), None)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{values.file}: chat_template={short(template)}, must be a string")
    return template
