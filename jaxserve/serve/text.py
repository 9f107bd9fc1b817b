"""Text in and out of one model: its tokenizer, its chat template and its detokenizers."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, Self

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from jaxserve.checkpoint.tokenizer import TokenizerBundle
from jaxserve.config import SamplingParams
from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.serve.detokenize import Detokenizer, Vocabulary


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as chat templates expect it: jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@jinja2.pass_context  # what is said to need the context is not worked out when compiled
def _as_it_is(context: jinja2.runtime.Context, value: Any) -> Any:
    return value


# Names a template gets from the server itself.
_RESERVED = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tools", "documents"}
)


def compile_template(source: str, now: Callable[[], datetime] = datetime.now) -> jinja2.Template:
    """The template under the settings `transformers` renders chat templates with, sandboxed.

    Nothing of it runs before it is rendered. Raises CheckpointError with the line that does not
    parse.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols],
        optimized=False,  # else a constant of gigabytes is made here
        finalize=_as_it_is,
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from error
    except RecursionError:
        raise CheckpointError("chat template: nested too deeply") from None


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
        self.vocabulary = Vocabulary(tokenizer)
        self.bos = [bos_token_id] if add_bos and bos_token_id is not None else []
        self._special_tokens = dict(special_tokens or {})
        self._now = now
        self._template = compile_template(chat_template, now) if chat_template else None

    @classmethod
    def of(cls, bundle: TokenizerBundle, *, chat_template: str | None = None) -> Self:
        """The text of a checkpoint's tokenizer; ``chat_template`` replaces its own."""
        return cls(
            bundle.tokenizer,
            chat_template=chat_template or bundle.chat_template,
            special_tokens=dict(bundle.special_tokens),
            bos_token_id=bundle.bos_token_id,
            add_bos=bundle.add_bos,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Raises InvalidRequest for text that is no valid Unicode."""
        try:
            # A batch of one: only that form lets other threads run meanwhile.
            ids = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
        except TypeError:  # a str with a lone surrogate has no UTF-8 form
            raise InvalidRequest("the text holds a lone surrogate (\\ud800-\\udfff)") from None
        return self.bos + ids if add_special_tokens and self._wants_bos(ids) else ids

    def adds_bos(self, text: str) -> bool:
        """True when ``encode`` puts a bos before the tokens of ``text``."""
        if not self.bos:
            return False
        bos = self._tokenizer.id_to_token(self.bos[0]) or ""
        # What begins a text with the token of its bos begins with its name.
        return self._wants_bos(self.encode(text[: 2 * len(bos)], add_special_tokens=False))

    def _wants_bos(self, ids: list[int]) -> bool:
        return ids[:1] != self.bos

    def has_token(self, token_id: int) -> bool:
        """True when the id stands for a token."""
        return 0 <= token_id < 2**32 and self._tokenizer.id_to_token(token_id) is not None

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The whole text of the ids. Ids without a token add nothing."""
        detokenizer = Detokenizer(self.vocabulary, skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def spell(self, token_ids: Sequence[int], *, skip_first: bool = False) -> tuple[str, list[int]]:
        """The text of a prompt's tokens and the offset of each in it, special tokens shown.

        ``skip_first``: the first token has no text.
        """
        detokenizer = Detokenizer(self.vocabulary, skip_special_tokens=False)
        offsets = [0] if skip_first else []
        pieces: list[str] = []
        for token_id in token_ids[len(offsets) :]:
            offsets.append(detokenizer.num_characters)
            pieces.append(detokenizer.push(token_id))
        return "".join(pieces) + detokenizer.flush(), offsets

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """The tokens of a word, as it begins a text and as it follows one."""
        written = (word.lstrip(" "), " " + word.lstrip(" "))
        spelled = [tuple(self.encode(text, add_special_tokens=False)) for text in written]
        return [ids for ids in spelled if ids]

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. Raises InvalidRequest when it cannot be made.

        ``continue_final_message`` ends it inside the last message, right after what that says.
        ``template`` replaces the model's; ``variables`` are more names it may read.
        """
        compiled = self._template if template is None else self._compiled(template)
        if compiled is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions, or start the server with "
                "--chat-template",
                "messages",
            )
        variables = variables or {}
        if taken := sorted(variables.keys() & (_RESERVED | self._special_tokens.keys())):
            raise InvalidRequest(
                f"chat_template_kwargs: {taken[0]} is the server's to set", "chat_template_kwargs"
            )
        mark = secrets.token_hex(16) if continue_final_message else ""
        if mark:
            last = messages[-1] if messages else {}
            if not isinstance(last.get("content"), str):
                raise InvalidRequest(
                    "continue_final_message: the last message has no text to go on with", "messages"
                )
            messages = [*messages[:-1], {**last, "content": last["content"] + mark}]
        try:
            rendered = compiled.render(
                {
                    **variables,
                    **self._special_tokens,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": None,
                    "documents": None,
                }
            )
        # The template is the checkpoint's code on the client's data: whatever it raises means that
        # this conversation does not fit it.
        except Exception as error:
            raise InvalidRequest(
                f"the chat template refused the messages: {error}", "messages"
            ) from error
        if mark not in rendered:
            raise InvalidRequest(
                "continue_final_message: the chat template does not show the last message",
                "continue_final_message",
            )
        return rendered[: rendered.rindex(mark)] if mark else rendered

    def _compiled(self, template: str) -> jinja2.Template:
        try:
            return compile_template(template, self._now)
        except CheckpointError as error:
            raise InvalidRequest(str(error), "chat_template") from None

    def detokenizer(self, prompt_ids: Iterable[int], params: SamplingParams) -> Detokenizer:
        """A detokenizer for the tokens that follow ``prompt_ids``."""
        skipped = self.vocabulary.special_ids if params.skip_special_tokens else frozenset[int]()
        return Detokenizer(
            self.vocabulary,
            continues=any(token_id not in skipped for token_id in prompt_ids),
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
