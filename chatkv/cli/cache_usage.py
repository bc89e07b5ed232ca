"""`chatkv cache ls` and `show`: which conversation has how much stored, in which blocks."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from chatkv.cli.filters import Keys, select
from chatkv.cli.output import Output, ago, count, output_options, plural, printable, size, when
from chatkv.cli.stores import (
    NOTHING_STORED,
    complete_session,
    open_blocks,
    open_conversations,
    users,
)
from chatkv.cli.table import Column

if TYPE_CHECKING:
    from chatkv_store.conversations import Session
    from chatkv_store.sharing import Usage

KEYS: Keys = {
    "title": ("title", "text"),
    "model": ("model", "text"),
    "tokens": ("tokens", "number"),
    "stored": ("stored_tokens", "number"),
    "blocks": ("blocks", "number"),
    "size": ("bytes", "size"),
    "unique": ("unique_bytes", "size"),
    "shared": ("shared_bytes", "size"),
    "used": ("updated_at", "age"),
    "pinned": ("pinned", "flag"),
}


@click.command()
@click.argument("sessions", shell_complete=complete_session, nargs=-1, metavar="[SESSION]...")
@click.option("-q", "--quiet", is_flag=True, help="Print ids of sessions (keys of blocks) only.")
@click.option("--blocks", "--chunks", "by_block", is_flag=True, help="List each of their blocks.")
@click.option(
    "--filter", "filters", multiple=True, metavar="EXPR", help='Such as "size>100MiB" or "used>7d".'
)
@click.option("--sort", metavar="KEY[:asc|desc]", help="By a column, such as size or used.")
@click.option(
    "--limit", type=click.IntRange(min=0), default=0, metavar="N", help="At most N [0: all]."
)
@output_options
def ls(
    output: Output,
    sessions: tuple[str, ...],
    quiet: bool,
    by_block: bool,
    filters: tuple[str, ...],
    sort: str | None,
    limit: int,
) -> None:
    """List what is stored for each conversation, or for those named, by model.

    STORED tokens need not be computed again. UNIQUE is what this conversation alone uses, SHARED
    what forks of it, or an equal beginning, use as well. Filters choose conversations and may be
    given several times; their keys are title, model, tokens, stored, blocks, size, unique, shared,
    used and pinned.
    """
    from chatkv_store.sharing import usage

    select([], KEYS, filters, sort, 0, 0.0)  # nonsense is said before anything is read
    blocks = open_blocks()
    if blocks is None:
        output.rows([], [], empty=NOTHING_STORED)
        return
    with blocks, open_conversations() as store:
        logs = users(blocks, store)
        short = logs.short_ids()
        named = [logs.get_session(one) for one in dict.fromkeys(sessions)] or None
        found = usage(blocks, store, named)
        num_blocks, num_bytes = blocks.stats()["blocks"], blocks.stats()["used_bytes"]
    every = [share.to_json() for share in found.sessions]
    rows = select(every, KEYS, filters, sort, limit, time.time())
    if by_block:
        listed = {row["session"] for row in rows}
        chosen = [one.session for one in found.sessions if one.session.id in listed]
        _list_blocks(output, chosen, found, short, quiet)
        return
    if quiet:
        for row in rows:
            if row["blocks"]:
                click.echo(row["session"])
        return
    if not output.is_human:
        output.rows(rows, [])
        return
    columns = [
        Column("ID", lambda row: short[row["session"]], colour="cyan"),
        Column(
            "TITLE",
            lambda row: ("* " if row["pinned"] else "") + (printable(row["title"]) or "untitled"),
            is_flexible=True,
        ),
        Column("TOKENS", lambda row: count(row["tokens"]), is_number=True),
        Column("STORED", lambda row: count(row["stored_tokens"]), is_number=True),
        Column("BLOCKS", lambda row: count(row["blocks"]), is_number=True, is_extra=True),
        Column("UNIQUE", lambda row: size(row["unique_bytes"]), is_number=True, is_extra=True),
        Column("SHARED", lambda row: size(row["shared_bytes"]), is_number=True, is_extra=True),
        Column("USED", lambda row: ago(row["updated_at"]), is_extra=True),
    ]
    stored = [row for row in rows if row["blocks"]]
    output.rows(
        stored,
        columns,
        group=lambda row: row["model"] or "unknown model",
        empty="nothing is stored of these" if num_blocks else NOTHING_STORED,
    )
    if sessions:
        return
    used = len(found.used_keys)
    output.note(
        f"{plural(used, 'block')} of {plural(sum(bool(row['blocks']) for row in every), 'session')}"
        + (f", {count(num_blocks - used)} of none" if num_blocks > used else "")
        + f"; {size(num_bytes)} on disk"
        + ("; * pinned" if any(row["pinned"] for row in stored) else "")
    )


@click.command()
@click.argument("session", shell_complete=complete_session, metavar="SESSION")
@output_options
def show(output: Output, session: str) -> None:
    """Show what is stored for one conversation."""
    from chatkv_store.sharing import usage

    blocks = open_blocks()
    with open_conversations() as store:
        found = users(blocks, store).get_session(session)
        if blocks is None:
            output.note(NOTHING_STORED)
            raise SystemExit(1)
        with blocks:
            (share,) = usage(blocks, store, [found]).sessions
            info = blocks.namespaces().get(bytes.fromhex(found.namespace or ""), {})
    values = {
        **share.to_json(),
        "namespace": found.namespace,
        "raw_bytes": share.raw_bytes,
        "layout": json.loads(info["layout"]) if "layout" in info else None,
        "miss": share.miss,
    }
    if not output.is_human:
        output.record(values)
        return
    output.line(printable(found.title) or "untitled", bold=True)
    output.fields(
        [
            ("id", found.id),
            ("model", found.model),
            ("used", when(found.updated_at)),
            ("pinned", "yes" if found.pinned else ""),
            ("tokens", count(found.num_tokens)),
            ("stored", count(share.num_stored_tokens)),
            ("missing", share.miss or ""),
            ("blocks", count(share.num_blocks)),
            ("size", f"{size(share.num_bytes)}{ratio(share.raw_bytes, share.num_bytes)}"),
            ("unique", size(share.unique_bytes)),
            ("shared", size(share.shared_bytes)),
            ("namespace", found.namespace or ""),
        ]
    )


def _list_blocks(
    output: Output, sessions: list[Session], found: Usage, short: dict[str, str], quiet: bool
) -> None:
    """One row per block of each session, in the order of its tokens."""
    from chatkv_store import codec

    rows = []
    for session in sessions:
        for block in found.blocks[session.id]:
            coder = codec.by_id(block.header.codec)
            rows.append(
                {
                    "session": session.id,
                    "block": block.key.hex(),
                    "start": block.start,
                    "tokens": block.num_tokens,  # of this session; its block may hold more
                    "block_tokens": block.header.num_tokens,
                    "codec": coder.name if coder else str(block.header.codec),
                    "bytes": block.header.num_payload_bytes,
                    "raw_bytes": block.header.num_raw_bytes,
                    "created_at": block.header.created,
                    "shared_with": [one for one in found.finders[block.key] if one != session.id],
                }
            )
    if quiet:
        for key in dict.fromkeys(str(row["block"]) for row in rows):
            click.echo(key)
        return
    titles = {one.id: f"{short[one.id]} {printable(one.title) or 'untitled'}" for one in sessions}
    output.rows(
        rows,
        [
            Column("FROM", lambda row: count(row["start"]), is_number=True),
            Column("TOKENS", lambda row: count(row["tokens"]), is_number=True),
            Column("SIZE", lambda row: size(row["bytes"]), is_number=True),
            Column("CODEC", lambda row: row["codec"], is_extra=True),
            Column("BLOCK", lambda row: row["block"][:12], colour="cyan", is_extra=True),
            Column(
                "SHARED WITH",
                lambda row: ", ".join(short[one] for one in row["shared_with"]),
                is_flexible=True,
            ),
        ],
        empty="nothing is stored of these",
        group=lambda row: titles[row["session"]],
    )


def ratio(raw: int, encoded: int) -> str:
    return f" ({raw / encoded:.2f}x smaller than in memory)" if encoded else ""
