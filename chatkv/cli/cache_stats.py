"""`chatkv cache stats`: how often stored KV was found, and what that was worth.

Derived from what was measured of each turn, which the conversations keep: nothing is counted on a
read. Only bytes written, evictions and refusals are counted in the store, with the write itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import click

from chatkv.cli.filters import parse_age
from chatkv.cli.output import Output, count, output_options, size
from chatkv.cli.stores import open_blocks, open_conversations


@click.command()
@click.option("--since", metavar="AGE", help="Turns of the last so long only: 7d.")
@output_options
def stats(output: Output, since: str | None) -> None:
    """Show how often the cache helped, and how much.

    Turns of deleted conversations are not counted any more.
    """
    after = 0.0 if since is None else time.time() - parse_age(since)
    with open_conversations() as store:
        values = summary(one for _, at, one in store.turn_stats() if at >= after)
    blocks = open_blocks()
    counters: dict[str, int] = {}
    if blocks is not None:
        with blocks:
            counters = blocks.counters()
    values |= {"written_bytes": 0, "evicted_blocks": 0, "evicted_bytes": 0, "refused_blocks": 0}
    values |= counters
    if not output.is_human:
        output.record(values)
        return
    found = values["from_pool"] + values["from_disk"]
    output.fields(
        [
            ("turns", count(values["turns"])),
            ("history found", _share(found, values["lookups"])),
            ("  in memory", count(values["from_pool"])),
            ("  on disk", count(values["from_disk"])),
            ("tokens reused", count(values["tokens_reused"])),
            ("tokens loaded", count(values["tokens_loaded"])),
            ("KV read", size(values["bytes_loaded"])),
            ("tokens computed", count(values["tokens_computed"])),
            ("time saved", _duration(values["saved_ms"] / 1e3)),
            ("KV written", size(values["written_bytes"])),
            ("KV evicted", size(values["evicted_bytes"])),
            ("blocks refused", count(values["refused_blocks"])),
            ("turns with notices", count(values["turns_with_notices"])),
        ]
    )


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
        for name in ("reused", "loaded", "computed", "generated"):
            sums[f"tokens_{name}"] += tokens.get(name, 0)
        sums["bytes_loaded"] += turn.get("loaded_bytes", 0)
        if loaded and again_ms is not None:
            sums["saved_ms"] += max(0.0, again_ms - plan.get("actual_ms", again_ms))
        sums["turns_with_notices"] += bool(turn.get("notices"))
    return sums


def _share(part: int, whole: int) -> str:
    return f"{count(part)} of {count(whole)}" + (f" ({part / whole:.0%})" if whole else "")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
