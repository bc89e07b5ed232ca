"""`chatkv cache pin` and `unpin`: which conversations are never evicted."""

from __future__ import annotations

import click

from chatkv.cli.output import Output, output_options, plural
from chatkv.cli.stores import complete_session, open_conversations

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
    with open_conversations() as store:
        found = list({one.id: one for one in map(store.get_session, sessions)})
        for session_id in found:
            store.update_session(session_id, pinned=pinned)
    if output.is_human:
        output.note(f"{'pinned' if pinned else 'unpinned'} {plural(len(found), 'session')}")
    else:
        output.record({"sessions": found, "pinned": pinned})
