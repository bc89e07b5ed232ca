"""Full disks, read-only folders, damaged files, busy neighbours, kill -9: nothing said is lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from chatkv_store import conversations
from chatkv_store.conversations import Conversations, Session, Turn
from chatkv_store.errors import (
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
)

STORE_FOLDER = str(Path(conversations.__file__).parents[1])
LONG = "many words and some more " * 400  # 10 kB


def say(store: Conversations, session: Session, user: str, reply: str = "ok") -> Turn:
    with store.lease(session.id):
        turn = store.begin_turn(session.id, user_text=user, prompt_ids=[7, 8])
        return store.finish_turn(turn.id, reply_text=reply, reply_ids=[1], rng_draws_after=1)


def assert_sound(path: Path) -> None:
    conn = sqlite3.connect(path)
    assert conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert conn.execute("PRAGMA foreign_key_check").fetchall() == []
    conn.close()


def one_line(error: StoreError, path: Path) -> str:
    line = str(error)
    assert "\n" not in line and str(path.parent) in line
    return line


# --- a full disk --------------------------------------------------------------------------------


def fill_up(store: Conversations, session: Session) -> tuple[int, StoreFull]:
    """Talk until the disk is full; the number of turns that were acknowledged, and the error."""
    with store.lease(session.id):
        for number in range(1000):
            try:
                turn = store.begin_turn(session.id, user_text=f"{number} {LONG}", prompt_ids=[1])
                store.finish_turn(turn.id, reply_text=LONG, reply_ids=[2], rng_draws_after=1)
            except StoreFull as error:
                return number, error
    pytest.fail("the disk never filled up")


def test_a_full_file_keeps_every_finished_turn_and_goes_on_later(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite3"
    with Conversations(path) as store:
        session = store.create_session()
        store._database._conn.execute("PRAGMA max_page_count = 120")
        finished, error = fill_up(store, session)
        assert "disk is full" in one_line(error, path)
        turns = store.chain(session.id)
        assert [turn.state for turn in turns[:finished]] == ["done"] * finished
        assert all(turn.reply_text == LONG for turn in turns[:finished])
        assert finished > 3 and len(turns) - finished in (0, 1)
        store._database._conn.execute("PRAGMA max_page_count = 100000")
        store.recover()
        assert say(store, session, "there is room again").state == "done"
    assert_sound(path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB; needs the right to mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and not subprocess.call(mount, stderr=subprocess.DEVNULL)
    if not mounted:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_keeps_every_finished_turn_and_stays_readable(small_disk: Path) -> None:
    path = small_disk / "data" / "c.sqlite3"
    with Conversations(path) as store:
        session = store.create_session()
        finished, error = fill_up(store, session)
        assert "disk is full" in one_line(error, path)
        assert finished > 3
        assert len(store.chain(session.id)) >= finished
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                break
    with Conversations(path) as store:  # opening a full disk's file must not fail
        turns = store.chain(session.id)
        assert [turn.reply_text for turn in turns[:finished]] == [LONG] * finished
        with suppress(StoreFull):  # a little may still fit into the log that exists already
            fill_up(store, store.create_session())
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    with Conversations(path) as store:
        store.recover()
        assert say(store, session, "there is room again").state == "done"
        assert len(store.search("room again")) == 1
    assert_sound(path)


def test_a_new_file_on_a_full_disk_is_one_clear_line(small_disk: Path) -> None:
    with (small_disk / "ballast").open("wb", buffering=0) as file:
        for _ in range(4096):
            try:
                file.write(bytes(4096))
            except OSError:
                break
    with pytest.raises(StoreFull) as caught:
        Conversations(small_disk / "c.sqlite3")
    assert "disk is full" in one_line(caught.value, small_disk / "c.sqlite3")


@pytest.mark.parametrize("free_bytes", [0, 1 << 30])
def test_an_io_error_on_a_full_disk_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    """Where a disk without room shows: SQLite's shared memory reports an I/O error."""
    with Conversations(tmp_path / "c.sqlite3") as store:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
        free = os.statvfs_result((4096, 4096, 100, 0, free_bytes // 4096, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _: free)
        with pytest.raises(StoreError) as caught, store._database.write():
            raise error
        assert isinstance(caught.value, StoreFull) == (free_bytes == 0)


# --- read-only ----------------------------------------------------------------------------------


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can reach (pytest's own are closed to others)."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


def without_root(action: Callable[[], object]) -> str:
    """`str(action())` in a forked child to which permissions apply, even if the tests are root."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            answer = str(action())
        except BaseException as error:  # the parent compares what happened
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as file:
        return file.read()


def shut(folder: Path) -> None:
    for path in folder.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    folder.chmod(0o555)


def read_then_write(path: Path, session_id: str) -> str:
    """What a visitor of a file that it may only read can do."""
    with Conversations(path) as store:
        read = [turn.user_text for turn in store.chain(session_id)]
        found = len(store.search("hello"))
        assert isinstance(store.refusal, StoreReadOnly)
        try:
            store.create_session()
        except StoreReadOnly as error:
            return f"{read} {found} {error}"
        return "written"


def test_a_read_only_folder_can_be_read_and_says_no_to_writing(open_folder: Path) -> None:
    path = open_folder / "c.sqlite3"
    with Conversations(path) as store:
        session = store.create_session()
        say(store, session, "hello")
    shut(open_folder)
    answer = without_root(lambda: read_then_write(path, session.id))
    assert answer.startswith("['hello'] 1 "), answer
    assert str(path) in answer and "cannot be written" in answer and "permissions" in answer


def test_a_crashed_writers_log_is_read_from_a_read_only_folder(open_folder: Path) -> None:
    """The newest turns are still in the write-ahead log; leaving them out would be a loss."""
    path = open_folder / "c.sqlite3"
    with Conversations(path) as store:
        session = store.create_session()
    child = os.fork()
    if child == 0:
        say(Conversations(path), session, "hello")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert path.with_name("c.sqlite3-wal").stat().st_size > 0
    shut(open_folder)
    answer = without_root(lambda: read_then_write(path, session.id))
    assert answer.startswith("['hello'] 1 "), answer


def test_no_file_in_a_read_only_folder_is_one_clear_line(open_folder: Path) -> None:
    shut(open_folder)
    for path in (open_folder / "c.sqlite3", open_folder / "new" / "c.sqlite3"):
        answer = without_root(lambda path=path: Conversations(path))  # type: ignore[misc]
        assert answer.startswith(f"StoreReadOnly: {path}: Permission denied"), answer


def test_a_path_that_cannot_be_a_file_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "c.sqlite3"):
        with pytest.raises(StoreError) as caught:
            Conversations(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# --- damage -------------------------------------------------------------------------------------


@pytest.fixture
def long_file(tmp_path: Path) -> tuple[Path, str]:
    """A closed file of many pages, and its session."""
    path = tmp_path / "c.sqlite3"
    with Conversations(path) as store:
        session = store.create_session(title="main")
        for number in range(12):
            say(store, session, f"word{number} {LONG}", LONG)
    return path, session.id


def use_everything(path: Path, session_id: str) -> None:
    with Conversations(path) as store:
        store.recover()
        store.list_sessions()
        store.chain(session_id)
        store.search("word3")
        store.search("C++")
        say(store, store.get_session(session_id), "one more")
        store.delete_session(store.fork(session_id).id)


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to be one" * 50, b"SQLite f"]
)
def test_a_file_that_is_no_database_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.sqlite3"
    path.write_bytes(content)
    with pytest.raises(StoreDamaged) as caught:
        Conversations(path)
    assert "is damaged" in one_line(caught.value, path) and ".recover" in str(caught.value)
    assert path.read_bytes() == content, "what can be salvaged must be left alone"


@pytest.mark.parametrize("seed", range(12))
def test_damaged_pages_never_raise_anything_but_the_stores_own_errors(
    long_file: tuple[Path, str], seed: int
) -> None:
    path, session_id = long_file
    rng = random.Random(seed)
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 3, 10))):
        start = rng.randrange(100, len(content) - 4096)
        length = rng.choice((1, 64, 4096))
        content[start : start + length] = rng.randbytes(length)
    path.write_bytes(content)
    try:
        use_everything(path, session_id)
    except StoreError as error:
        assert "\n" not in str(error)


def test_a_file_cut_short_is_reported_as_damaged(long_file: tuple[Path, str]) -> None:
    path, session_id = long_file
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(StoreDamaged) as caught:
        use_everything(path, session_id)
    one_line(caught.value, path)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE sessions SET settings = '{'",
        "UPDATE turns SET reply_ids = x'010203'",
        "UPDATE turns SET seed = 'x'",
        "UPDATE turns SET stats = '{'",
    ],
)
def test_a_record_that_makes_no_sense_is_named(tmp_path: Path, change: str) -> None:
    """SQLite's own checks do not cover what the columns mean."""
    with Conversations(tmp_path / "c.sqlite3") as store:
        session = store.create_session()
        turn = say(store, session, "hello")
        store._database._conn.execute(change)
        with pytest.raises(StoreDamaged, match=f"{session.id}|{turn.id}") as caught:
            store.chain(session.id)
        assert "\n" not in str(caught.value)


# --- neighbours ---------------------------------------------------------------------------------

TALKER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from chatkv_store.conversations import Conversations
store = Conversations(Path(sys.argv[2]))
session = store.create_session(title=sys.argv[3])
for number in range(20):
    with store.lease(session.id):
        turn = store.begin_turn(session.id, user_text=f"{sys.argv[3]} {number}", prompt_ids=[1])
        store.checkpoint_turn(turn.id, reply_text="a", reply_ids=[1], rng_draws_after=1)
        store.finish_turn(turn.id, reply_text="ab", reply_ids=[1, 2], rng_draws_after=2)
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite3"
    Conversations(path).close()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", TALKER, STORE_FOLDER, str(path), f"talker{number}"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    assert [child.communicate(timeout=120)[1] for child in children] == [""] * 3
    with Conversations(path) as store:
        for number in range(3):
            session = store.get_session(f"talker{number}")
            said = [turn.user_text for turn in store.chain(session.id)]
            assert said == [f"talker{number} {turn}" for turn in range(20)]
    assert_sound(path)


def test_a_neighbour_that_never_stops_writing_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite3"
    with Conversations(path, busy_timeout_s=0.05) as store:
        neighbour = sqlite3.connect(path, isolation_level=None)
        neighbour.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy, match="another process has been writing"):
            store.create_session()
        assert store.list_sessions() == [], "reading goes on meanwhile"
        neighbour.execute("ROLLBACK")
        neighbour.close()
        store.create_session()


# --- kill -9 ------------------------------------------------------------------------------------

# The child's commits are numbered: 5 to a turn (begin, three checkpoints, finish), so that the
# stored state of the last turn says exactly how many there were.
WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from chatkv_store.conversations import Conversations
store = Conversations(Path(sys.argv[2]))
store.recover()
with store.lease(sys.argv[3]):
    while True:
        turn = store.begin_turn(sys.argv[3], user_text="u" * 3000, prompt_ids=range(500))
        print("begun\\n", end="", flush=True)
        for size in (1, 2, 3):
            store.checkpoint_turn(turn.id, reply_text="r" * size * 2000,
                                  reply_ids=range(size * 300), rng_draws_after=size)
            print(f"checkpoint {size}\\n", end="", flush=True)
        store.finish_turn(turn.id, reply_text="r" * 8000, reply_ids=range(1200), rng_draws_after=4)
        print("done\\n", end="", flush=True)
"""
STEPS = {"begun": 1, "checkpoint 1": 2, "checkpoint 2": 3, "checkpoint 3": 4, "done": 5}


def commits_stored(store: Conversations, session_id: str, turns_before: int) -> int:
    """How many commits of the writer are in the file; every turn must be wholly one state."""
    turns = store.chain(session_id)[turns_before:]
    for turn in turns:
        steps = turn.rng_draws_after
        assert list(turn.prompt_ids) == list(range(500)) and turn.user_text == "u" * 3000
        assert turn.reply_text == "r" * 2000 * steps
        assert list(turn.reply_ids) == list(range(300 * steps))
    assert all(turn.state == "done" for turn in turns[:-1])
    return sum(turn.rng_draws_after + 1 for turn in turns)


def kill_in_the_middle(path: Path, session_id: str, wait_s: float) -> None:
    with Conversations(path) as store:
        store.recover()
        turns_before = len(store.chain(session_id))
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, STORE_FOLDER, str(path), session_id],
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        said = [child.stdout.readline().strip()]
        time.sleep(wait_s)
        child.kill()
        # The kill may have cut the last line, which then acknowledges nothing.
        said += [line.strip() for line in child.stdout if line.endswith("\n")]
    acknowledged = 5 * said.count("done") + STEPS[said[-1]] * (said[-1] != "done")
    with Conversations(path) as store:
        stored = commits_stored(store, session_id, turns_before)
        assert stored in (acknowledged, acknowledged + 1), "the previous state or the new one"
        for turn in store.recover():
            assert turn.state == "interrupted"
        assert store.recover() == []
        assert commits_stored(store, session_id, turns_before) == stored
    assert_sound(path)


@pytest.fixture
def killed(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "c.sqlite3"
    with Conversations(path) as store:
        return path, store.create_session().id


def test_kill_9_leaves_the_previous_or_the_new_state(killed: tuple[Path, str]) -> None:
    for wait_s in (0.0, 0.013, 0.04):
        kill_in_the_middle(*killed, wait_s)


@pytest.mark.slow
def test_kill_9_at_random_instants(killed: tuple[Path, str]) -> None:
    rng = random.Random(9)
    for _ in range(20):
        kill_in_the_middle(*killed, rng.uniform(0.0, 0.25))
