"""Text in and out of one model: its tokenizer, its chat template and its detokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from jaxserve.config import SamplingParams
from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.serve.detokenize import Detokenizer, Vocabulary


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as chat templates expect it: jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def compile_template(source: str, now: Callable[[], datetime] = datetime.now) -> jinja2.Template:
    """The template under the settings `transformers` renders chat templates with, sandboxed.

    Raises CheckpointError with the line that does not parse.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from error


class Text:
    """One model's text: immutable after construction, shared by all requests and threads.

    ``special_tokens`` are names a chat template may use, such as ``bos_token``. ``add_bos`` puts
    ``bos_token_id`` before a plain prompt that does not start with it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
        bos_token_id: int | None = None,
        add_bos: bool = False,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if add_bos and bos_token_id is None:
            raise CheckpointError("the tokenizer wants a bos token and names none")
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer)
        self._bos = [bos_token_id] if add_bos and bos_token_id is not None else []
        self._special_tokens = dict(special_tokens or {})
        self._template = compile_template(chat_template, now) if chat_template else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Raises InvalidRequest for text that is no valid Unicode."""
        try:
            # A batch of one: only that form lets other threads run meanwhile.
            ids = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
        except TypeError:  # a str with a lone surrogate has no UTF-8 form
            raise InvalidRequest("the text holds a lone surrogate (\\ud800-\\udfff)") from None
        return ids if not add_special_tokens or ids[:1] == self._bos else self._bos + ids

    def has_token(self, token_id: int) -> bool:
        """True when the id stands for a token."""
        return 0 <= token_id < 2**32 and self._tokenizer.id_to_token(token_id) is not None

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The whole text of the ids. Ids without a token add nothing."""
        detokenizer = Detokenizer(self._vocabulary, skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def render_chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt text of a conversation. Raises InvalidRequest when it cannot be made."""
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions, or start the server with "
                "--chat-template",
                "messages",
            )
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        # The template is the checkpoint's code on the client's data: whatever it raises means that
        # this conversation does not fit it.
        except Exception as error:
            raise InvalidRequest(
                f"the chat template refused the messages: {error}", "messages"
            ) from error

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation; the template itself writes the special tokens."""
        prompt = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(prompt, add_special_tokens=False)

    def detokenizer(self, prompt_ids: Iterable[int], params: SamplingParams) -> Detokenizer:
        """A detokenizer for the tokens that follow ``prompt_ids``."""
        skipped = self._vocabulary.special_ids if params.skip_special_tokens else frozenset[int]()
        return Detokenizer(
            self._vocabulary,
            continues=any(token_id not in skipped for token_id in prompt_ids),
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
