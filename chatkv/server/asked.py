"""What a client of any dialect asks, in one form; and how a request's fields are read.

Fields that are not known are left alone. Those that are known and make no sense are refused, with
the field's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from chatkv.engine.options import SamplingOptions
from chatkv.errors import UsageError
from chatkv.server.form import TEXT, Form
from chatkv.session.messages import Message
from chatkv.session.turn import TurnOptions

Body = Mapping[str, Any]

# An answer without a limit of its own ends with the context.
NO_LIMIT = 1 << 30
MAX_CHOICES = 16
MAX_LOGPROBS = 20
# Templates write a message's role as it is, so that only these may be one.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


@dataclass(frozen=True)
class Carriers:
    """How a request names its session: `session` is its id; `keys` are names that the client gave
    it, (kind, value), the most telling one first."""

    session: str | None = None
    keys: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Asked:
    """One request. `messages` are in OpenAI's form, their contents plain text; `prompt` is text to
    be gone on with as it is, instead of them. Each of `names` will find the turn."""

    model: str
    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    options: TurnOptions = field(default_factory=TurnOptions)
    tools: tuple[dict[str, Any], ...] = ()
    form: Form = TEXT
    carriers: Carriers = Carriers()
    is_scratch: bool = False
    is_streamed: bool = False
    num_choices: int = 1
    num_logprobs: int | None = None  # None: no logprobs; 0: those of the sampled tokens alone
    owner: str = ""
    names: tuple[tuple[str, ...], ...] = ()


def options_of(
    sampling: Body, max_tokens: int | None, stop: Any = None, is_background: bool = False
) -> TurnOptions:
    """`sampling` holds the names that all dialects share."""
    default = SamplingOptions()
    temperature = number(sampling, "temperature", default.temperature)
    top_p = number(sampling, "top_p", default.top_p)
    if top_p == 0:  # the most likely token alone
        temperature, top_p = 0.0, 1.0
    chosen = SamplingOptions(
        temperature,
        top_p,
        max(whole(sampling, "top_k", default.top_k), 0),  # some send -1 for "off"
        number(sampling, "min_p", default.min_p),
    )
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"max_tokens {max_tokens} makes no sense: give 1 or more")
    seed = whole(sampling, "seed", None)
    return TurnOptions(
        chosen,
        NO_LIMIT if max_tokens is None else max_tokens,
        stops(stop),
        None if seed is None else seed % (1 << 63),
        is_background=is_background,
    )


def number(body: Body, name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name} must be a number")
    return float(value)


def whole(body: Body, name: str, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise UsageError(f"{name} must be a whole number")
    return int(value)


def flag(body: Body, name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false")
    return value


def text(body: Body, name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a text")
    return value


def stops(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value or []
    if not isinstance(listed, list) or not all(isinstance(stop, str) for stop in listed):
        raise UsageError("stop must be a text or a list of texts")
    if len(listed) > 64 or any(len(stop) > 1000 for stop in listed):
        raise UsageError("stop: give at most 64 texts of at most 1000 characters")
    return tuple(listed)


def messages_of(value: Any) -> tuple[Message, ...]:
    """Chat messages in OpenAI's form, with what templates know of them and nothing else."""
    if not isinstance(value, list) or not value:
        raise UsageError("messages must be a list of at least one message")
    return tuple(_message(given, index) for index, given in enumerate(value))


def _message(given: Any, index: int) -> Message:
    where = f"messages[{index}]"
    role = ROLES.get(str(given.get("role"))) if isinstance(given, dict) else None
    if role is None:
        raise UsageError(f"{where}: role must be one of {', '.join(ROLES)}")
    message: Message = {"role": role, "content": content_of(given.get("content"), where)}
    if calls := given.get("tool_calls"):
        message["tool_calls"] = [_call(call, where) for call in listed(calls, where)]
    for name in ("tool_call_id", "name"):
        if role == "tool" and isinstance(given.get(name), str):
            message[name] = given[name]
    return message


def content_of(content: Any, where: str) -> str:
    """A message's text; the parts of a list are joined. UsageError for what is not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = []
    for part in listed(content, where):
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UsageError(f"{where}: this model reads text only, and no {kind}")
    return "".join(parts)


def listed(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{where} must hold a text or a list")
    return value


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where}: a tool call needs a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {
        "type": "function",
        "id": str(call.get("id") or ""),
        "function": {"name": function["name"], "arguments": arguments},
    }


def tools_of(value: Any) -> tuple[dict[str, Any], ...]:
    """Functions that the model may call, in OpenAI's form."""
    found = []
    for tool in listed(value or [], "tools"):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError("tools: each needs a function with a name")
        found.append({"type": "function", "function": function})
    return tuple(found)
