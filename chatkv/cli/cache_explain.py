"""`chatkv cache explain`: what of a conversation is stored, what is not and why, who shares it."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chatkv.cli.cache_request import request_options
from chatkv.cli.output import Output, count, output_options, plural, printable, size
from chatkv.cli.stores import complete_session, open_blocks, open_conversations, users
from chatkv.cli.table import Column
from chatkv.errors import UsageError

if TYPE_CHECKING:
    from chatkv_store.coverage import Stretch

REASONS = {  # what the store counts -> why something may be missing
    "evicted_blocks": "evicted to make room",
    "refused_blocks": "refused for want of room",
    "dropped_blocks": "dropped because the disk could not follow",
}


@click.command()
@click.argument("session", shell_complete=complete_session, required=False, metavar="[SESSION]")
@request_options
@output_options
def explain(
    output: Output, session: str | None, file: Path | None, model: str | None, dtype: str
) -> None:
    """Explain what of a conversation is stored, what is not and why, and who shares it.

    What is stored need not be computed when the conversation goes on. Looks at what blocks say of
    themselves; `chatkv cache verify SESSION` reads all of their bytes, and `chatkv why` tells how a
    turn was restored.

    With --messages, explain what a client of `chatkv serve` would find that sends all of its
    conversation with each request and has no token: which messages are known, and what was said
    here where they end. --model and --dtype say what it asks.
    """
    if file is not None and session is None:
        from chatkv.cli.cache_request import explain_request

        explain_request(output, file, model, dtype)
        return
    if session is None or file is not None:
        raise UsageError("name either a conversation, or --messages FILE")
    from chatkv_store.coverage import Stretch, stretches
    from chatkv_store.logs import is_use

    with open_conversations() as store, ExitStack() as open_here:
        blocks = open_blocks()
        if blocks is not None:
            open_here.enter_context(blocks)
        logs = users(blocks, store)
        found = logs.get_session(session)
        turn_ends = [found.num_tokens]
        if not is_use(found):
            turns = store.chain(found.id)
            turn_ends = list(accumulate(len(one.prompt_ids) + len(one.reply_ids) for one in turns))
        titles = {one.id: printable(one.title) or "untitled" for one in logs.list_sessions()}
        if blocks is None:
            pieces = [Stretch(0, found.num_tokens, why="the KV cache is empty")]
            counters = dict.fromkeys(REASONS, 0)
        else:
            pieces = stretches(blocks, store, found)
            counters = {name: blocks.counters()[name] for name in REASONS}
    pieces = [piece for piece in pieces if piece.num_tokens]
    rows = [_row(piece, turn_ends) for piece in pieces]
    stored = sum(piece.num_tokens for piece in pieces if piece.why is None)
    if not output.is_human:
        output.record(
            {
                "session": found.id,
                "title": found.title,
                "model": found.model,
                "tokens": found.num_tokens,
                "stored_tokens": stored,
                "missing_tokens": found.num_tokens - stored,
                "bytes": sum(piece.num_bytes for piece in pieces),
                **counters,
                "stretches": rows,
            }
        )
        return
    output.line(titles[found.id], bold=True)
    if not rows:
        output.note("nothing has been said in it yet")
        return
    output.line(_summary(found.num_tokens, stored, pieces))
    output.line()
    output.table(
        rows,
        [
            Column("FROM", lambda row: count(row["start"]), is_number=True),
            Column("TOKENS", lambda row: count(row["tokens"]), is_number=True),
            Column("TURNS", lambda row: _span(*row["turns"]), is_extra=True),
            Column(
                "SIZE",
                lambda row: size(row["bytes"]) if row["stored"] else "",
                is_number=True,
                is_extra=True,
            ),
            Column("KV", lambda row: _kv(row, titles), is_flexible=True),
        ],
    )
    if any(row["why"] == "not stored" for row in rows):
        happened = [
            f"{plural(counters[name], 'block')} {reason}"
            for name, reason in REASONS.items()
            if counters[name]
        ]
        if happened:
            output.note(f"this cache, so far: {', '.join(happened)}")


def _row(piece: Stretch, turn_ends: list[int]) -> dict[str, Any]:
    """What programs get of a stretch; turns count from 1."""
    first, last = (
        sum(end <= position for end in turn_ends) + 1 for position in (piece.start, piece.end - 1)
    )
    return {
        "start": piece.start,
        "end": piece.end,
        "tokens": piece.num_tokens,
        "turns": [first, last],
        "stored": piece.why is None,
        "blocks": len(piece.blocks),
        "bytes": piece.num_bytes,
        "shared_with": list(piece.sharers),
        "why": piece.why,
    }


def _summary(num_tokens: int, stored: int, pieces: list[Stretch]) -> str:
    if not stored:
        return f"nothing of its {plural(num_tokens, 'token')} is stored; no word is lost by that"
    num_bytes = sum(piece.num_bytes for piece in pieces)
    return f"{count(stored)} of {plural(num_tokens, 'token')} stored, {size(num_bytes)}"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _kv(row: dict[str, Any], titles: dict[str, str]) -> str:
    if not row["stored"]:
        return str(row["why"])
    if not row["shared_with"]:
        return "stored"
    others = [f'"{titles[one]}"' for one in row["shared_with"]]
    return f"shared with {f'{len(others)}: ' if len(others) > 1 else ''}{', '.join(others)}"
