"""Finding the conversation that a client means which sends all of it again with each request.

Such clients name no session. What they resend was said here before, up to the newest message, so
its messages name it: each turn is noted under a digest of all messages up to its answer (seeded
with what the answer depends on), and looked up by that. What is found are the turn's exact token
ids; nothing that was said here is tokenised again.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chatkv_store.conversations import Conversations, Turn

Message = dict[str, Any]


@dataclass(frozen=True)
class Known:
    """The newest turn whose conversation a request goes on from, and the messages behind it."""

    turn: Turn | None
    new: tuple[Message, ...]


def find_known(conversations: Conversations, seed: str, messages: Sequence[Message]) -> Known:
    """The longest beginning of `messages` that ends with an answer which was given here."""
    digests = digests_of(seed, messages)
    for index in reversed(range(len(messages))):
        if messages[index]["role"] == "assistant":
            turn = conversations.turn_of_messages(digests[index])
            if turn is not None:
                return Known(turn, tuple(messages[index + 1 :]))
    return Known(None, tuple(messages))


def seed_of(namespace: bytes, template: str | None, tools: Sequence[Any]) -> str:
    """What an answer depends on beside its messages; `namespace`: of the model's exact KV."""
    about = [namespace.hex(), template, json.dumps(tools, sort_keys=True)]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def digests_of(seed: str, messages: Sequence[Message]) -> list[bytes]:
    """After each message, a digest of it and all before it. Clients strip white space, normalise
    Unicode, re-serialise tool calls and leave out the reasoning: none of that matters here."""
    digest = hashlib.sha256(seed.encode()).digest()
    digests = []
    for message in messages:
        canonical = json.dumps(_canonical(message), sort_keys=True, ensure_ascii=False)
        digest = hashlib.sha256(digest + canonical.encode("utf-8", "replace")).digest()
        digests.append(digest)
    return digests


def _canonical(message: Message) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    kept = {"role": role, "content": _text_of(message.get("content"))}
    calls = message.get("tool_calls") or []
    if calls:
        kept["tool_calls"] = [_canonical_call(call.get("function", {})) for call in calls]
    return kept


def _canonical_call(function: dict[str, Any]) -> list[Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return [function.get("name"), arguments]


def _text_of(content: Any) -> str:
    """A message's text; parts of a list are joined."""
    if isinstance(content, list):
        content = "".join(
            part.get("text", "") if isinstance(part, dict) else str(part) for part in content
        )
    return unicodedata.normalize("NFC", content or "").strip()
