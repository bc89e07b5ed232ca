"""What going back leaves behind can be listed, and is the session's own."""

from __future__ import annotations

from pathlib import Path

from chatkv_store.conversations import Conversations, Turn


def _say(store: Conversations, session_id: str, user: str) -> Turn:
    turn = store.begin_turn(session_id, user_text=user, prompt_ids=[1])
    return store.finish_turn(turn.id, reply_text=f"{user}!", reply_ids=[2], rng_draws_after=1)


def test_the_tree_holds_the_way_first_and_then_what_was_left(tmp_path: Path) -> None:
    with Conversations(tmp_path / "c.sqlite3") as store:
        session = store.create_session()
        with store.lease(session.id):
            first, left = _say(store, session.id, "a"), _say(store, session.id, "b")
            store.move_head(session.id, first.id)
            kept = _say(store, session.id, "c")
        assert [turn.id for turn in store.tree(session.id)] == [first.id, kept.id, left.id]
        fork = store.fork(session.id)
        assert [turn.id for turn in store.tree(fork.id)] == [first.id, kept.id]
        with store.lease(fork.id):
            store.move_head(fork.id, first.id)
        # What a fork shares is not its own: it is found through its owner.
        assert [turn.id for turn in store.tree(fork.id)] == [first.id]
