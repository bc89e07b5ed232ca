"""Chat templates: messages to the text a model was trained on, and the part of it that is new.

A conversation's token log is the truth, so history is never rendered for the model again: each
turn appends `continuation()`, the text between the last reply and the next. `matches_log` tells
whether the log still is what the template would write, and where not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from chatkv.errors import ModelError
from chatkv.model.one_line import one_line

if TYPE_CHECKING:
    from chatkv.model.prepared import PreparedModel
    from chatkv.model.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""At least "role" and "content"; the content is text, or a list of parts with "type" and "text"."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Private-use characters stand for message contents while their places are looked for.
_MARKS = "\ue000-\uf8ff"
_FIRST_MARK, _NUM_MARKS = 0xE000, 6400
_STRUCTURE = {"role", "type"}  # fields that steer a template, and are not content


@dataclass(frozen=True)
class Rendered:
    """Text for the model, and where in it (start, end) words of the messages stand."""

    text: str
    content_spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Difference:
    """Where a log and a rendering part: a character position, and what follows in each."""

    position: int
    logged: str
    rendered: str

    def __str__(self) -> str:
        return f"at character {self.position}: log {self.logged!r}, template {self.rendered!r}"


class ChatTemplate:
    """One model's template. Every method raises ModelError where the template fails."""

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str] | None = None,
        control_texts: Iterable[str] = (),
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`source` None means ChatML. `special_tokens` ("bos_token", ...) are the template's
        variables. `control_texts` are the texts that must not pass for special tokens in a
        message. `now` is asked by templates that write the date.
        """
        self.notice = None if source else "the model has no chat template: ChatML is used"
        self._source = source or CHATML
        self._variables = dict(special_tokens or {})
        self._now = now
        self._tools: list[Mapping[str, Any]] | None = None
        controls = sorted((text for text in control_texts if text), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, controls)) or r"(?!)")

    def with_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        """The same template, told of the functions that the model may call (in OpenAI's form)."""
        template = copy(self)
        template._tools = list(tools) if tools else None
        return template

    @property
    def source(self) -> str:
        """The template itself."""
        return self._source

    @classmethod
    def from_prepared(
        cls,
        prepared: PreparedModel,
        tokenizer: Tokenizer,
        now: Callable[[], datetime] = datetime.now,
    ) -> ChatTemplate:
        return cls(prepared.template, prepared.special_tokens, tokenizer.special_ids, now)

    # -- rendering -----------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> Rendered:
        """The whole conversation as text, as transformers' apply_chat_template renders it."""
        return self._render_with_spans(messages, add_generation_prompt)

    def continuation(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> Rendered:
        """The text after the last reply's content, to be appended to the log that ends with it.

        `messages` are the whole conversation: [..., assistant, user]. What the template makes of
        anything up to that reply does not matter. The end-of-turn token, with which most templates
        close a reply, is part of the text: a log holds a reply without it.
        """
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not replies:
            raise ModelError("a continuation needs a reply to continue from")
        last = replies[-1]
        mark = _unused_mark(_contents(messages))
        marked = [*messages[:last], {**messages[last], "content": mark}, *messages[last + 1 :]]
        rendered = self._render_with_spans(marked, add_generation_prompt, first=last + 1)
        cut = rendered.text.rfind(mark) + 1
        if cut == 0:
            raise ModelError("the chat template leaves out earlier replies: it cannot be continued")
        spans = [(start - cut, end - cut) for start, end in rendered.content_spans if start >= cut]
        return Rendered(rendered.text[cut:], tuple(spans))

    def matches_log(
        self,
        messages: Sequence[Message],
        log_text: str,
        add_generation_prompt: bool = False,
    ) -> Difference | None:
        """None where the log is the beginning of the template's rendering, else where it is not."""
        text = self._render(messages, add_generation_prompt)
        if text.startswith(log_text):
            return None
        position = _common_length(text, log_text)
        end = position + 40
        return Difference(position, log_text[position:end], text[position:end])

    # -- how -----------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        from chatkv.model.template_sandbox import render_limited

        variables = {
            **self._variables,
            "messages": [dict(message) for message in messages],
            "tools": self._tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        compiled = self._compiled
        try:
            return render_limited(compiled, variables)
        except Exception as error:  # a template is a program, and may fail in any way
            raise _failure(error) from error

    @cached_property
    def _compiled(self) -> Any:
        from chatkv.model.template_sandbox import TemplateEnvironment

        environment = TemplateEnvironment(lambda form: self._now().strftime(form))
        try:
            return environment.compile_template(self._source)
        except Exception as error:
            raise _failure(error) from error

    def _render_with_spans(
        self, messages: Sequence[Message], add_generation_prompt: bool, first: int = 0
    ) -> Rendered:
        """Text, and the places in it of contents of messages[first:], if not of others."""
        text = self._render(messages, add_generation_prompt)
        spans = self._find_contents(messages, add_generation_prompt, first, text)
        if spans is None:
            if any(self._control.search(content) for content in _contents(messages[first:])):
                raise ModelError(
                    "the chat template changes a message that holds control tokens, so that they "
                    "cannot be told from its own"
                )
            spans = ()
        return Rendered(text, spans)

    def _find_contents(
        self, messages: Sequence[Message], add_generation_prompt: bool, first: int, text: str
    ) -> tuple[tuple[int, int], ...] | None:
        """Where contents stand in `text`, by a second rendering with marks in their place.

        Marks are as long as what they stand for and leave white space as it is, so templates that
        trim do so alike. A template that looks into contents may see something else in marks; then
        only texts of control tokens are marked, which are what matters. None where even that
        renders differently.
        """
        for pattern in (re.compile(r"\S+"), self._control):
            marked = [*messages[:first]]
            marked += [_mark(m, i, pattern) for i, m in enumerate(messages[first:], first)]
            try:
                found = _compare(text, self._render(marked, add_generation_prompt))
            except ModelError:  # templates may refuse what they do not recognise
                continue
            if found is not None:
                return found
        return None


def _common_length(a: str, b: str) -> int:
    """How many characters `a` and `b` begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _compare(text: str, marked: str) -> tuple[tuple[int, int], ...] | None:
    """The places of marks in `marked`; None where `text` differs in anything but them."""
    if len(text) != len(marked):
        return None
    spans = []
    checked = 0
    for run in re.finditer(rf"([{_MARKS}])(?:\s*\1)*", marked):
        start, end = run.span()
        if text[checked:start] != marked[checked:start]:
            return None
        spans.append((start, end))
        checked = end
    return tuple(spans) if text[checked:] == marked[checked:] else None


def _mark(value: Any, index: int, pattern: re.Pattern[str]) -> Any:
    """`value` (a message, or anything in it) with what `pattern` finds replaced by marks."""
    if isinstance(value, str):
        mark = chr(_FIRST_MARK + index % _NUM_MARKS)
        return pattern.sub(lambda match: mark * len(match.group()), value)
    if isinstance(value, Mapping):
        return {
            key: child if key in _STRUCTURE else _mark(child, index, pattern)
            for key, child in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_mark(child, index, pattern) for child in value]
    return value


def _contents(value: Any) -> list[str]:
    """Every text in a list of messages."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [
            text
            for key, child in value.items()
            if key not in _STRUCTURE
            for text in _contents(child)
        ]
    if isinstance(value, (list, tuple)):
        return [text for child in value for text in _contents(child)]
    return []


def _unused_mark(texts: Iterable[str]) -> str:
    """A private-use character that occurs in none of `texts`."""
    used = set().union(*texts)
    return next(
        mark
        for mark in map(chr, range(_FIRST_MARK + _NUM_MARKS - 1, _FIRST_MARK, -1))
        if mark not in used
    )


def _failure(error: Exception) -> ModelError:
    return ModelError(f"the chat template fails: {one_line(error)}")
