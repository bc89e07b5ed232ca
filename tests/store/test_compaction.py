"""The file shrinks only by a compact copy that takes its place, and only where nobody uses it."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from chatkv_store import BlockStore, StoreBusy, StoreDamaged, StoreFull, compaction
from chatkv_store.compaction import compact
from chatkv_store.users import Users
from kv_samples import SMALL, data_file, kv_bits, kv_of, restore, save
from program import environment


def half_empty(folder: Path, num_tokens: int = 400) -> list[int]:
    """A store whose file is mostly free pages; the ids that it still holds."""
    with BlockStore(folder) as store:
        save(store, SMALL, range(5000, 5000 + 4 * num_tokens), kv_bits(SMALL, 4 * num_tokens))
        keys = [header.key for header in store.headers()]
        ids = list(range(num_tokens))
        save(store, SMALL, ids, kv_of(SMALL, ids))
        store.remove(keys)
    return ids


def test_the_file_shrinks_and_holds_what_it_held(tmp_path: Path) -> None:
    ids = half_empty(tmp_path)
    done = compact(tmp_path)
    size = data_file(tmp_path).stat().st_size
    assert done.after_bytes == size < done.before_bytes / 2
    assert stat.S_IMODE(data_file(tmp_path).stat().st_mode) == 0o600
    assert not (tmp_path / "compaction").exists()
    with BlockStore(tmp_path) as store:
        assert store.verify() == []
        np.testing.assert_array_equal(restore(store, SMALL, ids), kv_of(SMALL, ids))
        save(store, SMALL, range(9000, 9100), kv_bits(SMALL, 100))
        assert store.verify() == [] and store.counters()["written_blocks"] > 100


@pytest.mark.parametrize("read_only", [False, True])
def test_it_refuses_while_anybody_has_the_store_open(tmp_path: Path, read_only: bool) -> None:
    half_empty(tmp_path)
    before = data_file(tmp_path).read_bytes()
    with (
        BlockStore(tmp_path, read_only=read_only),
        pytest.raises(StoreBusy, match="open elsewhere"),
    ):
        compact(tmp_path)
    script = (
        "import sys; from chatkv_store import BlockStore\n"
        f"with BlockStore(sys.argv[1], read_only={read_only}):\n"
        "    print('open', flush=True); sys.stdin.readline()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None and other.stdout.readline() == "open\n"
    with pytest.raises(StoreBusy):
        compact(tmp_path)
    assert data_file(tmp_path).read_bytes() == before
    other.kill()  # and its claim dies with it
    other.communicate()
    compact(tmp_path)


def test_an_open_waits_for_it_and_then_says_so(tmp_path: Path) -> None:
    half_empty(tmp_path)
    alone = Users(tmp_path, alone=True)
    with pytest.raises(StoreBusy, match="being compacted"):
        BlockStore(tmp_path)
    alone.leave()
    BlockStore(tmp_path).close()


def test_no_room_for_the_copy_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_empty(tmp_path)
    before = data_file(tmp_path).read_bytes()
    monkeypatch.setattr(compaction, "disk_free_bytes", lambda path: 100_000)
    with pytest.raises(StoreFull, match="100000"):
        compact(tmp_path)
    assert data_file(tmp_path).read_bytes() == before
    assert not (tmp_path / "compaction").exists()


def test_a_damaged_file_is_said_and_kept(tmp_path: Path) -> None:
    half_empty(tmp_path)
    data_file(tmp_path).write_bytes(b"no lmdb at all" * 1000)
    with pytest.raises(StoreDamaged):
        compact(tmp_path)
    assert data_file(tmp_path).read_bytes().startswith(b"no lmdb")
    assert not (tmp_path / "compaction").exists()


@pytest.mark.parametrize("kills", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_kill_9_leaves_the_old_file_or_the_new_one(tmp_path: Path, kills: int) -> None:
    script = (
        "import sys; from pathlib import Path; from chatkv_store.compaction import compact\n"
        "print('go', flush=True); compact(Path(sys.argv[1]))"
    )
    ids = half_empty(tmp_path, 1000)
    for attempt in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None and process.stdout.readline() == "go\n"
        time.sleep(0.004 * attempt / kills * 5)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with BlockStore(tmp_path) as store:
            assert not (tmp_path / "compaction").exists(), "what a dead one left is removed"
            assert store.verify() == []
            np.testing.assert_array_equal(restore(store, SMALL, ids), kv_of(SMALL, ids))
