"""`chatkv cache stats`: how often stored KV was found, and what that was worth.

Derived from what was measured of each turn, which the conversations keep: nothing is counted on a
read. Only bytes written, evictions and what was not kept are counted in the store, with the write
itself. A reset sets these to nothing, and leaves out the turns before it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import click

from chatkv.cli.filters import parse_age
from chatkv.cli.output import Output, count, output_options, size, when
from chatkv.cli.stores import open_blocks, open_conversations, open_to_add
from chatkv.errors import UsageError
from chatkv.session.cache_summary import summary

WATCH_S = 2.0


@click.command()
@click.option("--since", metavar="AGE", help="Turns of the last so long only: 7d.")
@click.option("--reset", is_flag=True, help="Count from now on; no KV and no word is touched.")
@click.option(
    "--watch",
    type=click.FloatRange(min=0.1),
    is_flag=False,
    flag_value=WATCH_S,
    metavar="[SECONDS]",
    help="Show them again and again, until Ctrl-C.",
)
@output_options
def stats(output: Output, since: str | None, reset: bool, watch: float | None) -> None:
    """Show how often the cache helped, and how much.

    Turns of deleted conversations are not counted any more.
    """
    age_s = None if since is None else parse_age(since)
    if reset and (watch is not None or since is not None):
        raise UsageError("--reset goes without --since and --watch")
    if reset:
        _reset(output)
        return
    while True:
        values = _gathered(age_s)
        if watch is not None and _is_screen():
            click.clear()
        _show(output, values)
        if watch is None:
            return
        if output.is_human and not _is_screen():
            output.line()
        sys.stdout.flush()
        time.sleep(watch)


def _reset(output: Output) -> None:
    now_s = time.time()
    with open_conversations() as store, open_to_add(store) as blocks:
        blocks.reset_counters(now_s)
    if output.is_human:
        output.note("counting from now on")
    else:
        output.record({"since": now_s})


def _gathered(age_s: float | None) -> dict[str, Any]:
    """All that is shown: sums over turns since the last reset, or the last `age_s` seconds, and
    the store's counters."""
    from chatkv_store.tables import COUNTER_NAMES

    blocks = open_blocks()
    counters, reset_at = dict.fromkeys(COUNTER_NAMES, 0), None
    if blocks is not None:
        with blocks:
            counters, reset_at = blocks.counters(), blocks.counted_since()
    after = max(reset_at or 0.0, 0.0 if age_s is None else time.time() - age_s)
    with open_conversations() as store:
        values = summary(one for _, at, one in store.turn_stats() if at >= after)
    return {**values, **counters, "reset_at": reset_at}


def _show(output: Output, values: dict[str, Any]) -> None:
    if not output.is_human:
        output.record(values)
        return
    found = values["from_pool"] + values["from_disk"]
    output.fields(
        [
            ("counted since", when(values["reset_at"]) if values["reset_at"] else ""),
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
            ("blocks dropped", count(values["dropped_blocks"])),
            ("turns with notices", count(values["turns_with_notices"])),
        ]
    )


def _is_screen() -> bool:
    """Whether what was shown can be wiped."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _share(part: int, whole: int) -> str:
    return f"{count(part)} of {count(whole)}" + (f" ({part / whole:.0%})" if whole else "")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
