"""The prompts of a request as tokens that fit the model's context, before the engine sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxserve.config import SamplingParams
from jaxserve.errors import InvalidRequest
from jaxserve.serve.protocol import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Conversation,
    Generation,
    TokenizeRequest,
)
from jaxserve.serve.responses import Prompt
from jaxserve.serve.text import Text

MAX_TOKENIZE_CHARACTERS = 2**20


class PromptReader:
    """Makes prompts of requests. All of it is long work: keep it off the event loop.

    ``trust_templates`` lets a request bring its own chat template: code that no sandbox keeps from
    running for ever.
    """

    def __init__(self, text: Text, *, max_model_len: int, trust_templates: bool = False) -> None:
        self._text = text
        self._max_model_len = max_model_len
        self._trust_templates = trust_templates

    def of_completion(self, call: CompletionRequest) -> list[Prompt]:
        """The prompts of /v1/completions, in order. Raises InvalidRequest naming the field."""
        return [self._of_completion(call, prompt) for prompt in call.prompts]

    def of_chat(self, call: ChatRequest) -> Prompt:
        """The prompt of a conversation. Raises InvalidRequest naming the field."""
        kept = self._kept(call)
        rendered = self._rendered(call, call.messages)
        if kept is None:
            self._check_characters(rendered, "messages")
        token_ids = self._encode(rendered, kept, add_special_tokens=False)
        self._check_length(call, token_ids, "messages")
        return Prompt(token_ids)

    def tokens(self, call: TokenizeRequest) -> list[int]:
        """The tokens /tokenize answers with. Raises InvalidRequest naming the field."""
        if call.messages is None:
            field, text = "prompt", call.prompt or ""
        else:
            field, text = "messages", self._rendered(call, call.messages)
        if len(text) > MAX_TOKENIZE_CHARACTERS:
            raise InvalidRequest(
                f"{field}: {len(text)} characters, at most {MAX_TOKENIZE_CHARACTERS}; send it in "
                "parts",
                field,
            )
        adds = call.messages is None and call.add_special_tokens
        return self._text.encode(text, add_special_tokens=adds)

    def spelled(self, params: SamplingParams) -> SamplingParams:
        """The settings with their bad words spelled in tokens."""
        if not params.bad_words:
            return params
        spellings = [ids for word in params.bad_words for ids in self._text.spellings(word)]
        return replace(params, bad_words_token_ids=tuple(dict.fromkeys(spellings)))

    def _of_completion(self, call: CompletionRequest, prompt: str | list[int]) -> Prompt:
        kept = self._kept(call)
        if isinstance(prompt, str):
            if kept is None:
                self._check_characters(prompt, "prompt")
            token_ids = self._encode(prompt, kept, add_special_tokens=True)
        else:
            token_ids = prompt if kept is None else prompt[-kept:]
        self._check_length(call, token_ids, "prompt")
        if not call.echo:
            return Prompt(token_ids)
        # An added bos is no text of the client's.
        added = isinstance(prompt, str) and self._text.adds_bos(prompt)
        return Prompt(token_ids, *self._text.spell(token_ids, skip_first=added))

    def _rendered(self, call: Conversation, messages: Sequence[ChatMessage]) -> str:
        """The text a chat template makes of messages."""
        if call.chat_template is not None and not self._trust_templates:
            raise InvalidRequest(
                "chat_template: the templates of requests are not trusted here "
                "(--trust-request-chat-template)",
                "chat_template",
            )
        return self._text.render_chat(
            [message.for_template() for message in messages],
            add_generation_prompt=call.add_generation_prompt,
            continue_final_message=call.continue_final_message,
            template=call.chat_template,
            variables=call.chat_template_kwargs,
        )

    def _encode(self, prompt: str, kept: int | None, *, add_special_tokens: bool) -> list[int]:
        """The tokens of a text, the last ``kept`` of them; an added bos stays and counts."""
        bos = self._text.bos if add_special_tokens and self._text.adds_bos(prompt) else []
        if kept is not None:
            # More than this holds more tokens than are kept, and its start is far from them.
            prompt = prompt[-(kept + 1) * self._text.vocabulary.longest_token_bytes :]
        token_ids = self._text.encode(prompt, add_special_tokens=False)
        if kept is not None:
            token_ids = token_ids[max(len(token_ids) + len(bos) - kept, 0) :]
        return bos + token_ids

    def _kept(self, call: Generation) -> int | None:
        """How many of a prompt's last tokens are kept; None for all."""
        kept = call.truncate_prompt_tokens
        if kept == -1:
            asked = call.asked_max_tokens()
            return max(self._max_model_len - max(asked[1] if asked else 1, 1), 1)
        if kept is not None and kept > self._max_model_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens={kept} is more than the context of "
                f"{self._max_model_len} tokens (--max-model-len)",
                "truncate_prompt_tokens",
            )
        return kept

    def _check_characters(self, prompt: str, field: str) -> None:
        """Refuses a text that cannot fit, whatever its tokens, without looking for them.

        A token is at most so many bytes, and a character at least one.
        """
        longest = self._max_model_len * self._text.vocabulary.longest_token_bytes
        if len(prompt) > longest:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} characters, no text of more than {longest} fits a "
                f"context of {self._max_model_len} tokens; shorten it or raise --max-model-len",
                field,
                "context_length_exceeded",
            )

    def _check_length(self, call: Generation, token_ids: Sequence[int], field: str) -> None:
        """Refuses a prompt, or the length of an answer asked for, that the context cannot hold.

        Where room for one token is missing, the engine knows whether one is wanted.
        """
        asked = call.asked_max_tokens()
        room = self._max_model_len - len(token_ids)
        if room < 0:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens, the context {self._max_model_len}; "
                "shorten it or raise --max-model-len",
                field,
                "context_length_exceeded",
            )
        if asked is not None and 1 <= room < asked[1]:
            raise InvalidRequest(
                f"{asked[0]}={asked[1]} is too large: the prompt has {len(token_ids)} tokens of a "
                f"context of {self._max_model_len}, which leaves {room}; ask for less, or raise "
                "--max-model-len",
                asked[0],
                "context_length_exceeded",
            )
