"""`chatkv cache pin` and `unpin`: which conversations are never evicted."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from chatkv.cli.output import Output, output_options, plural
from chatkv.cli.stores import complete_session, open_conversations, open_to_remove, users

if TYPE_CHECKING:
    from chatkv_store.conversations import Conversations

SESSIONS = click.argument(
    "sessions", shell_complete=complete_session, nargs=-1, required=True, metavar="SESSION..."
)


@click.command()
@SESSIONS
@output_options
def pin(output: Output, sessions: tuple[str, ...]) -> None:
    """Never evict or prune the KV of these conversations.

    Where everything is pinned and the cache is full, new KV is not kept.
    """
    _set(output, sessions, pinned=True)


@click.command()
@SESSIONS
@output_options
def unpin(output: Output, sessions: tuple[str, ...]) -> None:
    """Let the KV of these conversations be evicted again."""
    _set(output, sessions, pinned=False)


def _set(output: Output, sessions: tuple[str, ...], *, pinned: bool) -> None:
    with open_conversations() as store, ExitStack() as open_here:
        blocks = None
        if not _are_conversations(store, sessions):  # what stands for them is in the cache itself
            blocks = open_to_remove()
        if blocks is not None:
            open_here.enter_context(blocks)
        logs = users(blocks, store)
        found = {one.id: one for one in map(logs.get_session, sessions)}
        for one in found.values():
            logs.pin(one, pinned)
    if output.is_human:
        output.note(f"{'pinned' if pinned else 'unpinned'} {plural(len(found), 'session')}")
    else:
        output.record({"sessions": list(found), "pinned": pinned})


def _are_conversations(store: Conversations, sessions: tuple[str, ...]) -> bool:
    from chatkv_store.errors import SessionNotFound

    try:
        return all(store.get_session(one) for one in sessions)
    except SessionNotFound:
        return False
