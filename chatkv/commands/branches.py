"""The tree of a conversation as a list to choose from: every end that was left behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chatkv_store.conversations import Turn


@dataclass(frozen=True)
class Branch:
    """One way through the tree. `parts_at`: the first turn that is not the current way's."""

    turn_id: str  # its last turn
    num_turns: int
    parts_at: int | None  # None: the way that the conversation is on
    user: str  # of the turn where it parts
    reply: str

    @property
    def is_current(self) -> bool:
        return self.parts_at is None


def branches(turns: Iterable[Turn], head: str | None) -> list[Branch]:
    """All ends of the tree, the current one first, then those left last."""
    by_id = {turn.id: turn for turn in turns}
    current = _path(by_id, head)
    on_current = {turn.id for turn in current}
    parents = {turn.parent_id for turn in by_id.values()}
    found = []
    if current:
        last = current[-1]
        found.append(Branch(last.id, last.index, None, last.user_text, last.reply_text))
    for turn in sorted(by_id.values(), key=lambda turn: turn.id, reverse=True):
        if turn.id in parents or turn.id in on_current:
            continue
        own = [step for step in _path(by_id, turn.id) if step.id not in on_current]
        found.append(Branch(turn.id, turn.index, own[0].index, own[0].user_text, own[0].reply_text))
    return found


def alternatives(turns: Iterable[Turn], head: str | None) -> dict[int, tuple[int, int]]:
    """Turn number -> (which, of how many) for turns on the current way that have others beside
    them, told in the order in which they were made."""
    by_id = {turn.id: turn for turn in turns}
    beside: dict[str | None, list[str]] = {}
    for turn in sorted(by_id.values(), key=lambda turn: turn.id):
        beside.setdefault(turn.parent_id, []).append(turn.id)
    found = {}
    for turn in _path(by_id, head):
        others = beside[turn.parent_id]
        if len(others) > 1:
            found[turn.index] = (others.index(turn.id) + 1, len(others))
    return found


def _path(by_id: dict[str, Turn], end: str | None) -> Sequence[Turn]:
    """From the first turn to `end`."""
    path: list[Turn] = []
    turn = by_id.get(end) if end is not None else None
    while turn is not None:
        path.append(turn)
        turn = by_id.get(turn.parent_id) if turn.parent_id is not None else None
    return path[::-1]
