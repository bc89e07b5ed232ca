"""What stored KV was worth, from what was measured of turns; needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def summary(turns: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over what was measured of turns (the names of `ask --json`); strangers are skipped.

    A lookup is a turn whose history could have been found: all but those that reused, loaded and
    planned nothing. Time saved is what computing everything again was predicted to take, less what
    the turn took.
    """
    sums: dict[str, Any] = dict.fromkeys(
        (
            "turns",
            "lookups",
            "from_pool",
            "from_disk",
            "not_found",
            "tokens_reused",
            "tokens_loaded",
            "tokens_computed",
            "tokens_remote",
            "tokens_generated",
            "bytes_loaded",
            "saved_ms",
            "turns_with_notices",
        ),
        0,
    )
    for turn in turns:
        tokens, plan = turn.get("tokens"), turn.get("plan")
        if not isinstance(tokens, dict) or not isinstance(plan, dict):
            continue
        sums["turns"] += 1
        reused, loaded = tokens.get("reused", 0), tokens.get("loaded", 0)
        again_ms = (plan.get("alternatives_ms") or {}).get("re-prefill")
        if reused or loaded or again_ms is not None:
            sums["lookups"] += 1
            sums["from_disk" if loaded else "from_pool" if reused else "not_found"] += 1
        for name in ("reused", "loaded", "computed", "remote", "generated"):
            sums[f"tokens_{name}"] += tokens.get(name, 0)
        sums["bytes_loaded"] += turn.get("loaded_bytes", 0)
        if loaded and again_ms is not None:
            sums["saved_ms"] += max(0.0, again_ms - plan.get("actual_ms", again_ms))
        sums["turns_with_notices"] += bool(turn.get("notices"))
    return sums
