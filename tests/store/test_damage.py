"""Whatever happens to the files, the store answers with a miss or one clear error.

Never with wrong KV, and never with a crash. Damage is done the way it happens: in the file, behind
the store's back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import pytest

from chatkv_store import (
    BlockMiss,
    BlockStore,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreReadOnly,
    StoreVersionError,
    load_blocks,
)
from chatkv_store.tables import value_key
from kv_samples import GROUPED, SMALL, SPACE, data_file, kv_bits, kv_of, save

B = SMALL.block_tokens
IDS = list(range(4 * B))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed store that holds IDS."""
    path = tmp_path / "kv"
    with BlockStore(path) as store:
        save(store, SMALL, IDS, kv_of(SMALL, IDS))
    return path


def load(store: BlockStore) -> tuple[int, list[str]]:
    """Restore IDS with two threads; checks that whatever is said to be good is right."""
    match = store.match(SPACE, IDS, SMALL)
    out = np.zeros_like(kv_bits(SMALL, len(IDS)))
    result = load_blocks(store, match.blocks, SMALL, out, threads=2)
    good = result.num_tokens_ok
    np.testing.assert_array_equal(out[:, :, :, :good], kv_of(SMALL, IDS)[:, :, :, :good])
    return good, [*result.misses, *([match.miss] if match.miss else [])]


def change_value(store: BlockStore, index: int, how: str) -> None:
    """Damage the value of block `index` behind the store's back."""
    key = value_key(store.match(SPACE, IDS, SMALL).blocks[index].key, 0)
    values = store.db["values"]

    def work(txn: lmdb.Transaction) -> None:
        payload = bytearray(txn.get(key, db=values))
        if how == "delete":
            txn.delete(key, db=values)
            return
        if how == "flip":
            payload[len(payload) // 2] ^= 1
        elif how == "swap":
            other = value_key(store.match(SPACE, IDS[:B], SMALL).blocks[0].key, 0)
            payload = bytearray(txn.get(other, db=values))
        else:
            del payload[-3:]
        txn.put(key, bytes(payload), db=values)

    # `match` above runs before the writing transaction, never inside it.
    if how == "swap":
        store.match(SPACE, IDS[:B], SMALL)
    store.env.write(work)


@pytest.mark.parametrize(
    ("how", "said"),
    [("flip", "digest"), ("truncate", "bytes, not"), ("delete", "missing"), ("swap", "damaged")],
)
@pytest.mark.parametrize("repair", [False, True])
def test_a_bad_value_is_a_miss_and_ends_the_prefix(
    folder: Path, how: str, said: str, repair: bool
) -> None:
    with BlockStore(folder) as store:
        change_value(store, 2, how)
        good, misses = load(store)
        assert good == 2 * B
        assert any(said in miss and "block 2" in miss for miss in misses)
        (finding,) = store.verify()
        assert finding.kind == "value"
        if repair:
            assert store.verify(repair=True) == [finding]
            assert store.verify() == []
            assert store.match(SPACE, IDS, SMALL).num_tokens == 2 * B
        save(store, SMALL, IDS, kv_of(SMALL, IDS))  # recomputed, whether repaired before or not
        assert load(store) == (4 * B, [])
        assert store.verify() == []


def test_reading_a_bad_value_leaves_the_destination_alone(folder: Path) -> None:
    with BlockStore(folder) as store:
        change_value(store, 1, "flip")
        out = np.full((3, 2, 2, B, 8), 7, "<u2")
        with pytest.raises(BlockMiss, match="digest differs"):
            store.read(store.match(SPACE, IDS, SMALL).blocks[1], 0, out)
        assert (out == 7).all()


@pytest.mark.parametrize("how", ["flip", "cut", "delete", "of another block"])
@pytest.mark.parametrize("repair", [False, True])
def test_a_bad_header_is_a_miss(folder: Path, how: str, repair: bool) -> None:
    with BlockStore(folder) as store:
        keys = [block.key for block in store.match(SPACE, IDS, SMALL).blocks]
        blocks = store.db["blocks"]

        def work(txn: lmdb.Transaction) -> None:
            packed = bytearray(txn.get(keys[1], db=blocks))
            if how == "delete":
                txn.delete(keys[1], db=blocks)
                return
            if how == "flip":
                packed[20] ^= 0x40
            elif how == "cut":
                del packed[-1:]
            else:
                packed = bytearray(txn.get(keys[2], db=blocks))
            txn.put(keys[1], bytes(packed), db=blocks)

        store.env.write(work)
        good, misses = load(store)
        assert good == B
        assert misses and "from token 16 of 64" in misses[0]
        assert {finding.kind for finding in store.verify()} >= (
            {"orphan"} if how == "delete" else {"header"}
        )
        if repair:
            store.verify(repair=True)
            assert store.verify() == []
        save(store, SMALL, IDS, kv_of(SMALL, IDS))
        assert load(store) == (4 * B, [])
        assert store.verify() == []


def test_lost_links_are_found_and_mended(folder: Path) -> None:
    tail = [*IDS, 1, 2, 3]
    with BlockStore(folder) as store:
        save(store, SMALL, tail, kv_of(SMALL, tail))
        store.env.write(lambda txn: txn.drop(store.db["children"], delete=False))
        other = [*IDS, 1, 2, 9]
        assert store.match(SPACE, other, SMALL).num_tokens == len(IDS), "the tail is not found"
        assert {finding.kind for finding in store.verify(repair=True)} == {"link"}
        assert store.match(SPACE, other, SMALL).num_tokens == len(IDS) + 2
        assert store.verify() == []


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.75, 0.95])
def test_a_file_cut_short_never_kills_the_process(tmp_path: Path, keep: float) -> None:
    """Touching a mapped page beyond the end is SIGBUS, so this runs in a process of its own."""
    ids, path = list(range(256)), tmp_path / "kv"
    with BlockStore(path) as store:
        save(store, GROUPED, ids, kv_bits(GROUPED, len(ids)))
    size = data_file(path).stat().st_size
    os.truncate(data_file(path), int(size * keep) // 4096 * 4096)
    script = f"""
import numpy as np
from chatkv_store import BlockStore, load_blocks
from kv_samples import GROUPED, SPACE, kv_bits, save
bits, ids = kv_bits(GROUPED, 256), list(range(256))
with BlockStore({str(path)!r}, replace_damaged=True) as store:
    match = store.match(SPACE, ids, GROUPED)
    out = np.zeros_like(bits)
    good = load_blocks(store, match.blocks, GROUPED, out, threads=2).num_tokens_ok
    assert (out[:, :, :, :good] == bits[:, :, :, :good]).all()
    assert good < 256
    store.verify(repair=True)
    save(store, GROUPED, ids, bits)
    match = store.match(SPACE, ids, GROUPED)
    assert load_blocks(store, match.blocks, GROUPED, out, threads=2).num_tokens_ok == 256
    assert (out == bits).all() and store.verify() == []
"""
    run_python(script)


def test_a_cut_index_is_replaced_only_when_asked(folder: Path) -> None:
    """Nothing but the two meta pages is left: the roots of all trees are gone."""
    os.truncate(data_file(folder), 2 * 4096)
    with pytest.raises(StoreDamaged, match=r"data\.mdb"):
        BlockStore(folder)
    with BlockStore(folder, replace_damaged=True) as store:
        assert store.replaced is not None and "damaged" in store.replaced
        assert load(store)[0] == 0
        save(store, SMALL, IDS, kv_of(SMALL, IDS))
        assert load(store) == (4 * B, [])
    with BlockStore(folder, replace_damaged=True) as store:
        assert store.replaced is None


@pytest.mark.parametrize("content", [b"not a database" * 1000, bytes(8192)])
def test_another_kind_of_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kv"
    path.mkdir()
    data_file(path).write_bytes(content)
    with pytest.raises(StoreDamaged, match=r"data\.mdb"):
        BlockStore(path)
    with BlockStore(path, replace_damaged=True) as store:
        assert store.stats()["blocks"] == 0


def test_a_newer_store_is_left_alone(folder: Path) -> None:
    with BlockStore(folder) as store:
        store.env.write(lambda txn: txn.put(b"format", b"2", db=store.db["meta"]))
    before = data_file(folder).read_bytes()
    for options in ({}, {"read_only": True}, {"replace_damaged": True}):
        with pytest.raises(StoreVersionError, match="format 2, this program knows 1"):
            BlockStore(folder, **options)  # type: ignore[arg-type]
    assert data_file(folder).read_bytes() == before


def test_a_folder_that_may_not_be_written(folder: Path) -> None:
    """Reading works there, writing is one clear error. Root may write anywhere: drop it."""
    data_file(folder).chmod(0o644)
    (folder / "lock.mdb").chmod(0o644)
    folder.chmod(0o755)
    script = f"""
import os
os.chdir({str(folder)!r})
from chatkv_store import *
from chatkv_store import BlockStore, StoreReadOnly, StoreError
from kv_samples import SMALL, SPACE, kv_of, restore, save
import lmdb, numpy.random, xxhash, zstandard
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
else:
    os.chmod("data.mdb", 0o444); os.chmod("lock.mdb", 0o444); os.chmod(".", 0o555)
try:
    BlockStore(".")
    raise SystemExit("opened for writing")
except StoreReadOnly as error:
    assert "permission" in str(error)
ids = list(range({4 * B}))
with BlockStore(".", read_only=True) as store:
    assert (restore(store, SMALL, ids) == kv_of(SMALL, ids)).all()
    try:
        save(store, SMALL, [5, 6], kv_of(SMALL, [5, 6]))
        raise SystemExit("wrote")
    except StoreReadOnly as error:
        pass
"""
    run_python(script)


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("in the way")
    with pytest.raises(StoreError, match="kv"):
        BlockStore(tmp_path / "kv")


def test_every_error_is_a_store_error() -> None:
    for kind in (StoreBusy, StoreDamaged, StoreReadOnly, StoreVersionError, BlockMiss):
        assert issubclass(kind, StoreError)


def run_python(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stdout}{done.stderr}"
