"""What of a conversation's log is stored, who shares it, and why the rest is not.

Reads headers, never values: whether a value is sound, `integrity` tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from chatkv_store import header as headers
from chatkv_store.blocks import BlockStore
from chatkv_store.chain import StoredBlock
from chatkv_store.conversations import Conversations, Session
from chatkv_store.header import HeaderDamaged
from chatkv_store.keys import chain_keys
from chatkv_store.logs import Logs
from chatkv_store.sharing import NEWEST, known_layouts, usage


@dataclass(frozen=True)
class Stretch:
    """Tokens [start, end) of a log, all of them stored for the same sessions, or none of them."""

    start: int
    end: int
    blocks: tuple[StoredBlock, ...] = ()
    sharers: tuple[str, ...] = ()  # ids of the other sessions that find all of `blocks`
    why: str | None = None  # it is not stored; None where it is

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_bytes(self) -> int:
        return sum(block.header.num_payload_bytes for block in self.blocks)


def stretches(store: BlockStore, conversations: Conversations, session: Session) -> list[Stretch]:
    """The whole log of `session`, cut as coarsely as what holds of it allows."""
    cut: list[Stretch] = []
    for one in _places(store, conversations, session):
        last = cut[-1] if cut else None
        if last is not None and (last.sharers, last.why) == (one.sharers, one.why):
            cut[-1] = replace(last, end=one.end, blocks=last.blocks + one.blocks)
        else:
            cut.append(one)
    if cut and cut[-1].why is not None and cut[-1].num_tokens == 1:
        cut[-1] = replace(cut[-1], why=NEWEST)
    return cut


def _places(store: BlockStore, conversations: Conversations, session: Session) -> Iterator[Stretch]:
    """Each block's place in the log: what is stored of it, and what is not."""
    token_ids = Logs(store, conversations).token_log(session)
    namespace = bytes.fromhex(session.namespace or "")
    layout = known_layouts(store).get(namespace)
    if layout is None:
        if token_ids:
            yield Stretch(0, len(token_ids), why="not stored: no model has kept KV for it")
        return
    finders = usage(store, conversations).finders
    located = store.locate(namespace, token_ids, layout)
    keys = chain_keys(namespace, token_ids, layout.block_tokens)
    for index, (key, block) in enumerate(zip(keys, located, strict=True)):
        start = index * layout.block_tokens
        end = min(start + layout.block_tokens, len(token_ids))
        if block is not None:
            others = (one for one in finders.get(block.key, ()) if one != session.id)
            start += block.num_tokens
            yield Stretch(block.start, start, (block,), tuple(others))
        if start < end:
            yield Stretch(start, end, why=_why(store, key, block))


def _why(store: BlockStore, key: bytes, block: StoredBlock | None) -> str:
    """The block `key` is not there; `block` holds the front of its tokens."""
    with store.env.read() as txn:
        packed = txn.get(key, db=store.db["blocks"])
        packed = None if packed is None else bytes(packed)
    if packed is not None:
        try:
            headers.unpack(packed)
        except HeaderDamaged as error:
            return f"damaged: {error}"
        return "damaged: it belongs to another chain"
    if block is not None and block.num_tokens < block.header.num_tokens:
        return "not stored: other tokens follow there"
    return "not stored"
