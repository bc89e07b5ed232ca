"""A list of messages, {"role", "content"} each, as APIs and training sets have them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from chatkv.formats.told import NotUnderstood, Told, digest_of, fenced, turns_of

_ROLES = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and "content" in value


def is_one(value: Any) -> bool:
    """Whether this is an object that holds a list of messages."""
    found = value.get("messages") if isinstance(value, dict) else None
    return isinstance(found, list) and bool(found) and all(map(is_message, found))


def write(messages: Iterable[tuple[str, str, bool]]) -> str:
    """A JSON list of (role, content, whether it is whole)."""
    listed = [{"role": role, "content": content} for role, content, _ in messages]
    return json.dumps(listed, ensure_ascii=False, indent=1) + "\n"


def read(messages: list[Any], title: str = "") -> Told:
    """One conversation. Raises NotUnderstood."""
    left_out: Counter[str] = Counter()
    said = []
    for number, message in enumerate(messages, start=1):
        role = _ROLES.get(str(message.get("role"))) if is_message(message) else None
        if role is None:
            raise NotUnderstood(f"message {number} has no role and content that are known here")
        text = _text(message["content"], left_out)
        for call in message.get("tool_calls") or []:
            function = call.get("function") or {}
            called = f"[to {function.get('name') or 'a tool'}]"
            text += f"\n\n{called}\n{fenced(str(function.get('arguments') or ''))}"
        said.append((role, text.strip("\n") if message.get("tool_calls") else text, True))
    turns = turns_of(said)
    if turns and left_out:
        turns[0].left_out = dict(left_out)
    return Told(digest_of("messages", messages), turns, title)


def _text(content: Any, left_out: Counter[str]) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise NotUnderstood("the content of a message is neither text nor a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = str(part.get("type", "part")) if isinstance(part, dict) else "part"
            kind = "image" if "image" in kind else kind
            left_out[kind] += 1
            texts.append(f"[{kind}]")
    return "\n".join(texts)
