"""Prompts and chat templates become token ids, or a refusal that says why."""

from __future__ import annotations

import tracemalloc
from datetime import datetime

import pytest

from jaxserve.config import SamplingParams
from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.serve.text import Text, compile_template
from tests.serve_fakes import CHAT_TEMPLATE, byte_level_tokenizer, sentencepiece_tokenizer

TOKENIZER = byte_level_tokenizer()
HELLO = [{"role": "user", "content": "hello"}]


def text_with(template: str | None, **options) -> Text:
    return Text(TOKENIZER, chat_template=template, **options)


def test_a_plain_prompt_gets_one_bos_when_the_tokenizer_wants_it():
    text = Text(sentencepiece_tokenizer(), bos_token_id=1, add_bos=True)
    ids = text.encode("the fox")
    assert ids[0] == 1
    assert 1 not in ids[1:]
    assert text.encode("the fox", add_special_tokens=False) == ids[1:]


def test_a_prompt_that_spells_its_bos_gets_no_second_one():
    text = Text(sentencepiece_tokenizer(), bos_token_id=1, add_bos=True)
    assert text.encode("<s>the").count(1) == 1


def test_a_wanted_bos_without_an_id_does_not_boot():
    with pytest.raises(CheckpointError, match="bos"):
        Text(TOKENIZER, add_bos=True)


def test_a_lone_surrogate_is_refused():
    with pytest.raises(InvalidRequest, match="surrogate"):
        text_with(None).encode("a\ud800")


def test_a_conversation_is_rendered_by_the_template_and_its_marks_become_single_tokens():
    text = text_with(CHAT_TEMPLATE)
    prompt = text.render_chat(HELLO)
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert text.render_chat(HELLO, add_generation_prompt=False) == prompt.removesuffix(
        "<|im_start|>assistant\n"
    )
    ids = text.encode(prompt, add_special_tokens=False)
    assert ids.count(TOKENIZER.token_to_id("<|im_start|>")) == 2
    assert text.decode(ids) == prompt


def test_template_blocks_leave_no_blank_lines():
    template = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n"
    assert text_with(template + "{% endfor %}").render_chat(HELLO) == "hello\n"


def test_a_template_may_use_loop_controls_json_the_date_and_special_tokens():
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}"
        "{{ strftime_now('%Y') }}"
    )
    text = text_with(
        template, special_tokens={"bos_token": "<b>"}, now=lambda: datetime(2021, 5, 4)
    )
    rendered = text.render_chat([{"role": "user", "content": "<é>"}, *HELLO])
    assert rendered == '<b>{"role": "user", "content": "<é>"}2021'


def test_a_model_without_a_template_refuses_conversations_and_says_what_to_do():
    with pytest.raises(InvalidRequest, match="--chat-template") as refused:
        text_with(None).render_chat(HELLO)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "refused the messages"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refused the messages"),
        ("{{ messages.append(1) }}", "refused the messages"),
        ("{% for i in range(999999999) %}{% endfor %}", "refused the messages"),
    ],
)
def test_what_a_template_raises_is_the_conversations_fault(template, said):
    with pytest.raises(InvalidRequest, match=said):
        text_with(template).render_chat(HELLO)


CONVERSATION = [*HELLO, {"role": "assistant", "content": "Sure: {"}]


@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE, CHAT_TEMPLATE.replace("message['content']", "message.content|trim")]
)
@pytest.mark.parametrize("said", ["Sure: {", " two  ", "hello", "user", ""])
def test_a_final_message_is_continued_right_after_what_it_says(template, said):
    messages = [*HELLO, {"role": "assistant", "content": said}]
    rendered = text_with(template).render_chat(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    shown = said.lstrip() if "trim" in template else said
    assert rendered == f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n{shown}"
    assert messages[-1]["content"] == said


def test_a_template_that_hides_the_final_message_cannot_continue_it():
    with pytest.raises(InvalidRequest, match="does not show the last message") as refused:
        text_with("{{ messages[0].content }}").render_chat(
            CONVERSATION, continue_final_message=True
        )
    assert refused.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "assistant"}],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "content": [{"type": "text", "text": "Sure"}]}],
    ],
)
def test_a_conversation_that_ends_without_text_cannot_be_continued(messages):
    with pytest.raises(InvalidRequest, match="no text to go on with") as refused:
        text_with(CHAT_TEMPLATE).render_chat(messages, continue_final_message=True)
    assert refused.value.param == "messages"


def test_a_template_may_read_variables_but_none_of_the_servers_own():
    text = text_with("{{ mode }}{{ bos_token }}", special_tokens={"bos_token": "<b>"})
    assert text.render_chat(HELLO, variables={"mode": "x"}) == "x<b>"
    for name in ("messages", "tools", "bos_token", "add_generation_prompt"):
        with pytest.raises(InvalidRequest, match=name) as refused:
            text.render_chat(HELLO, variables={name: "x"})
        assert refused.value.param == "chat_template_kwargs"


def test_another_template_may_replace_the_models_and_must_parse():
    text = text_with(None)
    assert text.render_chat(HELLO, template="{{ messages[0].content }}!") == "hello!"
    with pytest.raises(InvalidRequest, match="line 1") as refused:
        text.render_chat(HELLO, template="{% if %}")
    assert refused.value.param == "chat_template"


def test_a_template_that_does_not_parse_does_not_boot():
    with pytest.raises(CheckpointError, match="line 2"):
        text_with("a\n{% if %}")


def test_decode_gives_back_the_text_and_keeps_special_tokens_unless_asked():
    text = text_with(None)
    ids = text.encode("<|im_start|>grüße 😀")
    assert text.decode(ids) == "<|im_start|>grüße 😀"
    assert text.decode(ids, skip_special_tokens=True) == "grüße 😀"


def test_has_token_tells_ids_of_the_vocabulary_from_others():
    text = text_with(None)
    assert text.has_token(0)
    for token_id in (-1, TOKENIZER.get_vocab_size(), 2**32, 10**30):
        assert not text.has_token(token_id)


def test_a_prompt_of_skipped_tokens_alone_does_not_keep_the_leading_space():
    tokenizer = sentencepiece_tokenizer()
    text, fox = Text(tokenizer), tokenizer.token_to_id("▁fox")
    bos_only, after_text = ([1], "fox"), ([1, tokenizer.token_to_id("a")], " fox")
    for prompt, shown in (bos_only, after_text):
        assert text.detokenizer(prompt, SamplingParams()).push(fox) == shown
    keeps = SamplingParams(skip_special_tokens=False)
    assert text.detokenizer([1], keeps).push(fox) == " fox"


def test_a_stop_string_waits_for_the_least_number_of_tokens():
    text = text_with(None)
    ids = text.encode("xx-x-x")
    shown = {}
    for min_tokens in (0, 3, 6):
        params = SamplingParams(stop=("-",), min_tokens=min_tokens)
        detokenizer = text.detokenizer([5], params)
        shown[min_tokens] = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert len(ids) == 6
    assert shown == {0: "xx", 3: "xx-x", 6: "xx-x-x"}


@pytest.mark.parametrize(
    "source", ["{{ 'x' * 10**8 }}", "{% if 'x'|center(100000000) %}{% endif %}"]
)
def test_a_template_makes_nothing_before_it_is_rendered(source):
    tracemalloc.start()
    try:
        compile_template(source)
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()


def test_a_template_nested_too_deeply_is_one_error():
    with pytest.raises(CheckpointError, match="nested too deeply"):
        compile_template("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
