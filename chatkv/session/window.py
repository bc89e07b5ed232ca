"""When a conversation outgrows the model's context: whole oldest turns leave, and it is said.

The system prompt stays, and with it the first tokens, without which attention loses its hold
(attention sinks, arXiv 2309.17453). What the user reads is untouched; only what the model has
before it is. From then on each turn keeps what it was computed on (`Window`), so that the log that
counts can be told for every turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chatkv_store.records import Window

if TYPE_CHECKING:
    from chatkv_store.conversations import Turn

NUM_SINKS = 4
# Down to this share of the context: leaving little by little would change the beginning, and so
# cost the cache, with every turn.
KEEP_SHARE = 0.5


def context_of(turns: Sequence[Turn], window: Window | None) -> list[int]:
    """The ids of `turns` that the model has before it."""
    first = window.first_turn - 1 if window else 0
    ids = list(turns[0].prompt_ids[: window.num_kept]) if window else []
    for turn in turns[first:]:
        ids.extend(turn.prompt_ids)
        ids.extend(turn.reply_ids)
    return ids


def last_window(turns: Sequence[Turn]) -> Window | None:
    """What the last turn was computed on."""
    return Window.of(turns[-1].stats) if turns else None


def narrower(
    turns: Sequence[Turn], num_kept: int, num_new: int, limit: int, now: Window | None
) -> Window | None:
    """The window with as many of the newest turns as leave room; None where none would.

    num_kept: tokens of the system prompt; num_new: of the message that is to fit; limit: of the
    context.
    """
    target = max(int(limit * KEEP_SHARE), num_kept + num_new)
    size = num_kept + num_new
    first = len(turns) + 1
    least = (now.first_turn if now else 1) + 1
    while first > least and size + turns[first - 2].num_tokens <= target:
        first -= 1
        size += turns[first - 1].num_tokens
    return Window(num_kept, first) if size < limit else None


def length_of_system(first_turn: Turn, other_beginning: Sequence[int], ends: frozenset[int]) -> int:
    """How many tokens of the first turn's prompt come before its message: what they share with
    `other_beginning`, the prompt of another message under the same system prompt, up to the last
    end of a message in it. At least the sinks."""
    common = 0
    for mine, other in zip(first_turn.prompt_ids, other_beginning, strict=False):
        if mine != other:
            break
        common += 1
    last_end = max((at + 1 for at in range(common) if first_turn.prompt_ids[at] in ends), default=0)
    return max(last_end, min(NUM_SINKS, common))
