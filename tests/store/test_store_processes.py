"""Several processes, several threads, and processes that die in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from chatkv_store import BlockStore, StoreFull, load_blocks
from kv_samples import SMALL, SPACE, chain, data_file, kv_bits, kv_of, restore, save

B = SMALL.block_tokens
TINY_MAP = 64 * 4096


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


WRITER = f"""
import sys
from chatkv_store import BlockStore
from kv_samples import SMALL, kv_of, save
path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with BlockStore(path, start_map_bytes={TINY_MAP}) as store:
    print("open", flush=True)
    sys.stdin.readline()
    for turn in range(first, first + count):
        ids = list(range(turn * 1000, turn * 1000 + 40))
        save(store, SMALL, ids, kv_of(SMALL, ids))
        print(turn, flush=True)
"""


def test_two_processes_write_and_a_third_reads(tmp_path: Path) -> None:
    """Each starts with a map that is too small, so each has to follow the others' growth."""
    path = str(tmp_path / "kv")
    with BlockStore(path, start_map_bytes=TINY_MAP) as store:
        writers = [start(WRITER, path, str(first), "40") for first in (0, 100)]
        for writer in writers:
            assert writer.stdout is not None and writer.stdin is not None
            assert writer.stdout.readline() == "open\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        while any(writer.poll() is None for writer in writers):
            found = store.match(SPACE, list(range(40)), SMALL).num_tokens
            assert found in (0, 40), "a commit is seen whole or not at all"
        for writer in writers:
            finish(writer)
        for turn in [*range(40), *range(100, 140)]:
            ids = list(range(turn * 1000, turn * 1000 + 40))
            np.testing.assert_array_equal(restore(store, SMALL, ids), kv_of(SMALL, ids))
        assert store.stats()["file_bytes"] > TINY_MAP
        assert store.verify() == []


@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_kill_9_in_a_commit_loses_at_most_that_commit(tmp_path: Path, kills: int) -> None:
    path = tmp_path / "kv"
    known: set[int] = set()
    for attempt in range(kills):
        process = start(WRITER, str(path), str(attempt * 100), "1000")
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        process.stdin.write("go\n")
        process.stdin.flush()
        for _ in range(1 + attempt % 5):
            known.add(int(process.stdout.readline()))
        # The next commit is under way now; how far is up to the machine.
        process.send_signal(signal.SIGKILL)
        known.update(int(line) for line in process.communicate()[0].split("\n")[:-1])
        with BlockStore(path) as store:
            assert store.verify() == []
            for turn in known:
                ids = list(range(turn * 1000, turn * 1000 + 40))
                assert store.match(SPACE, ids, SMALL).num_tokens == 40, "a commit was lost"
            ids = list(range(turn * 1000, turn * 1000 + 40))
            np.testing.assert_array_equal(restore(store, SMALL, ids), kv_of(SMALL, ids))


def test_a_killed_reader_pins_nothing(tmp_path: Path) -> None:
    """Its slot in the reader table is freed at the next open, and old pages are used again."""
    path = tmp_path / "kv"
    with BlockStore(path) as store:
        save(store, SMALL, range(B), kv_bits(SMALL, B))
    reader = start(
        "import sys; from chatkv_store import BlockStore\n"
        "with BlockStore(sys.argv[1], read_only=True) as store, store.env.read() as txn:\n"
        "    print('reading', flush=True); sys.stdin.readline()\n",
        str(path),
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == "reading\n"
    reader.kill()
    reader.wait()
    with BlockStore(path) as store:
        assert "no active readers" in store.env.readers() or store.env.info()["readers"] <= 1
        sizes = []
        for turn in range(10):
            ids = list(range(turn * 1000, turn * 1000 + 4 * B))
            save(store, SMALL, ids, kv_bits(SMALL, 4 * B, turn))
            store.remove([header.key for header in store.headers()])
            sizes.append(data_file(path).stat().st_size)
        assert sizes[-1] == sizes[4]


def test_the_map_grows_under_readers(tmp_path: Path) -> None:
    """Remapping moves every page: no thread may be looking at one."""
    ids = list(range(8 * B))
    bits = kv_of(SMALL, ids)
    with BlockStore(tmp_path / "kv", start_map_bytes=TINY_MAP) as store:
        save(store, SMALL, ids, bits)
        match = store.match(SPACE, ids, SMALL)
        stop, loads = threading.Event(), []

        def read() -> None:
            out = np.zeros_like(bits)
            while not stop.is_set():
                loads.append(load_blocks(store, match.blocks, SMALL, out, 2).num_tokens_ok)
                np.testing.assert_array_equal(out, bits)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        before = store.env.map_bytes
        for turn in range(1, 60):
            more = list(range(turn * 1000, turn * 1000 + 4 * B))
            store.put(SPACE, SMALL, chain(SMALL, more, kv_bits(SMALL, len(more), turn)), "raw")
        stop.set()
        for reader in readers:
            reader.join()
        assert store.env.map_bytes >= 4 * before
        assert loads and set(loads) == {len(ids)}


def test_the_cap_holds_and_nothing_stored_is_harmed(tmp_path: Path) -> None:
    cap = 1 << 20
    with BlockStore(tmp_path / "kv", max_bytes=cap, start_map_bytes=TINY_MAP) as store:
        stored = []
        with pytest.raises(StoreFull, match="cap of 1048576 bytes"):
            for turn in range(1000):
                ids = list(range(turn * 1000, turn * 1000 + 4 * B))
                store.put(SPACE, SMALL, chain(SMALL, ids, kv_bits(SMALL, 4 * B, turn)), "raw")
                stored.append(turn)
        assert len(stored) > 10
        assert data_file(tmp_path / "kv").stat().st_size <= cap
        for turn in stored:
            ids = list(range(turn * 1000, turn * 1000 + 4 * B))
            np.testing.assert_array_equal(restore(store, SMALL, ids), kv_bits(SMALL, 4 * B, turn))
        store.remove([header.key for header in store.headers()])
        save(store, SMALL, range(B), kv_bits(SMALL, B))
        assert store.verify() == []


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    """The file may not grow beyond a limit (RLIMIT_FSIZE), as on a disk without room."""
    script = f"""
import resource, signal
from chatkv_store import BlockStore, StoreError
from kv_samples import SMALL, SPACE, chain, kv_bits, kv_of, restore, save
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ids = list(range(64))
with BlockStore({str(tmp_path / "kv")!r}) as store:
    save(store, SMALL, ids, kv_of(SMALL, ids))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, resource.RLIM_INFINITY))
    try:
        for turn in range(1, 1000):
            more = list(range(turn * 1000, turn * 1000 + 64))
            store.put(SPACE, SMALL, chain(SMALL, more, kv_bits(SMALL, 64, turn)), "raw")
        raise SystemExit("never full")
    except StoreError as error:
        print(error)
    assert (restore(store, SMALL, ids) == kv_of(SMALL, ids)).all()
    assert store.verify() == []
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save(store, SMALL, [7] * 64, kv_of(SMALL, [7] * 64))
    assert store.verify() == []
"""
    output = finish(start(script))
    assert output.count("\n") == 1 and "kv" in output
