"""Forgetting a conversation: its words, the KV that only it has, and what the files keep of both.

A block goes where it holds any token that this conversation has said, unless the whole of it is
also in another conversation (a fork, an equal system prompt). What hangs below a block that goes
holds more of the same text, and goes too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chatkv_store.blocks import BlockStore
from chatkv_store.conversations import Conversations
from chatkv_store.erasing import erase
from chatkv_store.header import BlockHeader
from chatkv_store.keys import ID_BYTES, chain_keys, pack_ids
from chatkv_store.layout import KVLayout
from chatkv_store.sharing import known_layouts
from chatkv_store.tables import DATABASES


@dataclass(frozen=True)
class Forgotten:
    """What is gone, and what remains because others share it; bytes are of encoded KV."""

    num_turns: int
    num_blocks: int
    num_bytes: int
    num_shared_turns: int
    num_shared_blocks: int
    num_shared_bytes: int
    num_kept_bytes: int  # of free pages that another process may still be reading


def forget(conversations: Conversations, blocks: BlockStore | None, session_id: str) -> Forgotten:
    """Delete the session and its unshared KV, and overwrite what the files still hold of them.

    KV first: a process that dies in between has lost no word, and can be told again. StoreBusy
    where the session is in use.
    """
    gone: list[BlockHeader] = []
    shared: list[BlockHeader] = []
    with conversations.lease(session_id):
        num_turns = conversations.get_session(session_id).num_turns
        if blocks is not None:
            gone, shared = _divide(conversations, blocks, session_id)
            blocks.remove([header.key for header in gone])
    dropped = conversations.delete_session(session_id)
    kept = erase(blocks.env, DATABASES).num_kept_bytes if blocks is not None else 0
    return Forgotten(
        num_turns=dropped,
        num_blocks=len(gone),
        num_bytes=sum(header.num_payload_bytes for header in gone),
        num_shared_turns=max(0, num_turns - dropped),
        num_shared_blocks=len(shared),
        num_shared_bytes=sum(header.num_payload_bytes for header in shared),
        num_kept_bytes=kept,
    )


def _divide(
    conversations: Conversations, blocks: BlockStore, session_id: str
) -> tuple[list[BlockHeader], list[BlockHeader]]:
    """The blocks that hold something of the session: those that go, and those that stay."""
    own = conversations.token_logs(session_id)
    others = [
        log
        for session in conversations.list_sessions()
        if session.id != session_id
        for log in conversations.token_logs(session.id)
    ]
    gone: list[BlockHeader] = []
    shared: list[BlockHeader] = []
    for namespace, layout in known_layouts(blocks).items():
        ours = _continuations(namespace, own, layout)
        theirs = _continuations(namespace, others, layout)
        below: dict[bytes, list[BlockHeader]] = {}
        touched: list[BlockHeader] = []
        for header in blocks.headers(namespace):
            below.setdefault(header.parent, []).append(header)
            first_id = header.ids[:ID_BYTES]
            if any(rest.startswith(first_id) for rest in ours.get(header.parent, ())):
                touched.append(header)
        going: dict[bytes, BlockHeader] = {}
        while touched:
            header = touched.pop()
            if header.key in going:
                continue
            if any(rest.startswith(header.ids) for rest in theirs.get(header.parent, ())):
                shared.append(header)
                continue
            going[header.key] = header
            touched += below.get(header.key, [])
        gone += going.values()
    return gone, list({header.key: header for header in shared}.values())


def _continuations(
    namespace: bytes, logs: Iterable[Sequence[int]], layout: KVLayout
) -> dict[bytes, list[bytes]]:
    """Parent's key -> the ids (packed, a block's worth at most) with which a log goes on there."""
    block_bytes = layout.block_tokens * ID_BYTES
    found: dict[bytes, list[bytes]] = {}
    for log in logs:
        packed = pack_ids(array("I", log))
        keys = [namespace, *chain_keys(namespace, log, layout.block_tokens)]
        for index, start in enumerate(range(0, len(packed), block_bytes)):
            found.setdefault(keys[index], []).append(packed[start : start + block_bytes])
    return found
