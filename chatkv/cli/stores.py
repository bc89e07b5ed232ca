"""Opening the two stores for commands that need no model, and naming a session to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from chatkv.paths import folders

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from chatkv_store.blocks import BlockStore
    from chatkv_store.conversations import Conversations

NOTHING_STORED = "the KV cache is empty: it fills as you chat"


def open_conversations() -> Conversations:
    """The conversations of this user; the file is made where it is missing."""
    from chatkv_store.conversations import Conversations

    return Conversations(folders().conversations)


def open_blocks(*, read_only: bool = True, replace_damaged: bool = False) -> BlockStore | None:
    """The KV cache, None where nothing has been stored yet."""
    from chatkv_store.blocks import BlockStore

    path = folders().kv
    if not (path / "data.mdb").is_file():
        return None
    return BlockStore(path, read_only=read_only, replace_damaged=replace_damaged)


def open_to_remove() -> BlockStore | None:
    """The KV cache for deleting from it, None where nothing has been stored yet.

    A deletion writes a few pages before it frees others, and must be possible in a full cache too.
    """
    from chatkv_store.blocks import BlockStore
    from chatkv_store.room import MAX_SPARE_BYTES

    data = folders().kv / "data.mdb"
    if not data.is_file():
        return None
    return BlockStore(folders().kv, max_bytes=data.stat().st_size + MAX_SPARE_BYTES)


def open_to_add(conversations: Conversations) -> BlockStore:
    """The KV cache within its budget, made where it is missing."""
    from chatkv_store.blocks import BlockStore
    from chatkv_store.budget import default_budget

    path = folders().make().kv
    return BlockStore(path, budget=default_budget(path), conversations=conversations)


def complete_session(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[Any]]:
    """For the shell: ids, with titles as hints. A broken store completes nothing."""
    from contextlib import suppress

    from click.shell_completion import CompletionItem

    from chatkv_store.errors import StoreError

    with suppress(StoreError), open_conversations() as store:
        short = store.short_ids()
        return [
            CompletionItem(short[session.id], help=session.title)
            for session in store.list_sessions()
            if session.id.startswith(incomplete.lower())
        ]
    return []
