"""`chatkv sessions`: list, search, read, rename, delete, fork and move conversations; no model."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from chatkv.cli import sessions_transfer
from chatkv.cli.output import (
    Output,
    ago,
    count,
    output_options,
    plural,
    printable,
    size,
    when,
)
from chatkv.cli.stores import complete_session, open_conversations, open_to_remove
from chatkv.cli.table import Column
from chatkv.errors import UsageError
from chatkv.paths import folders
from chatkv_store.errors import StoreError

if TYPE_CHECKING:
    from chatkv_store.conversations import Session, Turn

LIMIT = click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=20,
    metavar="N",
    help="At most N [20], 0 for all.",
)
SESSION = click.argument("session", shell_complete=complete_session, metavar="SESSION")


@click.group()
def sessions() -> None:
    """List, search, read, rename, delete, fork, export and import conversations.

    SESSION is an id, the start of one (4 characters or more) or an exact title.
    """


sessions.add_command(sessions_transfer.export)
sessions.add_command(sessions_transfer.import_)


@sessions.command()
@LIMIT
@click.option("-q", "--quiet", is_flag=True, help="Print ids only.")
@output_options
def ls(output: Output, limit: int, quiet: bool) -> None:
    """List conversations, those used last first."""
    with open_conversations() as store:
        short = store.short_ids()
        rows = [session.to_json() for session in store.list_sessions(limit or None)]
    if quiet:
        for row in rows:
            click.echo(row["session"])
        return
    output.rows(
        rows,
        [
            Column("ID", lambda row: short[row["session"]], colour="cyan"),
            Column("TITLE", lambda row: printable(row["title"]) or "untitled", is_flexible=True),
            Column("TURNS", lambda row: count(row["turns"]), is_number=True),
            Column("TOKENS", lambda row: count(row["tokens"]), is_number=True),
            Column("MODEL", lambda row: row["model"], is_flexible=True),
            Column("USED", lambda row: ago(row["updated_at"])),
        ],
        empty="no sessions yet: start one with `chatkv chat`",
    )
    if output.is_human and len(rows) < len(short):
        output.note(f"{len(rows)} of {plural(len(short), 'session')}; --limit 0 lists all")


@sessions.command()
@click.argument("text", nargs=-1, required=True)
@LIMIT
@output_options
def search(output: Output, text: tuple[str, ...], limit: int) -> None:
    """Find conversations by what was said, or by their titles.

    Every word of TEXT must occur in one turn (or in the title); accents and case do not matter.
    """
    wanted = " ".join(text)
    with open_conversations() as store:
        short = store.short_ids()
        hits = store.search(wanted, limit or None)
    rows = [
        {
            "session": hit.session.id,
            "title": hit.session.title,
            "turn": hit.turn_index,
            "hits": hit.num_hits,
            "snippet": hit.snippet,
            "updated_at": hit.session.updated_at,
        }
        for hit in hits
    ]
    words = tuple(wanted.split())
    output.rows(
        rows,
        [
            Column("ID", lambda row: short[row["session"]], colour="cyan"),
            Column("TURN", lambda row: str(row["turn"] or "title"), is_number=True),
            Column("HITS", lambda row: count(row["hits"]), is_number=True),
            Column(
                "TEXT", lambda row: printable(row["snippet"]), is_flexible=True, highlight=words
            ),
            Column("USED", lambda row: ago(row["updated_at"])),
        ],
        empty=f'nothing found for "{printable(wanted)}"',
    )


@sessions.command()
@SESSION
@output_options
def show(output: Output, session: str) -> None:
    """Print a whole conversation."""
    with open_conversations() as store:
        with suppress(StoreError):  # a file that can only be read can still be shown
            store.recover()  # say "interrupted" of a turn whose process is gone
        found = store.get_session(session)
        exported, turns = store.export_text(found.id), store.chain(found.id)
    if not output.is_human:
        output.record(exported)
        return
    output.line(printable(found.title) or "untitled", bold=True)
    output.fields(
        [
            ("id", found.id),
            ("model", found.model),
            ("length", f"{plural(found.num_turns, 'turn')}, {plural(found.num_tokens, 'token')}"),
            ("created", when(found.created_at)),
            ("used", when(found.updated_at)),
            ("pinned", "yes" if found.pinned else ""),
        ]
    )
    for turn in turns:
        _show_turn(output, turn)


@sessions.command()
@SESSION
@click.argument("title")
@output_options
def rename(output: Output, session: str, title: str) -> None:
    """Give a conversation another title."""
    if not title.strip():
        raise UsageError("a title needs at least one character")
    with open_conversations() as store:
        renamed = store.rename(store.get_session(session).id, title)
    if output.is_human:
        output.note(f'{renamed.id} is now "{printable(renamed.title)}"')
    else:
        output.record(renamed.to_json())


@sessions.command()
@click.argument(
    "session", shell_complete=complete_session, nargs=-1, required=True, metavar="SESSION..."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output_options
def rm(output: Output, session: tuple[str, ...], yes: bool) -> None:
    """Delete conversations for good.

    Turns that a fork still uses stay with the fork. The KV cache is another matter: see
    `chatkv cache`.
    """
    from chatkv.client import engine

    with open_conversations() as store:
        found = {one.id: one for one in map(store.get_session, session)}
        if not yes:
            _ask_before_deleting(list(found.values()))
        num_turns = 0
        for session_id in found:
            engine.release(folders(), session_id)
            num_turns += store.delete_session(session_id)
    if output.is_human:
        output.note(f"deleted {plural(len(found), 'session')}, {plural(num_turns, 'turn')}")
    else:
        output.record({"deleted": list(found), "turns": num_turns})


@sessions.command()
@SESSION
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output_options
def forget(output: Output, session: str, yes: bool) -> None:
    """Delete a conversation with its KV, and overwrite what the files keep of both.

    What other conversations share stays, and is said. Backups and what the disk itself keeps of
    overwritten sectors are beyond this program.
    """
    from chatkv.client import engine
    from chatkv_store.forgetting import forget

    with open_conversations() as store, ExitStack() as opened:
        found = store.get_session(session)
        if not yes:
            _ask_before_deleting([found])
        engine.release(folders(), found.id)
        blocks = open_to_remove()
        if blocks is not None:
            opened.enter_context(blocks)
        done = forget(store, blocks, found.id)
    if not output.is_human:
        output.record({"forgotten": found.id, **asdict(done)})
        return
    output.note(
        f"forgot {plural(done.num_turns, 'turn')} and {size(done.num_bytes)} of KV, overwritten"
    )
    if done.num_shared_turns or done.num_shared_blocks:
        output.note(
            f"{plural(done.num_shared_turns, 'turn')} and {size(done.num_shared_bytes)} of KV "
            "remain: other conversations share them"
        )
    if done.num_kept_bytes:
        output.note(
            f"{size(done.num_kept_bytes)} of the KV file are still being read by another process "
            "and not overwritten yet: forget anything else later, or run `chatkv cache compact`"
        )


@sessions.command()
@SESSION
@click.option("--at", type=int, metavar="TURN", help="Keep the turns up to this one; 0 keeps none.")
@click.option("--title", help="Title of the new session [default: the old one's, marked].")
@output_options
def fork(output: Output, session: str, at: int | None, title: str | None) -> None:
    """Begin a new conversation with the turns of another.

    Prints the id of the new one. Nothing is copied: turns and their KV are shared.
    """
    with open_conversations() as store:
        made = store.fork(store.get_session(session).id, at, title=title)
    if output.is_human:
        click.echo(made.id)
        output.note(f'"{printable(made.title)}" shares {plural(made.num_turns, "turn")}')
    else:
        output.record(made.to_json())


def _show_turn(output: Output, turn: Turn) -> None:
    output.line()
    if turn.system_text:
        output.line(f"system  {printable(turn.system_text)}", dim_chars=6)
        output.line()
    output.line(f"{turn.index}> {printable(turn.user_text)}", bold=True)
    if turn.reply_text:
        output.line(printable(turn.reply_text))
    left_out = turn.stats.get("imported", {}).get("left_out", {})
    if left_out:
        listed = ", ".join(f"{number} × {printable(kind)}" for kind, number in left_out.items())
        output.line(f"[not imported: {listed}]", dim_chars=80)
    if turn.state != "done":
        output.line(f"[{turn.state}]", dim_chars=20)
    elif turn.finish_reason == "length":
        output.line("[stopped at the token limit]", dim_chars=40)


def _ask_before_deleting(found: list[Session]) -> None:
    """Show what would go; exit unless a person at a terminal agrees."""
    for one in found:
        click.echo(f'{one.id}  "{printable(one.title)}"  {plural(one.num_turns, "turn")}', err=True)
    what = f"{plural(len(found), 'session')} for good"
    if not sys.stdin.isatty():
        raise UsageError(f"not deleting {what} without a terminal to ask at: add -y")
    if not click.confirm(f"Delete {what}?", err=True):
        raise SystemExit(1)
