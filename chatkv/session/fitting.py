"""Making a message fit into the model's context, or saying with numbers why it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from chatkv.engine.shift import take_out
from chatkv.errors import ContextFull
from chatkv.session.turn import TurnOptions
from chatkv.session.window import context_of, length_of_system, narrower

if TYPE_CHECKING:
    from chatkv.session.conversation import Conversation
    from chatkv_store.records import Turn, Window


@dataclass(frozen=True)
class Fitted:
    """The history that a message goes behind, and how much of it was computed by other turns."""

    history: list[int]
    num_computed: int
    window: Window | None
    notices: tuple[str, ...] = ()


def fit(conversation: Conversation, prompt_ids: list[int], options: TurnOptions) -> Fitted:
    """All of the history, or what `options.overflow` leaves of it; raises ContextFull."""
    log, window, turns = conversation.log, conversation.window, conversation.turns
    limit = conversation.model.engine.max_tokens
    if len(log) + len(prompt_ids) < limit:
        return Fitted(log, conversation.num_computed, window)
    if options.overflow == "refuse" or not turns:
        raise too_long(len(log), len(prompt_ids), limit)
    new = narrower(turns, _length_of_system(conversation), len(prompt_ids), limit, window)
    if new is None:
        raise too_long(len(log), len(prompt_ids), limit)
    new = _joined(new, turns, prompt_ids)
    history = context_of(turns, new)
    notice = (
        f"{new.first_turn - 1} of {len(turns)} turns no longer fit into the model's context, which "
        f"ends at {limit} tokens: it goes on without them"
    )
    wants_shift = options.overflow == "shift" and not options.exact
    if wants_shift and _shift(conversation, log, new, history):
        notice += ", and remembers the others roughly"
        return Fitted(history, len(history) - 1, new, (notice,))
    return Fitted(history, new.num_kept, new, (notice,))


def too_long(num_history: int, num_new: int, limit: int) -> ContextFull:
    """What does not fit, and what can be done."""
    if not num_history:
        return ContextFull(
            f"this message has {num_new} tokens, but the context ends at {limit}: make it shorter"
        )
    return ContextFull(
        f"the conversation has {num_history} tokens and this message adds {num_new}, but the "
        f"context ends at {limit}: start a new session, fork an earlier turn, or let oldest turns "
        "leave (--overflow shift or recompute)"
    )


def _joined(window: Window, turns: Sequence[Turn], prompt_ids: Sequence[int]) -> Window:
    """`window`, less the end of the system prompt where what follows begins with one: the prompt
    behind an answer that was cut off ends that answer first."""
    follows = [*(turn.prompt_ids for turn in turns[window.first_turn - 1 :]), prompt_ids][0]
    is_doubled = window.num_kept and turns[0].prompt_ids[window.num_kept - 1] == follows[0]
    return replace(window, num_kept=window.num_kept - 1) if is_doubled else window


def _shift(conversation: Conversation, log: list[int], window: Window, history: list[int]) -> bool:
    """Move the KV of the turns that stay up behind the system prompt; False where that KV would
    have to be computed first, since then it may as well be computed for where it goes."""
    model, sequence = conversation.model, conversation.sequence
    start, stop = window.num_kept, len(log) - (len(history) - window.num_kept)
    if sequence.common_prefix(log) < conversation.num_computed:
        model.restorer.bring_back(sequence, log)
    if sequence.common_prefix(log) <= stop:
        return False
    sequence.become(log, sequence.common_prefix(log))
    try:
        take_out(model.engine.pool, sequence, start, stop)
    except ContextFull:  # blocks that others share are copied first, and there is no room to
        return False
    return True


def _length_of_system(conversation: Conversation) -> int:
    """Tokens in front of the first message: found by saying something else in it."""
    model, first = conversation.model, conversation.turns[0]
    messages = [{"role": "system", "content": first.system_text}] if first.system_text else []
    other_text = "b" if first.user_text.startswith("a") else "a"
    messages.append({"role": "user", "content": other_text})
    rendered = model.template.render(messages, add_generation_prompt=True)
    other = model.tokenizer.encode_rendered(rendered.text, rendered.content_spans)
    return length_of_system(first, other, model.tokenizer.stop_ids)
