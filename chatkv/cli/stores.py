"""Opening the two stores for commands that need no model, and naming a session to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatkv.cli.complete import complete_session as complete_session
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore
    from chatkv_store.conversations import Conversations
    from chatkv_store.logs import Logs

NOTHING_STORED = "the KV cache is empty: it fills as you chat"


def is_stored() -> bool:
    """Whether there is a KV cache. StoreDamaged where something else has taken its place."""
    from chatkv_store.environment import DATA_FILE
    from chatkv_store.errors import StoreDamaged

    place = folders()
    for folder in (place.cache, place.kv):
        if folder.exists() and not folder.is_dir():
            raise StoreDamaged(f"{folder} is no folder, so nothing is cached: move it away")
    data = place.kv / DATA_FILE
    if data.exists() and not data.is_file():
        raise StoreDamaged(f"{data} is no file, so nothing is cached: move it away")
    return data.exists()


def open_conversations() -> Conversations:
    """The conversations of this user; the file is made where it is missing."""
    from chatkv_store.conversations import Conversations

    return Conversations(folders().conversations)


def users(blocks: BlockStore | None, conversations: Conversations) -> Logs:
    """Who may find these blocks: conversations, and requests of other engines."""
    from chatkv_store.logs import Logs

    return Logs(blocks, conversations)


def open_blocks(
    *, read_only: bool = True, replace_damaged: bool = False, thorough: bool = False
) -> BlockStore | None:
    """The KV cache, None where nothing has been stored yet."""
    from chatkv_store.blocks import BlockStore

    if not is_stored():
        return None
    return BlockStore(
        folders().kv, read_only=read_only, replace_damaged=replace_damaged, thorough=thorough
    )


def open_to_remove() -> BlockStore | None:
    """The KV cache for deleting from it, None where nothing has been stored yet.

    A deletion writes a few pages before it frees others, and must be possible in a full cache too.
    """
    from chatkv_store.blocks import BlockStore
    from chatkv_store.environment import DATA_FILE
    from chatkv_store.room import MAX_SPARE_BYTES

    if not is_stored():
        return None
    path = folders().kv
    return BlockStore(path, max_bytes=(path / DATA_FILE).stat().st_size + MAX_SPARE_BYTES)


def open_to_add(conversations: Conversations) -> BlockStore:
    """The KV cache within its budget, made where it is missing."""
    from chatkv_store.blocks import BlockStore
    from chatkv_store.budget import default_budget

    path = folders().make().kv
    return BlockStore(path, budget=default_budget(path), conversations=conversations)
