"""An answer taken apart as it streams: what the model thought, what it says, what it calls.

Models write all three as one text: thoughts between <think> and </think> at its beginning, and a
call as JSON between <tool_call> and </tool_call>, the form that Qwen's and Hermes' templates ask
for. A text that only looks like the beginning of one is passed on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from chatkv.model.template import ChatTemplate

Kind = Literal["reasoning", "content", "call"]

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


class Parts:
    """Give it the answer's pieces; it gives back (kind, text) of what is known to be that.

    is_thinking: the prompt has opened the thoughts already. has_tools: calls are looked for.
    """

    def __init__(self, is_thinking: bool = False, has_tools: bool = False) -> None:
        self._kind: Kind = "reasoning" if is_thinking else "content"
        self._has_tools = has_tools
        self._may_think = not is_thinking  # nothing but white space was said
        self._held = ""

    def push(self, text: str) -> list[tuple[Kind, str]]:
        self._held += text
        found: list[tuple[Kind, str]] = []
        while (mark := self._next_mark()) is not None:
            at = self._held.find(mark)
            if at < 0:
                break
            found.append((self._kind, self._held[:at]))
            self._held = self._held[at + len(mark) :]
            self._kind = {THINK: "reasoning", CALL: "call"}.get(mark, "content")  # type: ignore[assignment]
            self._may_think = False
        keep = 0 if mark is None else _overlap(self._held, mark)
        if self._kind != "call":  # a call is of use only when it is whole
            end = len(self._held) - keep
            shown, self._held = self._held[:end], self._held[end:]
            found.append((self._kind, shown))
            self._may_think = self._may_think and not shown.strip()
        return [(kind, text) for kind, text in found if text]

    def flush(self) -> list[tuple[Kind, str]]:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        if self._kind == "call":
            return [("content", CALL + held)]  # it was never closed
        return [(self._kind, held)] if held else []

    def _next_mark(self) -> str | None:
        if self._kind == "reasoning":
            return END_THINK
        if self._kind == "call":
            return END_CALL
        if self._may_think and self._held.lstrip()[: len(THINK)] in (
            THINK,
            THINK[: len(self._held.lstrip())],
        ):
            return THINK
        return CALL if self._has_tools else None


@dataclass(frozen=True)
class Said:
    """A whole answer, taken apart. `calls`: OpenAI's tool calls, their arguments as JSON text."""

    content: str
    reasoning: str
    calls: tuple[dict[str, Any], ...]

    def message(self) -> dict[str, Any]:
        """As clients send it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        return message | ({"tool_calls": list(self.calls)} if self.calls else {})


def said_in(answer: str, has_tools: bool, is_thinking: bool | None = None) -> Said:
    """`answer` taken apart. is_thinking: the prompt has opened the thoughts; None: as it looks."""
    if is_thinking is None:
        before, end, _ = answer.partition(END_THINK)
        is_thinking = bool(end) and THINK not in before
    parts = Parts(is_thinking, has_tools)
    found = [*parts.push(answer), *parts.flush()]
    content, reasoning = "", ""
    calls: list[dict[str, Any]] = []
    for kind, text in found:
        call = call_in(text, len(calls)) if kind == "call" else None
        if call is not None:
            calls.append(call)
        elif kind == "reasoning":
            reasoning += text
        else:
            content += text if kind == "content" else CALL + text + END_CALL
    return Said(content, reasoning, tuple(calls))


def call_in(text: str, index: int) -> dict[str, Any] | None:
    """The call that `text` asks for, None where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": f"call_{index}_{found['name']}"[:64],
        "type": "function",
        "function": {"name": found["name"], "arguments": written},
    }


def written(message: dict[str, Any]) -> str:
    """What a client's assistant message stands for, as the model would have written it."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [
        {"name": function["name"], "arguments": function["arguments"]} for function in functions
    ]
    written = [f"{CALL}\n{json.dumps(call, ensure_ascii=False)}\n{END_CALL}" for call in calls]
    said = [message["content"]] if message["content"] else []
    return "\n".join([*said, *written])


_OPENS: dict[str, bool] = {}


def opens_thoughts(template: ChatTemplate) -> bool:
    """Whether a template's prompt ends with the beginning of the model's thoughts."""
    if template.source not in _OPENS:
        rendered = template.render([{"role": "user", "content": "Hello"}])
        _OPENS[template.source] = rendered.text.rstrip().endswith(THINK)
    return _OPENS[template.source]


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
