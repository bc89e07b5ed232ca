"""This design as a tier of a replay: the real store, with its budget, sharing and eviction.

SQLite holds the logs and BlockStore finds, writes and evicts blocks, in a temporary folder. Only
the KV is not real. So that a replay writes megabytes and not gigabytes, a token's KV is a few zeros
(LAYOUT), and the cap is scaled by the same factor: where the model's token takes 15.7 kB on disk
and ours 504 bytes, a cap of 2 GiB becomes one of 66 MiB. Bytes are reported at the model's size.

What the store takes whatever its size, its lock file and the pages that stay spare, does not shrink
along, so it is added to the scaled cap: of the real one it is a thousandth. Headers do not shrink
either. They take 2 % of ours, of the real one nothing, and that counts against this design.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from tiers import Counts, Machine, NoPersistence, Served, spend
from traces import TraceConversation

from chatkv.restore.plan import Situation, survey
from chatkv_store import room
from chatkv_store.blocks import BlockStore, NewBlock, StoredBlock
from chatkv_store.budget import Budget
from chatkv_store.conversations import Conversations
from chatkv_store.errors import StoreFull
from chatkv_store.keys import block_key, namespace
from chatkv_store.layout import BLOCK_TOKENS, KVLayout

# A full block's value fills eight of LMDB's pages but for 2 %.
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=126, dtype="bfloat16")
SPACE = namespace(b"replay", b"replay", LAYOUT, "lossless")
_ZEROS = np.zeros(LAYOUT.value_shape(0, BLOCK_TOKENS), LAYOUT.bits_dtype)


class Blocks(NoPersistence):
    """This design: blocks in the real store, which shares and evicts them, behind the real plan."""

    name = "chatkv"

    def __init__(self, machine: Machine, store: BlockStore, conversations: Conversations) -> None:
        super().__init__(machine)
        self.store, self.conversations = store, conversations
        self._sessions: dict[int, str] = {}
        self._turn_id = ""  # of the turn that is being served
        store.register(SPACE, {"layout": LAYOUT.to_json()})

    def serve(self, conversation: TraceConversation, turn: int, in_pool: int) -> Served:
        """As Restorer.plan and .restore do it, and every loaded block is really read."""
        total, history = conversation.prompt_end(turn), conversation.history(turn)
        ids = conversation.token_ids(total)
        self._begin(conversation, turn, ids)
        if history and in_pool >= history:
            return spend(Situation(total, in_pool, in_pool, history), self.machine.cost)
        match = self.store.match(SPACE, ids[:-1], LAYOUT)
        stored: list[StoredBlock | None] = list(match.blocks)
        if match.num_tokens < history:
            stored = self.store.locate(SPACE, ids[: min(history, total - 1)], LAYOUT)
        situation = survey(total, history, in_pool, match.num_tokens, stored)
        served = spend(situation, self.machine.cost)
        self._read(stored, served, situation)
        found = sum(block.num_tokens for block in stored if block and block.start >= in_pool)
        return replace(served, found=found)

    def save(self, conversation: TraceConversation, turn: int, in_pool: int) -> None:
        """As Saver does it: each block that the store has not, the unfinished last one too."""
        ids = conversation.token_ids(conversation.history(turn + 1))
        self._finish(conversation, turn, ids)
        parent = SPACE
        for start in range(0, len(ids), BLOCK_TOKENS):
            block_ids = ids[start : start + BLOCK_TOKENS]
            if start + BLOCK_TOKENS > in_pool:
                new = NewBlock(parent, block_ids, [_ZEROS[:, :, :, : len(block_ids)]], start)
                with suppress(StoreFull):  # counted by the store
                    self.store.put(SPACE, LAYOUT, [new], "raw")
            parent = block_key(parent, block_ids)

    def counts(self) -> Counts:
        done = self.store.counters()
        return Counts(
            done["written_bytes"] * self.machine.kv_bytes_per_token / LAYOUT.bytes_per_token,
            done["evicted_blocks"],
            done["refused_blocks"],
        )

    def _read(
        self, stored: Sequence[StoredBlock | None], served: Served, situation: Situation
    ) -> None:
        """Read what the plan loads; raises BlockMiss where the store does not hold what it says."""
        if not served.loaded:
            return
        stop = situation.both_range[1] if served.plan.chosen == "both" else situation.available
        stop = min(stop, situation.total - 1)
        for block in stored:
            if block and block.start + block.num_tokens > stop - served.loaded:
                self.store.read(block, 0, np.empty_like(_ZEROS))

    def _begin(self, conversation: TraceConversation, turn: int, ids: Sequence[int]) -> None:
        """Commit the message, before anything is computed: eviction goes by the logs."""
        if not turn:
            session = self.conversations.create_session(title="replay", namespace=SPACE.hex())
            self._sessions[conversation.number] = session.id
        session_id = self._sessions[conversation.number]
        with self.conversations.lease(session_id):
            self._turn_id = self.conversations.begin_turn(
                session_id, user_text="", prompt_ids=ids[conversation.history(turn) :]
            ).id

    def _finish(self, conversation: TraceConversation, turn: int, ids: Sequence[int]) -> None:
        self.conversations.finish_turn(
            self._turn_id,
            reply_text="",
            reply_ids=ids[conversation.prompt_end(turn) :],
            rng_draws_after=0,
        )


@contextmanager
def open_blocks(machine: Machine, clock: Callable[[], float]) -> Iterator[Blocks]:
    """A new store under the machine's cap; StoreError where that is too little to open one."""
    with (
        tempfile.TemporaryDirectory(prefix="chatkv-replay-", dir=_folder()) as folder,
        Conversations(Path(folder) / "conversations.sqlite3", clock=clock) as conversations,
        BlockStore(
            Path(folder) / "kv",
            budget=Budget(None if math.isinf(machine.cap_bytes) else scaled_cap(machine)),
            conversations=conversations,
            start_map_bytes=1 << 20,
            clock=clock,  # the trace's: how busy this machine is decides nothing
        ) as store,
    ):
        yield Blocks(machine, store, conversations)


def scaled_cap(machine: Machine) -> int:
    """The machine's cap at the size of LAYOUT, and the store's own fixed bytes."""
    scaled = machine.cap_bytes * LAYOUT.bytes_per_token / machine.kv_bytes_per_token
    with_spare = min(scaled + room.MAX_SPARE_BYTES, scaled * 8 / 7)  # as Room keeps them
    return room.LOCK_BYTES + int(with_spare)


def _folder() -> str | None:
    """Memory where there is plenty of it: nothing of a replay has to last, and every block is a
    commit that a disk would take milliseconds for."""
    shared = "/dev/shm"
    with suppress(OSError):
        if shutil.disk_usage(shared).free > 4 << 30:
            return shared
    return None
