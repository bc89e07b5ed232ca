"""Our own JSON: whole conversations, every branch of them. docs/formats.md tells of each field."""

from __future__ import annotations

from typing import Any

from chatkv.formats.told import NotUnderstood, digest_of
from chatkv_store.export import EXPORT_FORMAT, EXPORT_VERSION

_TURN: dict[str, Any] = {
    "state": "done",
    "finish_reason": "stop",
    "system": None,
    "user": "",
    "reply": "",
    "prompt_ids": [],
    "reply_ids": [],
    "seed": 0,
    "rng_draws_before": 0,
    "rng_draws_after": 0,
    "stats": {},
}
_SESSION: dict[str, Any] = {
    "session": "",
    "title": "",
    "model": "",
    "namespace": None,
    "settings": {},
}
# Where the KV of these ids lies, and how they are read; without ids they say nothing.
_WITH_IDS = ("tokenizer",)


def is_one(value: Any) -> bool:
    """Whether this is a conversation of ours."""
    return isinstance(value, dict) and value.get("format") == EXPORT_FORMAT


def without_ids(values: dict[str, Any]) -> dict[str, Any]:
    """`values` of an export less all that concerns its tokens: for a reader, or another model."""
    names = ("prompt_ids", "reply_ids", "seed", "rng_draws_before", "rng_draws_after", "stats")
    turns = []
    for turn in values["turns"]:
        kept = {name: turn[name] for name in turn if name not in names}
        lasting = {
            name: turn["stats"][name] for name in ("said", "imported") if name in turn["stats"]
        }
        turns.append(kept | ({"stats": lasting} if lasting else {}))
    settings = {name: value for name, value in values["settings"].items() if name not in _WITH_IDS}
    return values | {"namespace": None, "settings": settings, "turns": turns}


def whole(value: dict[str, Any], now_s: float) -> dict[str, Any]:
    """A conversation with every field that the store wants: what is left out of a file, or of one
    that somebody wrote by hand, has its default. What is wrong is left for the store to refuse."""
    given = value.get("turns")
    if not isinstance(given, list) or not all(isinstance(turn, dict) for turn in given):
        raise NotUnderstood("it has no list of turns")
    version = value.get("version", EXPORT_VERSION)
    created_at = value.get("created_at", now_s)
    settings = value.get("settings", {})
    has_ids = any(turn.get("prompt_ids") for turn in given)
    if isinstance(settings, dict) and not has_ids:
        settings = {name: value for name, value in settings.items() if name not in _WITH_IDS}
    filled = {**_SESSION, **value, "version": version, "created_at": created_at}
    if isinstance(settings, dict):
        source = settings.get("source") or (
            f"chatkv:{value['session']}" if value.get("session") else digest_of("json", value)
        )
        filled["settings"] = settings | {"source": source}
    filled["namespace"] = filled["namespace"] if has_ids else None
    filled["turns"] = [
        {**_TURN, "id": str(index), "created_at": created_at, **turn}
        for index, turn in enumerate(given)
    ]
    return filled
