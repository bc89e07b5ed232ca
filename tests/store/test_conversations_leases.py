"""One writer per session: leases end with their process, however it ends."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import chatkv_store.conversations as conversations
from chatkv_store.conversations import Conversations
from chatkv_store.errors import SessionNotFound, StoreBusy

STORE_FOLDER = str(Path(conversations.__file__).parents[1])

HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from chatkv_store.conversations import Conversations
store = Conversations(Path(sys.argv[2]))
with store.lease(sys.argv[3]):
    turn = store.begin_turn(sys.argv[3], user_text="from the child", prompt_ids=[1, 2])
    store.checkpoint_turn(turn.id, reply_text="so far", reply_ids=[5], rng_draws_after=1)
    print(turn.id, flush=True)
    time.sleep(600)
"""


@contextmanager
def answering_process(path: Path, session_id: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the session's lease and is in the middle of an answer."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, STORE_FOLDER, str(path), session_id],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline().strip()
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "c.sqlite3"


def test_a_second_process_is_told_who_holds_the_session(path: Path) -> None:
    with Conversations(path) as store:
        session, other = store.create_session(), store.create_session()
        with answering_process(path, session.id) as child:
            with pytest.raises(StoreBusy, match=f"process {child.pid}"), store.lease(session.id):
                pytest.fail("two writers in one session")
            with pytest.raises(StoreBusy):
                store.delete_session(session.id)
            assert store.recover() == [], "a living process's turn is not interrupted"
            assert store.chain(session.id)[0].state == "streaming"
            with store.lease(other.id):
                pass  # other sessions are free


def test_kill_9_frees_the_session_and_keeps_what_was_read(path: Path) -> None:
    with Conversations(path) as store:
        session = store.create_session()
        with answering_process(path, session.id) as child:
            child.kill()
            child.wait()
            (recovered,) = store.recover()
        assert recovered == store.chain(session.id)[0]
        assert (recovered.state, recovered.finish_reason) == ("interrupted", "interrupted")
        assert (recovered.user_text, recovered.reply_text) == ("from the child", "so far")
        assert list(recovered.prompt_ids) == [1, 2] and list(recovered.reply_ids) == [5]
        assert recovered.rng_draws_after == 1
        assert store.recover() == []
        with store.lease(session.id):
            turn = store.begin_turn(session.id, user_text="on we go", prompt_ids=[3])
        assert (turn.index, turn.tokens_before) == (2, 3)


@pytest.mark.parametrize("with_exec", [True, False])
def test_a_child_does_not_keep_its_parents_lease(path: Path, with_exec: bool) -> None:
    """A lease belongs to the process that took it, not to children that inherited its files."""
    with Conversations(path) as store:
        session = store.create_session()
        with store.lease(session.id):
            child = os.fork()
            if child == 0:
                if with_exec:
                    os.execlp("sleep", "sleep", "600")
                signal.pause()
        try:
            with store.lease(session.id):
                pass
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_two_threads_are_kept_apart_too(path: Path) -> None:
    with Conversations(path) as one, Conversations(path) as two:
        session = one.create_session()
        with (
            one.lease(session.id),
            pytest.raises(StoreBusy, match="already open in this process"),
            two.lease(session.id),
        ):
            pytest.fail("two writers in one session")
        with two.lease(session.id):
            pass


def test_a_lease_that_is_soon_free_is_waited_for(path: Path) -> None:
    """`recover` in another process holds it for a moment; opening just then must not fail."""
    with Conversations(path) as one, Conversations(path) as two:
        session = one.create_session()
        held, release = threading.Event(), threading.Event()

        def holder() -> None:
            with one.lease(session.id):
                held.set()
                release.wait()

        thread = threading.Thread(target=holder)
        thread.start()
        held.wait()
        threading.Timer(0.05, release.set).start()
        with two.lease(session.id):
            pass
        thread.join()


def test_many_takers_never_hold_it_together(path: Path) -> None:
    """Releasing unlinks the file: nobody may end up with a lock on a file without a name."""
    holders, overlaps, taken = [0], [0], [0]
    with Conversations(path) as store:
        session = store.create_session()

        def taker() -> None:
            for _ in range(60):
                try:
                    with store.lease(session.id):
                        holders[0] += 1
                        overlaps[0] += holders[0] > 1
                        taken[0] += 1
                        os.sched_yield()
                        holders[0] -= 1
                except StoreBusy:
                    pass

        threads = [threading.Thread(target=taker) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert overlaps == [0] and taken[0] >= 60


def test_a_lock_on_a_file_that_was_just_removed_is_no_lease(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last holder may remove the file between our opening and our locking it."""
    with Conversations(path) as one, Conversations(path) as two:
        session = one.create_session()
        flock = fcntl.flock

        def released_meanwhile(file: int, operation: int) -> None:
            monkeypatch.setattr(fcntl, "flock", flock)
            (lock,) = path.parent.rglob("*.lock")
            lock.unlink()
            flock(file, operation)

        monkeypatch.setattr(fcntl, "flock", released_meanwhile)
        with one.lease(session.id), pytest.raises(StoreBusy), two.lease(session.id):
            pytest.fail("two writers in one session")


def test_a_lease_needs_a_session_and_leaves_no_file(path: Path) -> None:
    with Conversations(path) as store:
        for ref in ("nobody", "../outside"):
            with pytest.raises(SessionNotFound), store.lease(ref):
                pytest.fail("leased a session that does not exist")
        session = store.create_session()
        with store.lease(session.id):
            pass
        assert list(path.parent.rglob("*.lock")) == []


def test_opening_a_session_settles_what_a_dead_process_left_in_it(path: Path) -> None:
    """The holder itself cannot be told apart by `recover`, which skips leased sessions."""
    with Conversations(path) as store:
        session = store.create_session()
        with answering_process(path, session.id):
            pass
        with store.lease(session.id):
            (left,) = store.chain(session.id)
            assert (left.state, left.reply_text) == ("interrupted", "so far")
            begun = store.begin_turn(session.id, user_text="next", prompt_ids=[])
            assert store.recover() == []
            assert store.get_turn(begun.id).state == "pending", "a living turn was interrupted"
