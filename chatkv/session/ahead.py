"""Work before Enter: history restored when a session is opened, a draft prefilled as it is typed.

Nothing of it is saved. The KV of a draft lies in the pool behind the history's, and the turn that
is sent reuses as many of its tokens as agree; what was typed over is computed like anything new.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from chatkv.engine.engine import Preempted
from chatkv.engine.scheduler import Cancelled
from chatkv.session.ready import Ready

if TYPE_CHECKING:
    from chatkv.session.conversation import Conversation

Progress = Callable[[str, int, int], None]

# The end of a draft is not settled: the next letter may change how its last word is cut into
# tokens. Four tokens are more than a word.
UNSETTLED_TOKENS = 4


def prefill_draft(
    conversation: Conversation,
    draft: str = "",
    cancelled: Callable[[], bool] = lambda: False,
    system: str | None = None,
) -> int:
    """Bring the history, and then the settled part of a message that is being typed, into the
    pool; with no draft yet, the history alone. `system` is what a new session will be sent with.
    Returns how many of the log's and the draft's tokens have their KV then.

    Call it again whenever the draft settles; `cancelled` is asked between chunks and ends it early
    with what is done kept. Not beside `send`: one of them at a time.
    """
    return make_ready(conversation, draft, cancelled, system).cached


def make_ready(
    conversation: Conversation,
    draft: str = "",
    cancelled: Callable[[], bool] = lambda: False,
    system: str | None = None,
    on_progress: Progress = lambda stage, done, total: None,
) -> Ready:
    """The same, telling where the KV came from and what that took. on_progress hears what a turn's
    listener would: "restore" and "prefill", done, of all."""
    with conversation.model.engine.memory.use(conversation.sequence, is_background=True):
        return _prefill(conversation, draft, cancelled, system, on_progress)


def _prefill(
    conversation: Conversation,
    draft: str,
    cancelled: Callable[[], bool],
    system: str | None,
    on_progress: Progress,
) -> Ready:
    began = time.perf_counter()
    ids = [*conversation.log, *_settled(conversation, draft, system)]
    sequence, restorer = conversation.sequence, conversation.model.restorer
    if len(ids) < 2 or len(ids) > conversation.model.engine.max_tokens:
        return Ready(0)
    if sequence.common_prefix(ids) == len(ids):
        return Ready(len(ids), reused=len(ids))
    planned = restorer.plan(sequence, ids, conversation.num_computed)
    try:
        restored = restorer.restore(sequence, planned, partial(on_progress, "restore"), cancelled)
    except Cancelled:
        return Ready(sequence.num_cached, reused=sequence.num_cached)
    prefilled = partial(on_progress, "prefill")
    prefilled(restored.num_ready, len(ids))
    try:
        conversation.model.engine.prefill(sequence, prefilled, cancelled, restored.arriving)
    except (Cancelled, Preempted):  # others need the memory
        pass
    finally:
        if restored.arriving is not None:
            restored.arriving.close()
    cached, reused, loaded = sequence.num_cached, restored.reused, restored.num_loaded
    ms = (time.perf_counter() - began) * 1e3
    computed = max(0, cached - restored.num_ready)
    return Ready(cached, reused, loaded, computed, ms, restored.num_fetched)


def _settled(conversation: Conversation, draft: str, system: str | None) -> list[int]:
    """The tokens that a message which begins with `draft` is going to add to the log, as far as
    more letters cannot change them."""
    if not draft:
        return []
    # What the template puts behind the message is common to all drafts and not settled either.
    shorter = conversation.prompt_ids(draft, system)
    longer = conversation.prompt_ids(draft + " and", system)
    common = 0
    for mine, other in zip(shorter, longer, strict=False):
        if mine != other:
            break
        common += 1
    return shorter[: max(0, common - UNSETTLED_TOKENS)]
