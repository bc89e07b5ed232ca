"""A store with a tiny cap against plain dicts, through random lives: saves, forks, pins, removals.

After every step: the files are within the cap, what is found is to the bit what was saved, pinned
sessions have lost nothing that was stored for them, and no block is counted for nobody.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chatkv_store import BlockStore, Conversations, StoreFull
from chatkv_store.budget import Budget
from chatkv_store.room import LOCK_BYTES
from chatkv_store.sharing import stored_blocks, usage
from kv_samples import SMALL, SPACE, chain

CAP = LOCK_BYTES + 1024 * 1024
B = SMALL.block_tokens


def kv(token_ids: list[int]) -> np.ndarray:
    """KV whose every token depends on all ids up to it, as real KV does; quick to make."""
    so_far = np.cumsum(np.array(token_ids, np.uint64) * np.uint64(2654435761)) & np.uint64(0xFFFF)
    other = np.arange(3 * 2 * 2, dtype=np.uint16).reshape(3, 2, 2, 1, 1)
    return so_far.astype("<u2").reshape(-1, 1) ^ (other + np.arange(8, dtype=np.uint16))


class BudgetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        # In memory where that is to be had: every commit waits for the disk.
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
        self.now_s = 1e9
        self.conversations = Conversations(self.folder / "c.sqlite3", clock=lambda: self.now_s)
        self.store = self.opened()
        self.store.register(SPACE, {"model": "Tiny", "layout": SMALL.to_json()})
        self.logs: dict[str, list[int]] = {}  # what each session has said
        self.kept: dict[str, set[bytes]] = {}  # of pinned sessions: keys stored for them
        self.next_id = 0

    def opened(self) -> BlockStore:
        return BlockStore(
            self.folder / "kv",
            budget=Budget(CAP),
            conversations=self.conversations,
            start_map_bytes=1 << 16,
        )

    def teardown(self) -> None:
        self.store.close()
        self.conversations.close()
        shutil.rmtree(self.folder)

    def session(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.logs)))

    @rule(num_tokens=st.integers(20 * B, 60 * B), shared=st.booleans())
    def begin(self, num_tokens: int, shared: bool) -> None:
        """A session begins, with a beginning that others have too or one of its own."""
        session = self.conversations.create_session(namespace=SPACE.hex(), title="t").id
        self.logs[session] = []
        front = [1] * min(num_tokens, 3 * B) if shared else []
        self.say(session, front + self.fresh(num_tokens - len(front)))

    @precondition(lambda self: self.logs)
    @rule(data=st.data(), num_tokens=st.integers(1, 10 * B))
    def go_on(self, data: st.DataObject, num_tokens: int) -> None:
        self.say(self.session(data), self.fresh(num_tokens))

    @precondition(lambda self: self.logs)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        origin = self.session(data)
        before = (self.folder / "kv" / "data.mdb").read_bytes()
        made = self.conversations.fork(origin)
        self.logs[made.id] = list(self.logs[origin])
        assert (self.folder / "kv" / "data.mdb").read_bytes() == before, "a fork writes no KV"

    @precondition(lambda self: self.logs)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        gone = self.session(data)
        self.conversations.delete_session(gone)
        del self.logs[gone]
        self.kept.pop(gone, None)

    @precondition(lambda self: self.logs)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        session = self.session(data)
        self.conversations.update_session(session, pinned=True)
        self.kept[session] = self.keys(session)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.kept)))
        self.conversations.update_session(session, pinned=False)
        del self.kept[session]

    @rule(hours=st.integers(1, 100))
    def wait(self, hours: int) -> None:
        self.now_s += hours * 3600

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.opened()

    @invariant()
    def within_the_cap(self) -> None:
        taken = sum(path.stat().st_size for path in (self.folder / "kv").iterdir())
        assert taken <= CAP

    @invariant()
    def never_wrong(self) -> None:
        assert self.store.verify() == []
        for session, log in self.logs.items():
            expected = kv(log)
            for block in self.blocks(session):
                place = slice(block.start, block.start + block.num_tokens)
                out = np.zeros_like(expected[:, :, :, place])
                self.store.read(block, 0, out)
                np.testing.assert_array_equal(out, expected[:, :, :, place])

    @invariant()
    def pinned_stays(self) -> None:
        stored = {header.key for header in self.store.headers()}
        for session, keys in self.kept.items():
            lost = keys - stored
            # A partial block may have become part of a longer one.
            assert len(lost) <= 1 and len(self.keys(session)) >= len(keys)

    @invariant()
    def counts_add_up(self) -> None:
        found = usage(self.store, self.conversations)
        num_bytes = {h.key: h.num_payload_bytes for h in self.store.headers()}
        finders = {session: self.keys(session) for session in self.logs}
        for share in found.sessions:
            mine = finders.pop(share.session.id)
            others = set().union(*finders.values()) if finders else set()
            unique = sum(num_bytes[key] for key in mine - others)
            assert share.unique_bytes == unique
            assert share.num_bytes == sum(num_bytes[key] for key in mine)
            finders[share.session.id] = mine
        assert found.used_keys == set().union(*finders.values(), set())

    def say(self, session: str, ids: list[int]) -> None:
        log = self.logs[session]
        with self.conversations.lease(session):
            turn = self.conversations.begin_turn(session, user_text="u", prompt_ids=ids)
            self.conversations.finish_turn(turn.id, reply_text="r", reply_ids=[], rng_draws_after=0)
        log += ids
        with suppress(StoreFull):  # dropped: to be computed again
            self.store.put(SPACE, SMALL, chain(SMALL, log, kv(log)), "raw")
        if session in self.kept:
            self.kept[session] = self.keys(session)

    def fresh(self, num_tokens: int) -> list[int]:
        self.next_id += 1
        return [1000 + self.next_id] * num_tokens

    def blocks(self, session: str) -> list:
        return stored_blocks(
            self.store, self.conversations, self.conversations.get_session(session)
        )

    def keys(self, session: str) -> set[bytes]:
        return {block.key for block in self.blocks(session)}


TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
