"""Conversations with KV for the store's tests: what a runtime would have saved of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from chatkv_store import BlockStore, Conversations, Session, StoreFull
from kv_samples import SMALL, SPACE, chain, kv_of


def talk(
    conversations: Conversations,
    store: BlockStore | None,
    token_ids: Sequence[int],
    *,
    session: Session | None = None,
    title: str = "t",
    codec: str = "raw",
    space: bytes = SPACE,
) -> Session:
    """One turn that adds `token_ids` to the log of a new session, or of `session`; its KV goes to
    `store`, as far as there is room."""
    if session is None:
        session = conversations.create_session(namespace=space.hex(), title=title, model="Tiny")
    with conversations.lease(session.id):
        turn = conversations.begin_turn(session.id, user_text="hello", prompt_ids=token_ids)
        conversations.finish_turn(turn.id, reply_text="yes", reply_ids=[], rng_draws_after=3)
    if store is not None:
        store.register(space, {"model": "Tiny", "layout": SMALL.to_json()})
        log = list(conversations.token_log(session.id))
        with suppress(StoreFull):
            store.put(space, SMALL, chain(SMALL, log, kv_of(SMALL, log), space), codec)
    return conversations.get_session(session.id)
