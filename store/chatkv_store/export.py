"""A conversation as plain JSON values: what an exporter writes and an importer reads back."""

from __future__ import annotations

from typing import Any

from chatkv_store.records import Session, Turn

EXPORT_FORMAT = "chatkv-conversation"
EXPORT_VERSION = 1


def as_plain_values(session: Session, turns: list[Turn]) -> dict[str, Any]:
    """One conversation as JSON values: the session's record and every turn, each
    behind the one that it follows."""
    return {
        "format": EXPORT_FORMAT,
        "version": EXPORT_VERSION,
        "session": session.id,
        "title": session.title,
        "model": session.model,
        "namespace": session.namespace,
        "created_at": session.created_at,
        "updated_at": session.updated_at,
        "settings": session.settings,
        "pinned": session.pinned,
        "head": session.head,
        "turns": [
            {
                "id": turn.id,
                "parent": turn.parent_id,
                "index": turn.index,
                "created_at": turn.created_at,
                "state": turn.state,
                "finish_reason": turn.finish_reason,
                "system": turn.system_text,
                "user": turn.user_text,
                "reply": turn.reply_text,
                "prompt_ids": list(turn.prompt_ids),
                "reply_ids": list(turn.reply_ids),
                "seed": turn.seed,
                "rng_draws_before": turn.rng_draws_before,
                "rng_draws_after": turn.rng_draws_after,
                "stats": turn.stats,
            }
            for turn in turns
        ],
    }
