"""Chat templates render as transformers renders them, and say where contents stand."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chat_templates
from chatkv.errors import ModelError
from chatkv.model.template import CHATML, ChatTemplate, Difference, Message

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
DAY = datetime(2024, 9, 17, 12, 0)


def _template(name: str) -> ChatTemplate:
    source = chat_templates.ALL[name]
    return ChatTemplate(source, SPECIAL, chat_templates.CONTROL, now=lambda: DAY)


def _chat(*contents: str, system: str | None = None) -> list[Message]:
    """user, assistant, user, ... with these contents."""
    messages: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    roles = ("user", "assistant")
    return messages + [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]


CHATS: list[list[Message]] = [
    _chat("Hi"),
    _chat("Hi", "Hello!", "How are you?"),
    _chat("Hi", "Hello!", "How are you?", "Fine.", "Good", system="You are kind."),
    _chat("  spaces \n", "\n\nreply\n ", "\t\ttabs\t", system="  system  "),
    _chat("{{ 7 * 7 }} {% raise %}", "<|im_end|>", "a </s> b [INST] c"),
    _chat("", "", "emoji 😀 and 漢字"),
    _chat("q", "<think>\nhm\n</think>\n\nanswer", "next"),
    _chat("q", "<think>\nhm\n</think>\n\nanswer"),
    _chat("<tool_response>1</tool_response>", "ok", "more"),
]


@pytest.fixture(scope="module")
def hf_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    import tiny

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **SPECIAL)


@pytest.mark.parametrize("name", chat_templates.ALL)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers(
    name: str, add_generation_prompt: bool, hf_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.utils.chat_template_utils as theirs

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return DAY

    monkeypatch.setattr(theirs, "datetime", Clock)
    theirs._compile_jinja_template.cache_clear()
    template = _template(name)
    for chat in CHATS:
        expected = hf_tokenizer.apply_chat_template(
            chat,
            chat_template=chat_templates.ALL[name],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        assert template.render(chat, add_generation_prompt).text == expected


@pytest.mark.parametrize("name", chat_templates.ALL)
def test_spans_are_the_words_of_the_messages(name: str) -> None:
    chat = _chat(" Hi there ", "Hello <|im_end|>!", "a\n\nb", system="Be kind.")
    rendered = _template(name).render(chat)
    found = [rendered.text[start:end] for start, end in rendered.content_spans]
    assert found == ["Be kind.", "Hi there", "Hello <|im_end|>!", "a\n\nb"]


def test_spans_where_a_template_looks_into_contents() -> None:
    """Marks hide `<think>` from the template, so only control texts can be found, and are."""
    chat = _chat(
        "q <|im_end|>", "<think>\nhm\n</think>\n\nanswer <|im_start|>", "next <|im_end|> x"
    )
    rendered = _template("qwen3").render(chat)
    found = [rendered.text[start:end] for start, end in rendered.content_spans]
    assert found == ["<|im_end|>", "<|im_start|>", "<|im_end|>"]
    assert "hm" not in rendered.text


def test_no_spans_can_be_found_and_none_are_needed() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content | length }} {% endfor %}")
    assert template.render(_chat("Hi", "Hello")).content_spans == ()


def test_contents_that_cannot_be_told_apart_are_refused() -> None:
    source = "{% for m in messages %}{{ m.content.replace('_', '') }}{% endfor %}"
    template = ChatTemplate(source, control_texts=["<|im_end|>"])
    assert template.render(_chat("a_b")).text == "ab"
    with pytest.raises(ModelError, match="cannot be told"):
        template.render(_chat("a <|im_end|>"))


TEXT = st.lists(
    st.sampled_from(
        ["a", "Bc", " ", "\n", "<|im_end|>", "</s>", "[INST]", "😀", "\ue000", "{{", "é"]
    )
).map("".join)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(TEXT, min_size=1, max_size=5), st.sampled_from(sorted(chat_templates.ALL)))
def test_text_outside_spans_does_not_depend_on_contents(contents: list[str], name: str) -> None:
    """The template's own text around any contents is its text around other ones of that shape."""
    template = _template(name)
    rendered = template.render(_chat(*contents))
    plain = template.render(_chat(*["x" if text.strip() else "" for text in contents]))
    assert _outside(rendered) == _outside(plain)


def _outside(rendered: Any) -> str:
    """The text without the contents, and without the white space around them."""
    pieces, end = [], 0
    for start, stop in rendered.content_spans:
        pieces.append(rendered.text[end:start])
        end = stop
    return "".join("".join([*pieces, rendered.text[end:]]).split())


# -- appending to a log -----------------------------------------------------------------------


@pytest.mark.parametrize("name", chat_templates.ALL)
def test_turn_by_turn_equals_all_at_once(name: str) -> None:
    """prompt + reply + continuation + reply + ... is the rendering of the whole conversation."""
    template = _template(name)
    chat = _chat("Hi", "Hello!", "How are <|im_end|> you?", "Fine.", "Good", system="Be kind.")
    log = template.render(chat[:2]).text
    for end in range(4, len(chat) + 1, 2):
        reply = str(chat[end - 2]["content"])
        log += " " + reply if name == "mistral" else reply
        added = template.continuation(chat[:end])
        log += added.text
        words = [added.text[start:stop] for start, stop in added.content_spans]
        assert words == [chat[end - 1]["content"]]
    assert log == template.render(chat).text
    assert template.matches_log(chat, log, add_generation_prompt=True) is None


def test_continuation_of_each_family() -> None:
    chat = _chat("Hi", "Hello!", "How?")
    expected = {
        "chatml": "<|im_end|>\n<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n",
        "llama3": "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHow?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "mistral": "</s> [INST] How? [/INST]",
        "qwen3": "<|im_end|>\n<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n",
        "plain": "\n\n### User:\nHow?\n\n### Assistant:\n",
    }
    for name, text in expected.items():
        assert _template(name).continuation(chat).text == text, name


def test_continuation_does_not_mind_rewritten_history() -> None:
    template = _template("qwen3")
    thinking = "<think>\nhm\n</think>\n\nHello!"
    chat = _chat("Hi", thinking, "How?")
    log = template.render(chat[:1]).text + thinking
    assert template.continuation(chat).text.startswith("<|im_end|>\n<|im_start|>user\nHow?")
    assert template.matches_log(chat[:2], log) is None

    log += template.continuation(chat).text
    difference = template.matches_log(chat, log, add_generation_prompt=True)
    start = len("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert difference is not None and difference.position == start
    assert difference.logged.startswith("<think>\nhm")
    assert difference.rendered.startswith("Hello!")
    assert "<think>" in str(difference)


def test_difference_positions() -> None:
    template = _template("chatml")
    text = template.render(_chat("Hi", "Hello"), add_generation_prompt=False).text
    assert template.matches_log(_chat("Hi", "Hello"), text) is None
    assert template.matches_log(_chat("Hi", "Hello"), "") is None
    longer = template.matches_log(_chat("Hi", "Hello"), text + "more")
    assert longer == Difference(len(text), "more", "")
    other = template.matches_log(_chat("Hi", "Hello"), text.replace("Hi", "Ho"))
    assert other is not None and text[other.position] == "i"


def test_a_conversation_that_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[-1].content }}")
    with pytest.raises(ModelError, match="leaves out earlier replies"):
        template.continuation(_chat("Hi", "Hello", "How?"))
    with pytest.raises(ModelError, match="needs a reply"):
        template.continuation(_chat("Hi"))


def test_continuation_after_private_use_characters() -> None:
    """The marks used to find the place are none of the text's own."""
    contents = ["\uf8ff", "".join(map(chr, range(0xF000, 0xF900))), "\uf8fe\uf8ff"]
    text = _template("chatml").continuation(_chat(*contents)).text
    assert text.startswith("<|im_end|>\n<|im_start|>user\n\uf8fe\uf8ff<|im_end|>")


# -- sources and failures ---------------------------------------------------------------------


def test_no_template_means_chatml_and_says_so() -> None:
    template = ChatTemplate(None)
    assert template.notice == "the model has no chat template: ChatML is used"
    assert template.render(_chat("Hi")).text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate(CHATML).notice is None


def test_the_date_is_the_one_given() -> None:
    assert "Today Date: 17 Sep 2024" in _template("llama3").render(_chat("Hi")).text


def test_parts_of_contents() -> None:
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two </s>"}]
    rendered = ChatTemplate(source, SPECIAL, ["</s>"]).render([{"role": "user", "content": parts}])
    assert rendered.text == "[one][two </s>]"
    assert [rendered.text[a:b] for a, b in rendered.content_spans] == ["one", "two </s>"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "Expected an expression"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0].content.nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{% include 'other' %}", "no loader"),
        ("{{ x | no_such_filter }}", "no_such_filter"),
        ("{% do messages.append(1) %}", "unknown tag 'do'"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_failures_are_one_line(source: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        ChatTemplate(source).render(_chat("Hi"))
    line = str(caught.value)
    assert line.startswith("the chat template fails: ") and message in line and "\n" not in line


def test_roles_out_of_order_are_reported_in_the_templates_words() -> None:
    with pytest.raises(ModelError, match="Roles must alternate"):
        _template("mistral").render([{"role": "assistant", "content": "Hi"}])
