"""A conversation as words: what every reader of a foreign file makes of it.

It has no token ids: those come from the model that goes on with it, when it does. `as_values` makes
the values of our own JSON of it, which is all that the store takes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from chatkv.errors import ChatkvError
from chatkv_store.export import EXPORT_FORMAT, EXPORT_VERSION

Message = dict[str, Any]


class NotUnderstood(ChatkvError):
    """A file, or a conversation in it, that is not what it was taken for."""


@dataclass
class ToldTurn:
    """What was asked and answered. parent: index of the turn that it follows, None for the first.

    said: the messages that stand for `user`, where they are not one of the user. left_out counts
    what cannot be kept, by its kind.
    """

    user: str = ""
    reply: str = ""
    parent: int | None = None
    system: str | None = None
    said: tuple[Message, ...] = ()
    is_whole: bool = True
    created_at: float | None = None
    model: str = ""
    left_out: dict[str, int] = field(default_factory=dict)


@dataclass
class Told:
    """One conversation; `source` names it where it comes from. Turns may branch; `head` is the
    index of the one it ends with, by default the last. Times are epoch seconds."""

    source: str
    turns: list[ToldTurn]
    title: str = ""
    model: str = ""
    created_at: float | None = None
    updated_at: float | None = None
    head: int | None = None

    @property
    def left_out(self) -> dict[str, int]:
        """What could not be kept of all turns."""
        total: dict[str, int] = {}
        for turn in self.turns:
            for kind, number in turn.left_out.items():
                total[kind] = total.get(kind, 0) + number
        return total

    def as_values(self, now_s: float) -> dict[str, Any]:
        """In the form of our own JSON; what has no time gets that of the import."""
        times = [turn.created_at for turn in self.turns if turn.created_at is not None]
        created_at = self.created_at or min(times, default=now_s)
        updated_at = self.updated_at or max(times, default=created_at)
        head = len(self.turns) - 1 if self.head is None else self.head
        return {
            "format": EXPORT_FORMAT,
            "version": EXPORT_VERSION,
            "session": "",
            "title": self.title,
            "model": self.model,
            "namespace": None,
            "created_at": created_at,
            "updated_at": updated_at,
            "settings": {"source": self.source},
            "head": str(head),
            "turns": [_values_of(turn, index, created_at) for index, turn in enumerate(self.turns)],
        }


def turns_of(messages: Iterable[tuple[str, str, bool]]) -> list[ToldTurn]:
    """Turns out of (role, content, whether it is whole), one behind the other."""
    turns: list[ToldTurn] = []
    system: list[str] = []
    asked: list[Message] = []
    for role, content, is_whole in messages:
        if role == "assistant":
            if asked or not turns:
                turns.append(_turn(asked, content, is_whole, len(turns), system))
                asked = []
            else:  # two answers behind each other are one
                last = turns[-1]
                last.reply = f"{last.reply}\n\n{content}" if last.reply else content
                last.is_whole = is_whole
            continue
        if role == "system" and not turns and not asked:
            system.append(content)
            continue
        if role != "tool" and asked and asked[-1]["role"] == "user":  # it was never answered
            turns.append(_turn(asked, "", False, len(turns), system))
            asked = []
        asked.append({"role": role, "content": content})
    if asked or (system and not turns):
        turns.append(_turn(asked, "", False, len(turns), system))
    return turns


def _turn(
    asked: list[Message], reply: str, is_whole: bool, number: int, system: list[str]
) -> ToldTurn:
    is_plain = [message["role"] for message in asked] in ([], ["user"])
    return ToldTurn(
        user="\n".join(message["content"] for message in asked),
        reply=reply,
        parent=number - 1 if number else None,
        system="\n\n".join(system) if system and not number else None,
        said=() if is_plain else tuple(asked),
        is_whole=is_whole,
    )


def messages_of(values: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """(role, content, whether it is whole) of our own JSON's values, from the first turn to the
    head: what `turns_of` reads back."""
    for turn in path(values):
        if turn["system"]:
            yield "system", turn["system"], True
        said = turn.get("stats", {}).get("said") or [{"role": "user", "content": turn["user"]}]
        for message in said:
            yield str(message["role"]), _text(message.get("content")), True
        is_whole = turn["state"] == "done"
        if turn["reply"] or is_whole:
            yield "assistant", turn["reply"], is_whole


def path(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns from the first to the head."""
    turns = values["turns"]
    if not turns or "parent" not in turns[0]:
        return list(turns)
    by_id = {turn["id"]: turn for turn in turns}
    found = []
    turn = by_id.get(values["head"])
    while turn is not None:
        found.append(turn)
        turn = by_id.get(turn["parent"])
    return found[::-1]


def digest_of(kind: str, content: Any) -> str:
    """A source for what has no id where it comes from: equal content is the same conversation."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return f"{kind}:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def epoch_s(value: Any) -> float | None:
    """A time as files have it: epoch seconds, or ISO 8601 (UTC where it names no zone)."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if 0 <= value < 1e11 else None
    if isinstance(value, str):
        try:
            time = datetime.fromisoformat(value)
            return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            return None
    return None


def fenced(text: str, language: str = "") -> str:
    """`text` as a block of code, whatever fences it holds itself."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(
            str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content
        )
    return content if isinstance(content, str) else ""


def _values_of(turn: ToldTurn, index: int, created_at: float) -> dict[str, Any]:
    about: dict[str, Any] = {"model": turn.model} if turn.model else {}
    about |= {"left_out": turn.left_out} if turn.left_out else {}
    stats: dict[str, Any] = {"imported": about}
    stats |= {"said": list(turn.said)} if turn.said else {}
    return {
        "id": str(index),
        "parent": None if turn.parent is None else str(turn.parent),
        "created_at": created_at if turn.created_at is None else turn.created_at,
        "state": "done" if turn.is_whole else "interrupted",
        "finish_reason": "stop" if turn.is_whole else "interrupted",
        "system": turn.system,
        "user": turn.user,
        "reply": turn.reply,
        "prompt_ids": [],
        "reply_ids": [],
        "seed": 0,
        "rng_draws_before": 0,
        "rng_draws_after": 0,
        "stats": stats,
    }
