"""The requests of the OpenAI API that are served, as checked records."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from jaxserve.config import MAX_LOGPROBS, SamplingParams
from jaxserve.errors import InvalidRequest
from jaxserve.serve.forms import ResponseFormat, StructuredOutputs
from jaxserve.serve.records import Record
from jaxserve.serve.responses import AnswerOptions
from jaxserve.serve.structured import Constraint

_NO_TOOLS = ([],)


class StreamOptions(Record):
    """What a stream carries besides the text: its usage at the end, or so far in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _counts_are_of_a_usage(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise InvalidRequest(
                "stream_options.continuous_usage_stats: only with include_usage=true",
                "stream_options",
            )
        return self


class Generation(Record):
    """Fields of both generation routes; SamplingParams checks the ranges of its own."""

    ignored = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key"})
    neutral: ClassVar = {
        "audio": (),
        "function_call": ("none",),
        "functions": _NO_TOOLS,
        "length_penalty": (1.0,),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "reasoning_effort": (),
        "service_tier": ("auto", "default"),
        "spaces_between_special_tokens": (True,),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        "tools": _NO_TOOLS,
        "use_beam_search": (False,),
        "verbosity": (),
        "web_search_options": (),
    }
    replaced: ClassVar = {
        "guided_json": 'structured_outputs {"json": ...}',
        "guided_regex": 'structured_outputs {"regex": ...}',
        "guided_choice": 'structured_outputs {"choice": ...}',
        "guided_grammar": 'structured_outputs {"grammar": ...}',
    }

    model: str | None = None
    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = Field(default={})
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = Field(default=[])
    stop: str | list[str] = Field(default=[])
    stop_token_ids: list[int] = Field(default=[])
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = False
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    priority: int = 0
    request_id: str | None = Field(None, min_length=1, max_length=256)
    cache_salt: str | None = Field(None, min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only with stream=true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs: only without stream=true", "prompt_logprobs")
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequest(
                f"best_of={self.best_of} is not n={self.n}: every choice drawn is returned",
                "best_of",
            )
        if self.priority != 0:
            raise InvalidRequest(
                f"priority={self.priority}: requests run in order of arrival, send 0", "priority"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens=0, must be at least 1, or -1 for the context",
                "truncate_prompt_tokens",
            )
        if not (self.request_id or "").isprintable():
            raise InvalidRequest("request_id holds unprintable characters", "request_id")
        if len(self._constraints()) > 1:
            raise InvalidRequest(
                "structured_outputs and response_format both constrain the answer; send one",
                "structured_outputs",
            )
        return self

    def constraint(self) -> tuple[str, Constraint] | None:
        """The field that says what every answer must match, and that; None for any text."""
        return next(iter(self._constraints().items()), None)

    def _constraints(self) -> dict[str, Constraint]:
        forms = {
            "response_format": self.response_format,
            "structured_outputs": self.structured_outputs,
        }
        asked = {field: form.constraint() for field, form in forms.items() if form is not None}
        return {field: constraint for field, constraint in asked.items() if constraint is not None}

    def asked_max_tokens(self) -> tuple[str, int] | None:
        """The field that bounds an answer and its value, where the client sent one."""
        return None if self.max_tokens is None else ("max_tokens", self.max_tokens)

    def _sampling_params(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        return SamplingParams(
            n=self.n,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=min(self.top_k, 2**31 - 1),  # the device's int32; more keeps all tokens as well
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((_token_id(k), bias) for k, bias in self.logit_bias.items()),
            allowed_token_ids=(
                None if self.allowed_token_ids is None else tuple(self.allowed_token_ids)
            ),
            bad_words=tuple(self.bad_words),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _answer_options(self, logprobs: int | None, echo: bool) -> AnswerOptions:
        options = self.stream_options
        return AnswerOptions(
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            return_token_ids=self.return_token_ids,
            echo=echo,
        )


def _token_id(key: str) -> int:
    if not re.fullmatch("[0-9]{1,10}", key):
        raise InvalidRequest(f"logit_bias: {key[:100]!r} is no token id", "logit_bias")
    return int(key)


class CompletionRequest(Generation):
    """Body of /v1/completions. ``prompt``: a text, token ids, or a list of either."""

    neutral: ClassVar = {**Generation.neutral, "add_special_tokens": (True,)}

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, ``n`` choices each."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return list(self.prompt)  # pyright: ignore[reportReturnType]

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequest naming the field; 16 tokens unless asked, as OpenAI does."""
        prompt_logprobs = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return self._sampling_params(
            16 if self.max_tokens is None else self.max_tokens,
            self.logprobs,
            max((top for top in prompt_logprobs if top is not None), default=None),
        )

    def answer_options(self) -> AnswerOptions:
        """What the answer shows besides the text."""
        return self._answer_options(self.logprobs, self.echo)

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


class TextPart(Record):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Record):
    """One message of a conversation; text only, as ``type`` may say (lm-eval sends it)."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    type: Literal["text"] = "text"

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: text parts are lines of one string."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        message = {"role": self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class Conversation(Record):
    """The fields that a chat template turns into a prompt, beside the messages."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={})

    @model_validator(mode="after")
    def _one_way_to_go_on(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message goes on with the last message: send it with "
                "add_generation_prompt=false",
                "continue_final_message",
            )
        return self


class ChatRequest(Generation, Conversation):
    """Body of /v1/chat/completions."""

    neutral: ClassVar = {**Generation.neutral, "add_special_tokens": (False,), "echo": (False,)}

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _top_logprobs_are_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: only with logprobs=true", "top_logprobs")
        return self

    def asked_max_tokens(self) -> tuple[str, int] | None:
        """The field that bounds an answer and its value, where the client sent one."""
        asked = self.max_completion_tokens
        return super().asked_max_tokens() if asked is None else ("max_completion_tokens", asked)

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequest naming the field; to the end of the context unless asked."""
        asked = self.asked_max_tokens()
        if asked is not None and asked[1] < 1:
            raise InvalidRequest(f"{asked[0]}={asked[1]}, must be at least 1", asked[0])
        max_tokens = None if asked is None else asked[1]
        return self._sampling_params(max_tokens, self._shown_logprobs, self.prompt_logprobs)

    def answer_options(self) -> AnswerOptions:
        """What the answer shows besides the text."""
        return self._answer_options(self._shown_logprobs, echo=False)

    @property
    def _shown_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Conversation):
    """Body of /tokenize: a prompt, or the messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Record):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[int] = Field(max_length=2**18)
