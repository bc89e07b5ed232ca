"""kill -9 and a failing disk at every step of a commit; full disks, neighbours, clocks, names.

After each: what was acknowledged is there, KV is right or missing, and there was one clear line.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from chatkv_store import (
    BlockStore,
    Conversations,
    StoreBusy,
    StoreError,
    StoreFull,
    database,
    environment,
    failpoints,
    saving,
)
from failing import armed, save_turns, talk
from forked import Forked
from kv_samples import SMALL, SPACE, data_file, kv_bits, kv_of, restore, save
from small_disk import SmallDisk, small_disk

TINY_MAP = 32 * 4096
UNICODE = [
    "Café ☕",
    "日本語のタイトル",
    "עברית",
    "🧑‍🚀🏳️‍🌈",
    "a\u0301\u200d\u202e",
    "-rf ..",
    "'\";--",
]


def killed(work: Callable[[Path], None], path: Path, setting: str) -> list[str] | None:
    """What `work` said before its failpoint killed it; None where it was never reached."""
    process = Forked(armed, setting, work, path)
    said, errors = process.communicate()
    if process.returncode == 0:
        return None
    assert process.returncode == -signal.SIGKILL, errors
    return said.splitlines()


@pytest.mark.parametrize("place", failpoints.CONVERSATIONS)
def test_kill_9_at_every_step_of_every_commit_of_a_conversation(tmp_path: Path, place: str) -> None:
    commits = 0
    for at in range(1, 40):
        path = tmp_path / str(at) / "c.sqlite3"
        said = killed(talk, path, f"{place}:{at}")
        if said is None:
            break
        commits += 1
        with Conversations(path) as store:
            store.recover()
            sessions = [one for one in store.list_sessions() if not one.title.endswith("(fork)")]
            assert len(sessions) - any(line.startswith("session") for line in said) in (0, 1)
            turns = store.chain(sessions[0].id) if sessions else []
            acknowledged = sum(line in ("begun", "checkpoint", "done") for line in said)
            # Each turn is three commits; which of them a turn has seen shows in its answer.
            stored = sum(1 + len(turn.reply_text) for turn in turns)
            assert stored - acknowledged in (0, 1), "the state before this commit or after it"
            assert [turn.user_text for turn in turns] == [f"u{n}" for n in range(len(turns))]
            assert all(list(turn.reply_ids) == [1, 2][: len(turn.reply_text)] for turn in turns)
            made = store.create_session()
            with store.lease(made.id):
                turn = store.begin_turn(made.id, user_text="and on", prompt_ids=[1])
                store.finish_turn(turn.id, reply_text="ok", reply_ids=[2], rng_draws_after=1)
            check = store._database._conn.execute("PRAGMA integrity_check").fetchall()
            assert check == [("ok",)]
    assert commits == (1 if place == "conversations.migrated" else 7)


@pytest.mark.parametrize("place", failpoints.BLOCKS)
def test_kill_9_at_every_step_of_a_commit_of_blocks(tmp_path: Path, place: str) -> None:
    tried = 0
    for at in (1, 2, 4):
        path = tmp_path / str(at)
        said = killed(save_turns, path, f"{place}:{at}")
        if said is None:
            break
        tried += 1
        with BlockStore(path) as store:
            assert store.verify() == []
            for turn in range(4):
                ids = list(range(turn * 1000, turn * 1000 + 100))
                found = store.match(SPACE, ids, SMALL).num_tokens
                # The whole turn, its first commit alone, or nothing.
                assert found == 100 if str(turn) in said else found in (0, 90, 100)
                right = kv_of(SMALL, ids[:found])
                np.testing.assert_array_equal(restore(store, SMALL, ids), right)
            save(store, SMALL, [9] * 20, kv_bits(SMALL, 20))
            assert store.verify() == []
    assert tried >= 1, "this place is never passed"


def test_a_failpoint_costs_nothing_where_none_is_armed() -> None:
    assert failpoints.failpoint is failpoints._never
    assert database.failpoint is environment.failpoint is saving.failpoint is failpoints._never


def test_every_place_is_listed() -> None:
    folder = Path(failpoints.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    placed = set(re.findall(r'failpoint\("([^"]+)"\)', text))
    assert placed == {*failpoints.CONVERSATIONS, *failpoints.BLOCKS}


# --- a disk that fails ---------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, place: str, code: int) -> None:
    def fail(passed: str) -> None:
        if passed == place:
            raise OSError(code, os.strerror(code))

    for module in (database, environment, saving):
        monkeypatch.setattr(module, "failpoint", fail)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(
    "place", [name for name in failpoints.BLOCKS if not name.endswith("committed")]
)
def test_a_failing_write_of_blocks_is_one_line_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: int
) -> None:
    ids = list(range(200))
    with BlockStore(tmp_path / "kv", start_map_bytes=TINY_MAP) as store:
        save(store, SMALL, ids, kv_of(SMALL, ids))
        with monkeypatch.context() as patch:
            failing(patch, place, code)
            with pytest.raises(StoreError) as caught:
                for turn in range(1, 20):
                    more = list(range(turn * 1000, turn * 1000 + 200))
                    save(store, SMALL, more, kv_bits(SMALL, 200, turn))
        assert isinstance(caught.value, StoreFull) == (code == errno.ENOSPC)
        assert "\n" not in str(caught.value) and str(tmp_path / "kv") in str(caught.value)
        np.testing.assert_array_equal(restore(store, SMALL, ids), kv_of(SMALL, ids))
        assert store.verify() == []
        save(store, SMALL, [3] * 40, kv_of(SMALL, [3] * 40))
        np.testing.assert_array_equal(restore(store, SMALL, [3] * 40), kv_of(SMALL, [3] * 40))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("place", ["conversations.begun", "conversations.written"])
def test_a_failing_write_of_a_conversation_is_one_line_and_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: int
) -> None:
    path = tmp_path / "c.sqlite3"
    with Conversations(path) as store:
        session = store.create_session(title="kept")
        other = store.create_session(title="other")
        writes = [
            lambda: store.create_session(title="new"),
            lambda: store.rename(session.id, "renamed"),
            lambda: store.fork(session.id),
            lambda: store.delete_session(session.id),
            lambda: store.begin_turn(other.id, user_text="hello", prompt_ids=[1]),
            lambda: store.keep(other, []),
        ]
        with store.lease(other.id), monkeypatch.context() as patch:
            failing(patch, place, code)
            for write in writes:
                with pytest.raises(StoreError) as caught:
                    write()
                assert isinstance(caught.value, StoreFull) == (code == errno.ENOSPC)
                assert "\n" not in str(caught.value) and str(path) in str(caught.value)
        assert [one.title for one in store.list_sessions()] == ["other", "kept"]
        assert store.chain(other.id) == []
        store.delete_session(session.id)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", "3m") as disk:
        yield disk


def test_a_disk_full_of_kv_keeps_what_it_has(disk: SmallDisk) -> None:
    """The real thing: ENOSPC from the file system, in whichever call it comes."""
    path = disk.folder / "kv"
    with BlockStore(path) as store:
        saved = []
        with pytest.raises(StoreFull) as caught:
            for turn in range(1000):
                ids = list(range(turn * 1000, turn * 1000 + 64))
                save(store, SMALL, ids, kv_of(SMALL, ids))
                saved.append(ids)
        assert "\n" not in str(caught.value) and len(saved) > 5
        for ids in saved:
            np.testing.assert_array_equal(restore(store, SMALL, ids), kv_of(SMALL, ids))
        assert store.verify() == []
    disk.fill()
    with BlockStore(path, read_only=True) as store:
        assert store.match(SPACE, saved[0], SMALL).num_tokens == 64
    disk.empty()
    disk.remount("size=6m")
    with BlockStore(path) as store:
        assert store.verify() == []
        save(store, SMALL, [5] * 64, kv_of(SMALL, [5] * 64))


def test_a_new_cache_on_a_full_disk_is_one_line_and_no_crash(disk: SmallDisk) -> None:
    disk.fill()
    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            BlockStore(disk.folder / "kv")
        assert "\n" not in str(caught.value)
    disk.empty()
    with BlockStore(disk.folder / "kv") as store:
        save(store, SMALL, [5] * 64, kv_of(SMALL, [5] * 64))
        disk.fill()
        # Reading takes a reader's slot, in a page of the lock file that nothing has touched yet.
        assert store.match(SPACE, [5] * 64, SMALL).num_tokens == 64


def test_a_read_only_disk_still_reads(disk: SmallDisk) -> None:
    path, ids = disk.folder / "kv", list(range(64))
    with BlockStore(path) as store:
        save(store, SMALL, ids, kv_of(SMALL, ids))
    disk.remount("ro")
    with pytest.raises(StoreError) as caught:
        BlockStore(path)
    assert "read-only" in str(caught.value).lower() or "permission" in str(caught.value)
    with BlockStore(path, read_only=True) as store:
        np.testing.assert_array_equal(restore(store, SMALL, ids), kv_of(SMALL, ids))


# --- neighbours, clocks, names -------------------------------------------------------------------


def test_a_writer_that_dies_holding_the_lease_leaves_it_free(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite3"
    script = """
import os, signal, sys
from pathlib import Path
from chatkv_store import Conversations
store = Conversations(Path(sys.argv[1]))
session = store.create_session()
with store.lease(session.id):
    turn = store.begin_turn(session.id, user_text="hello", prompt_ids=[1])
    store.checkpoint_turn(turn.id, reply_text="wor", reply_ids=[2], rng_draws_after=1)
    print(session.id, flush=True)
    sys.stdin.readline()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    session = child.stdout.readline().strip()
    with Conversations(path) as store:
        with pytest.raises(StoreBusy, match=f"process {child.pid}"), store.lease(session):
            pass
        child.kill()
        child.communicate()
        with store.lease(session):
            (turn,) = store.chain(session)
            assert (turn.reply_text, turn.state) == ("wor", "interrupted")
            store.begin_turn(session, user_text="still there?", prompt_ids=[3])


def test_a_clock_that_goes_backwards_orders_by_use(tmp_path: Path) -> None:
    now = [2_000_000_000.0]
    with Conversations(tmp_path / "c.sqlite3", clock=lambda: now[0]) as store:
        ids = []
        for step in (0, -86400.0, -3 * 365 * 86400.0, -now[0] - 5):
            now[0] = max(2_000_000_000.0 + step, -5.0)
            ids.append(store.create_session(title=f"at {step}").id)
        assert ids == sorted(ids) and len({*ids}) == 4
        assert [one.id for one in store.list_sessions()] == ids[::-1]
        with store.lease(ids[0]):
            for number in range(3):
                now[0] -= 1000
                turn = store.begin_turn(ids[0], user_text=str(number), prompt_ids=[1])
                store.finish_turn(turn.id, reply_text="", reply_ids=[], rng_draws_after=0)
        assert [turn.user_text for turn in store.chain(ids[0])] == ["0", "1", "2"]
        assert store.last_session() == store.get_session(ids[0])


@pytest.mark.parametrize("name", UNICODE)
def test_folders_and_titles_of_any_unicode(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name.replace("/", "_")
    with Conversations(folder / "c.sqlite3") as store:
        session = store.create_session(title=name)
        assert store.get_session(name).id == session.id
        assert store.list_sessions()[0].title == " ".join(name.split())
    ids = list(range(40))
    with BlockStore(folder / "kv") as blocks:
        blocks.register(SPACE, {"model": name, "layout": SMALL.to_json()})
        save(blocks, SMALL, ids, kv_of(SMALL, ids))
    with BlockStore(folder / "kv", read_only=True) as blocks:
        assert blocks.namespaces()[SPACE]["model"] == name
        np.testing.assert_array_equal(restore(blocks, SMALL, ids), kv_of(SMALL, ids))


def test_nobody_else_may_read_anything(tmp_path: Path) -> None:
    """Also not with the usual umask, and none of the files that come and go beside the data."""
    before = os.umask(0o022)
    try:
        path = tmp_path / "home" / "data" / "c.sqlite3"
        with Conversations(path) as store, BlockStore(tmp_path / "home" / "kv") as blocks:
            session = store.create_session()
            with store.lease(session.id):
                store.begin_turn(session.id, user_text="secret", prompt_ids=[1])
                save(blocks, SMALL, [1] * 20, kv_bits(SMALL, 20))
                found = [*(tmp_path / "home").rglob("*")]
    finally:
        os.umask(before)
    names = {file.name for file in found}
    assert {"c.sqlite3-wal", "c.sqlite3-shm", "data.mdb", "lock.mdb", f"{session.id}.lock"} <= names
    for file in found:
        if file.exists():
            mode = file.stat().st_mode & 0o777
            assert mode == (0o700 if file.is_dir() else 0o600), f"{file} has {mode:o}"
    assert data_file(tmp_path / "home" / "kv").stat().st_mode & 0o777 == 0o600
