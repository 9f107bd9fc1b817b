"""The requests of the OpenAI API that are served, from bytes to checked records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from jaxserve.config import SamplingParams
from jaxserve.errors import InvalidRequest

Prompt = str | list[int]

# Fields that cannot change the output.
_IGNORED = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})

# Known fields that are not implemented, with the values under which they change nothing. null is
# neutral for every field.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "verbosity": (),
    "web_search_options": (),
}


class _Record(BaseModel):
    """Types are exact (an int is a float, nothing else is converted), other names are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Record):
    """What a stream carries besides the text."""

    include_usage: bool = False


class _Generation(_Record):
    """Fields of both generation routes; SamplingParams checks their ranges."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _stream_options_belong_to_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only with stream=true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """True when a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling_params(self, max_tokens: int | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=min(self.top_k, 2**31 - 1),  # the device's int32; more keeps all tokens as well
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
        )


class CompletionRequest(_Generation):
    """Body of /v1/completions. ``prompt``: a text, token ids, or a list of either."""

    prompt: str | list[str] | list[int] | list[list[int]]

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, one choice each."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return list(self.prompt)  # pyright: ignore[reportReturnType]

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequest naming the field; 16 tokens unless asked, as OpenAI does."""
        return self._sampling_params(16 if self.max_tokens is None else self.max_tokens)

    @field_validator("prompt", mode="plain")
    @classmethod
    def _one_kind_of_prompt(cls, value: Any) -> Any:
        def is_ids(item: Any) -> bool:
            return isinstance(item, list) and all(type(token_id) is int for token_id in item)

        if isinstance(value, str) or is_ids(value):
            return value
        if isinstance(value, list) and (
            all(isinstance(item, str) for item in value) or all(map(is_ids, value))
        ):
            return value
        raise ValueError(
            "must be a string, a list of strings, a list of token ids or a list of lists of "
            "token ids"
        )


class TextPart(_Record):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Record):
    """One message of a conversation; text only."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: text parts are lines of one string."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        message = {"role": self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(_Generation):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequest naming the field; to the end of the context unless asked."""
        asked = self.max_completion_tokens
        if asked is not None and asked < 1:
            raise InvalidRequest(
                f"max_completion_tokens={asked}, must be at least 1", "max_completion_tokens"
            )
        return self._sampling_params(self.max_tokens if asked is None else asked)


class TokenizeRequest(_Record):
    """Body of /tokenize: a prompt, or the messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(_Record):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[int]


RecordT = TypeVar("RecordT", bound=_Record)


def parse_request(kind: type[RecordT], body: bytes) -> RecordT:
    """The record in a request's body. Raises InvalidRequest that says what is wrong, and where.

    null stands for an absent field. A field that is known and not implemented passes with a value
    that changes nothing and is refused by name otherwise, and so is an unknown one.
    """
    fields = _parse_object(body)
    known: dict[str, Any] = {}
    for name, value in fields.items():
        if name in kind.model_fields:
            if value is not None:
                known[name] = value
        elif not issubclass(kind, _Generation) or name not in _IGNORED | _NEUTRAL.keys():
            raise InvalidRequest(f"unknown field {name[:100]!r}", name[:100], "unknown_field")
        elif name in _NEUTRAL and not (value is None or _is_one_of(value, _NEUTRAL[name])):
            _refuse_unimplemented(name, value)
    if isinstance(known.get("messages"), list):
        known["messages"] = [_without_nulls(message) for message in known["messages"]]
    if isinstance(known.get("stream_options"), dict):
        known["stream_options"] = _without_nulls(known["stream_options"])
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise _invalid(error) from None


def _parse_object(body: bytes) -> dict[str, Any]:
    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=refuse_constant)
        if b"\\u" in body:  # an escape may be a lone surrogate: valid JSON, and no text
            json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start}") from None
    except UnicodeEncodeError:
        raise InvalidRequest("the body holds a lone surrogate (\\ud800-\\udfff)") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return fields


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if item is not None}


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    # False == 0 and True == 1 in Python, not in JSON.
    return any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
    )


def _refuse_unimplemented(name: str, value: Any) -> NoReturn:
    neutral = " or ".join(json.dumps(item) for item in (*_NEUTRAL[name], None))
    shown = f"a {type(value).__name__}" if isinstance(value, dict | list) else json.dumps(value)
    raise InvalidRequest(
        f"{name} is not supported here: leave it out or send {neutral}, not {shown[:100]}",
        name,
        "unsupported_field",
    )


# How pydantic labels the members of a union inside an error's path.
_UNION_LABELS = frozenset({"str", "list[str]", "list[TextPart]"})


def _invalid(error: ValidationError) -> InvalidRequest:
    """The most specific fault, with its path as a client would write it."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    fault = max(faults, key=lambda fault: len(fault["loc"]))
    path = ""
    for step in fault["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in _UNION_LABELS:
            path += f".{step}" if path else step
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "missing":
        message = "is required"
    elif fault["type"] == "extra_forbidden":
        message = "is not supported here"
    return InvalidRequest(f"{path[:200]}: {message}", str(fault["loc"][0]))
