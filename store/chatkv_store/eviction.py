"""What goes first when there is no room: the least seconds saved per byte, by the odds of a resume.

    worth(block) = prefill seconds of its tokens, summed over its sessions by the odds of a resume
    seconds      = alpha * n + beta * (e^2 - s^2) / 2     tokens s..e of a sequence, as restore's
    odds         = 1 / (1 + hours since the session's last use)

alpha and beta are those of the block's model, where the store is told them (`PrefillRates`).
Seconds grow with the position, since a later token attends to more: so of one session the front
goes first, which is also what a restore from both ends computes fastest. Blocks of a pinned session
never go. A block that no session finds (of a deleted one, of an undone turn) is worth little.

Last use is the session's own record, so no read of KV ever has to write. Nothing is kept on disk
either: what a process has once derived from logs and headers it remembers, and looks again only at
what has changed since.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from chatkv_store import header as headers
from chatkv_store.blocks import AT_ONCE
from chatkv_store.environment import PAGE_BYTES
from chatkv_store.header import HeaderDamaged
from chatkv_store.keys import ID_BYTES, KEY_BYTES, chain_keys, pack_ids
from chatkv_store.logs import Logs
from chatkv_store.room import pages_of
from chatkv_store.sharing import known_layouts
from chatkv_store.tables import common_tokens

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore
    from chatkv_store.conversations import Conversations, Session
    from chatkv_store.layout import KVLayout

UNUSED_ODDS = 0.01  # of a block that no session finds, beside one of a session of its age

# A namespace -> alpha and beta, the seconds per token and per pair of tokens that prefill of its
# model takes on this machine; None where that is not known. Asked at every ranking.
PrefillRates = Callable[[bytes], tuple[float, float] | None]
DEFAULT_RATES = (500e-6, 50e-9)  # attention doubles a token's work at 10k


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored block that may go."""

    key: bytes
    namespace: bytes
    num_bytes: int  # payload bytes
    disk_bytes: int  # of the whole pages that its values fill
    worth: float  # expected seconds saved per byte
    last_use: float | None  # of the sessions that find it, in epoch seconds; None: none does


@dataclass(frozen=True)
class Ranking:
    """Stored blocks that may go, and what blocks are worth."""

    seconds: dict[bytes, float] = field(repr=False)  # expected seconds saved, by key
    _last_use: dict[bytes, float] = field(repr=False)
    _stored: dict[bytes, _Stored] = field(repr=False)
    _heap: list[tuple[float, bytes]] = field(repr=False)  # worth and key

    def candidates(self) -> Iterator[Candidate]:
        """The least worthy first; each is looked for when it is asked for, and handed out once."""
        while self._heap:
            worth, key = heapq.heappop(self._heap)
            is_ = self._stored[key]
            used = self._last_use.get(key)
            yield Candidate(key, is_.namespace, is_.num_bytes, is_.disk_bytes, worth, used)


def rank(store: BlockStore, conversations: Conversations, now_s: float | None = None) -> Ranking:
    """Rank every stored block, once; reads logs and headers, never values."""
    return Ranker(store, conversations).rank(now_s)


def odds(age_s: float) -> float:
    """Of a resume soon; a session that a clock going backwards left in the future is new."""
    return 1 / (1 + max(0.0, age_s) / 3600)


def prefill_s(
    start: int,
    num_tokens: int,
    rates: tuple[float, float] = DEFAULT_RATES,
) -> float:
    """Seconds to compute `num_tokens` tokens from position `start`, with alpha and beta."""
    alpha, beta = rates
    return alpha * num_tokens + beta * num_tokens * (start + num_tokens / 2)


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a ranking needs of a header."""

    namespace: bytes
    parent: bytes
    ids: bytes
    created: float
    num_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class _Log:
    """The blocks that a session's log makes, stored or not."""

    version: tuple[object, ...]  # differs from that of any other log of the session
    keys: bytes  # one after another: half the memory that a list of them takes
    first_ids: bytes  # of the first block, packed
    last_ids: bytes


class Ranker:
    """Ranks the blocks of `store`. A call looks at what has changed since the one before, and takes
    a microsecond or two for each other block; the first one reads everything."""

    def __init__(self, store: BlockStore, conversations: Conversations) -> None:
        self._store = store
        self._logs_here = Logs(store, conversations)
        self._stored: dict[bytes, _Stored] = {}
        self._children: defaultdict[bytes, list[tuple[bytes, bytes]]] = defaultdict(list)
        self._logs: dict[str, _Log] = {}  # by session id

    def rank(self, now_s: float | None = None, also: Collection[bytes] = ()) -> Ranking:
        """Rank every stored block; `also` are keys of others whose `seconds` are wanted."""
        now_s = self._logs_here.now_s() if now_s is None else now_s
        self._look_at_blocks()
        layouts = known_layouts(self._store)
        rates = {space: self._rates(space) for space in layouts}
        seconds: defaultdict[bytes, float] = defaultdict(float)
        last_use: dict[bytes, float] = {}
        pinned: set[bytes] = set()
        logs: dict[str, _Log] = {}
        for session in self._logs_here.list_sessions():
            space = bytes.fromhex(session.namespace or "")
            if space not in layouts:
                continue
            log = logs[session.id] = self._log(session, space, layouts[space])
            chance, used = odds(now_s - session.updated_at), session.updated_at
            first_s = prefill_s(0, block_tokens := layouts[space].block_tokens, rates[space])
            more_s = rates[space][1] * block_tokens**2
            for key, index, num_tokens in self._found(session, space, log, block_tokens, also):
                if num_tokens == block_tokens:
                    saved_s = first_s + index * more_s
                else:
                    saved_s = prefill_s(index * block_tokens, num_tokens, rates[space])
                seconds[key] += chance * saved_s
                if last_use.get(key, -inf) < used:
                    last_use[key] = used
                if session.pinned:
                    pinned.add(key)
        self._logs = logs
        heap = []
        for key, stored in self._stored.items():
            if key in pinned:
                continue
            worth = seconds.get(key)
            if worth is None:
                own_rates = rates.get(stored.namespace, DEFAULT_RATES)
                worth = prefill_s(0, len(stored.ids) // ID_BYTES, own_rates)
                worth *= UNUSED_ODDS * odds(now_s - stored.created)
            heap.append((worth / max(1, stored.num_bytes), key))
        heapq.heapify(heap)
        return Ranking(dict(seconds), last_use, self._stored, heap)

    def _rates(self, namespace: bytes) -> tuple[float, float]:
        asked = self._store.prefill_rates
        return (asked and asked(namespace)) or DEFAULT_RATES

    def _found(
        self,
        session: Session,
        space: bytes,
        log: _Log,
        block_tokens: int,
        also: Collection[bytes],
    ) -> Iterator[tuple[bytes, int, int]]:
        """Every block of the session that is stored or in `also`: key, place in the log, and how
        many of its tokens the session has, as `BlockStore.locate` finds them."""
        keys, stored, children = log.keys, self._stored, self._children
        last = len(keys) - KEY_BYTES
        token_ids: array[int] | None = None
        for index, at in enumerate(range(0, len(keys), KEY_BYTES)):
            key = keys[at : at + KEY_BYTES]
            if key in stored or key in also:
                yield key, index, block_tokens if at < last else len(log.last_ids) // ID_BYTES
            if key in stored:
                continue
            siblings = children.get(keys[at - KEY_BYTES : at] if at else space)
            if siblings is None:
                continue
            # Rare but at the first place, where all chats with one system prompt share some tokens.
            if at == last or not at:
                ids = log.last_ids if at else log.first_ids
            else:
                token_ids = token_ids or self._logs_here.token_log(session)
                ids = pack_ids(token_ids[index * block_tokens : (index + 1) * block_tokens])
            key, shared = _sharing_most(siblings, ids)
            if shared:
                yield key, index, shared

    def _log(self, session: Session, space: bytes, layout: KVLayout) -> _Log:
        """The session's log, read only where it is not the one of the call before."""
        version = (space, session.head, session.num_tokens, session.updated_at)
        known = self._logs.get(session.id)
        if known is not None and known.version == version:
            return known
        token_ids = self._logs_here.token_log(session)
        keys = chain_keys(space, token_ids, layout.block_tokens)
        last = max(0, len(keys) - 1) * layout.block_tokens
        first_ids, last_ids = token_ids[: layout.block_tokens], token_ids[last:]
        return _Log(version, b"".join(keys), pack_ids(first_ids), pack_ids(last_ids))

    def _look_at_blocks(self) -> None:
        """Know what is stored now; of all blocks that are known already, only keys are read."""
        gone = set(self._stored)
        for key, packed in self._new_blocks(gone):
            try:
                header = headers.unpack(packed)
            except HeaderDamaged:
                continue  # left to `verify`
            if header.key != key:
                continue
            self._stored[key] = _Stored(
                header.namespace,
                header.parent,
                header.ids,
                header.created,
                header.num_payload_bytes,
                sum(pages_of(value.num_bytes) * PAGE_BYTES for value in header.values),
            )
            insort(self._children[header.parent], (header.ids, key))
        for key in gone:
            stored = self._stored.pop(key)
            siblings = self._children[stored.parent]
            siblings.remove((stored.ids, key))
            if not siblings:
                del self._children[stored.parent]

    def _new_blocks(self, gone: set[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Keys and headers that are not known yet; takes those that still stand from `gone`."""
        last = b""
        while True:
            new: list[tuple[bytes, bytes]] = []
            with self._store.env.read() as txn, txn.cursor(self._store.db["blocks"]) as cursor:
                found = cursor.set_range(last + b"\0") if last else cursor.first()
                for _ in range(AT_ONCE):
                    if not found:
                        break
                    last = bytes(cursor.key())
                    if last in self._stored:
                        gone.discard(last)
                    else:
                        new.append((last, bytes(cursor.value())))
                    found = cursor.next()
            yield from new
            if not found:
                return


def _sharing_most(siblings: list[tuple[bytes, bytes]], ids: bytes) -> tuple[bytes, int]:
    """Of sorted (ids, key), the one that shares most leading tokens with `ids`, and how many."""
    at = bisect(siblings, (ids,))  # what shares most lies beside where `ids` would stand
    shared = {key: common_tokens(ids, theirs) for theirs, key in siblings[max(0, at - 1) : at + 1]}
    return max(shared.items(), key=lambda found: found[1])
