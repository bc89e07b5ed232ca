"""How requests name a session, or that they want none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from chatkv.server.asked import Carriers
from chatkv.session.messages import Message

SESSION_HEADER = "X-Chatkv-Session"
SCRATCH_HEADER = "X-Chatkv-Scratch"

# What clients send to have a title or tags of a conversation made, which is not part of it. People
# ask for titles too: only what asks for a short one of the conversation itself is meant.
_BACKGROUND = re.compile(
    r"\A\s*(### Task:\s*\n.*(### Chat History|<chat_history>)"
    r"|(Please )?(write|generate|provide|create|give|suggest|summari[sz]e)\b"
    r"(?=.{0,200}\b(concise|\d+ ?(-|–|to) ?\d+ words?|\d+[- ]words?))"
    r"(?=.{0,200}\b(title|name|topic)\b)"
    r".{0,300}\b(the|this|our|following) (conversation|chat|thread|discussion)\b"
    r"|Analy[sz]e if this message indicates a new conversation topic)",
    re.IGNORECASE | re.DOTALL,
)
_KEY_HEADERS = (
    "x-openwebui-chat-id",
    "x-conversation-id",
    "chatui-conversation-id",
    "session-id",
    "session_id",
    "x-grok-conv-id",
)
_USER_SESSION = re.compile(r"_session_([0-9A-Za-z-]{8,})\Z")


def carriers_of(request: Request, body: dict[str, Any]) -> Carriers:
    """How the request names its session, the most telling way first."""
    keys: list[tuple[str, Any]] = [("prompt_cache_key", body.get("prompt_cache_key"))]
    keys += [(name, request.headers.get(name)) for name in _KEY_HEADERS]
    metadata = body.get("metadata")
    if isinstance(metadata, dict):
        keys.append(("metadata", _session_in(metadata.get("user_id"))))
    keys.append(("user", body.get("user")))
    found = tuple((kind, value) for kind, value in keys if isinstance(value, str) and value)
    return Carriers(request.headers.get(SESSION_HEADER) or None, found)


def _session_in(user_id: Any) -> str | None:
    """Claude's clients put their session into the user's id, as JSON or at its end."""
    if not isinstance(user_id, str):
        return None
    try:
        inside = msgspec.json.decode(user_id)
        found = inside.get("session_id") if isinstance(inside, dict) else None
    except msgspec.DecodeError:
        match = _USER_SESSION.search(user_id)
        found = match[1] if match else None
    return found if isinstance(found, str) else None


def is_scratch(request: Request, body: dict[str, Any], messages: Sequence[Message]) -> bool:
    """Whether the answer is to leave nothing: it was said so, or it looks like a client's own."""
    said = request.headers.get(SCRATCH_HEADER, "").lower()
    if said in ("0", "false", "no"):
        return False
    if said or body.get("store") is False:
        return True
    is_named = SESSION_HEADER in request.headers
    last = messages[-1]["content"] if messages[-1]["role"] == "user" else ""
    return not is_named and is_background(last)


def is_background(text: str) -> bool:
    """Whether a program asks, and no person."""
    return bool(_BACKGROUND.match(text))


def owner_of(request: Request) -> str:
    """Whose sessions the request may see; set by `security`."""
    return str(request.scope.get("chatkv.owner", ""))
