"""A file that is forgotten has to be read from the disk again, also where LMDB has mapped it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from random import Random

import pytest

from chatkv_store import BlockStore
from chatkv_store.environment import DATA_FILE
from chatkv_store.page_cache import forget, num_in_memory
from chatkv_store.residency import ValuePages
from chatkv_store.tables import value_key
from kv_samples import GROUPED, SPACE, kv_bits, save


def is_in_memory(path: Path) -> bool:
    file = os.open(path, os.O_RDONLY)
    try:
        os.preadv(file, [bytearray(1)], path.stat().st_size // 2, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


def test_a_mapped_file_leaves_the_page_cache(tmp_path: Path) -> None:
    import lmdb

    plain = tmp_path / "plain"
    plain.write_bytes(bytes(1 << 20))
    if not forget(plain) or is_in_memory(plain):
        pytest.skip("this file system keeps everything in memory")
    with lmdb.open(str(tmp_path), map_size=1 << 24) as environment:
        with environment.begin(write=True) as txn:
            txn.put(b"value", bytes(range(256)) * 4096)
        with environment.begin(buffers=True) as txn:
            assert bytes(txn.get(b"value"))[:3] == b"\0\1\2"
        assert is_in_memory(tmp_path / DATA_FILE)
        assert forget(tmp_path / DATA_FILE)
        assert not is_in_memory(tmp_path / DATA_FILE)
        with environment.begin() as txn:
            assert txn.get(b"value") == bytes(range(256)) * 4096


def test_which_pages_of_a_mapped_file_are_in_memory(tmp_path: Path) -> None:
    import numpy as np

    plain, num_bytes = tmp_path / "plain", 1 << 20
    plain.write_bytes(bytes(num_bytes))
    if not forget(plain) or is_in_memory(plain):
        pytest.skip("this file system keeps everything in memory")
    forget(plain)  # the look itself may have read some
    with plain.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        start, num_pages = view.ctypes.data, num_bytes // mmap.PAGESIZE
        cold = num_in_memory(start, start + num_bytes)
        assert not view.any()  # reads all of it
        warm = num_in_memory(start + 1, start + num_bytes)
        one = num_in_memory(start, start + 1)
        del view
    assert (cold, warm, one) == ((0, num_pages), (num_pages, num_pages), (1, 1))
    assert num_in_memory(mmap.PAGESIZE, mmap.PAGESIZE + 1) is None, "nothing is mapped there"


def test_a_store_tells_which_values_have_to_come_from_the_disk(tmp_path: Path) -> None:
    """And that a look brings none of them in. LMDB's own looks do, many pages around each."""
    plain, data = tmp_path / "plain", tmp_path / DATA_FILE
    plain.write_bytes(bytes(1 << 20))
    if not forget(plain) or is_in_memory(plain):
        pytest.skip("this file system keeps everything in memory")
    tokens = 5 * 64
    with BlockStore(tmp_path) as store:
        save(store, GROUPED, range(tokens), kv_bits(GROUPED, tokens, seed=3))
        blocks = store.match(SPACE, range(tokens), GROUPED).blocks
        assert store.cold_share(blocks) == 0, "it was just written"
        with store.env.read() as txn:
            txnid, size = txn.id(), store.env.page_bytes
        keys = [value_key(block.key, group) for block in blocks for group in range(2)]

        def in_memory() -> list[tuple[int, int] | None]:
            with data.open("rb") as file:
                values = ValuePages(file.fileno(), txnid, size, b"values")
                return [values.in_memory(key) for key in keys]

        warm = in_memory()
        assert all(one is not None and one[0] == one[1] > 0 for one in warm)
        forget(data)
        assert in_memory() == in_memory() == [one and (0, one[1]) for one in warm]
        data.read_bytes()
        assert in_memory() == warm
        assert store.cold_share([]) is None


def test_a_sample_is_taken_over_all_blocks_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[bytes] = []

    def seen(values: ValuePages, key: bytes) -> tuple[int, int] | None:
        looked_at.append(key)
        return (1, 4) if len(looked_at) % 2 else None

    tokens = 5 * 64
    with BlockStore(tmp_path) as store:
        save(store, GROUPED, range(tokens), kv_bits(GROUPED, tokens, seed=3))
        blocks = store.match(SPACE, range(tokens), GROUPED).blocks
        monkeypatch.setattr(ValuePages, "in_memory", seen)
        assert store.cold_share(blocks) == 0.75
        assert len(set(looked_at)) == 2 * len(blocks)
        monkeypatch.setattr(ValuePages, "in_memory", lambda *_: None)
        assert store.cold_share(blocks) is None


def test_values_are_found_where_they_lie_without_being_read(tmp_path: Path) -> None:
    tokens, data = 40 * 64, tmp_path / DATA_FILE
    with BlockStore(tmp_path) as store:
        save(store, GROUPED, range(tokens), kv_bits(GROUPED, tokens, seed=3))
        blocks = store.match(SPACE, range(tokens), GROUPED).blocks
        with store.env.read() as txn, data.open("rb") as file:
            size = store.env.page_bytes
            values = ValuePages(file.fileno(), txn.id(), size, b"values")
            for block in blocks:
                for group, payload in enumerate(store.payloads(block)):
                    pages = values.pages(value_key(block.key, group))
                    assert pages is not None and len(pages) == -(-(16 + len(payload)) // size)
                    file.seek(pages[0] * size + 16)
                    assert file.read(len(payload)) == payload
            assert values.pages(bytes(34)) is None
            for txnid, name in ((txn.id(), b"nothing"), (txn.id() - 9, b"values")):
                other = ValuePages(file.fileno(), txnid, size, name)
                assert other.in_memory(value_key(blocks[0].key, 0)) is None
            # Headers are small, and lie with others on a page of the tree.
            small = ValuePages(file.fileno(), txn.id(), size, b"blocks")
            assert small.in_memory(blocks[0].key) is None


def test_damaged_pages_are_values_that_are_not_found(tmp_path: Path) -> None:
    tokens, data = 20 * 64, tmp_path / DATA_FILE
    with BlockStore(tmp_path) as store:
        save(store, GROUPED, range(tokens), kv_bits(GROUPED, tokens, seed=3))
        blocks = store.match(SPACE, range(tokens), GROUPED).blocks
        with store.env.read() as txn:
            txnid, size = txn.id(), store.env.page_bytes
    sound, random, num_lost = data.read_bytes(), Random(1), 0
    pages = [
        at
        for at in range(0, len(sound), size)
        if sound[at : at + 8] == (at // size).to_bytes(8, "little")
    ]
    for _ in range(200):
        damaged = bytearray(sound)
        for page in random.choices(pages, k=20):
            damaged[page + random.randrange(160)] = random.randrange(256)
        (tmp_path / "damaged").write_bytes(damaged)
        with (tmp_path / "damaged").open("rb") as file:
            values = ValuePages(file.fileno(), txnid, size, b"values")
            num_lost += values.in_memory(value_key(blocks[3].key, 0)) is None
    assert 0 < num_lost < 200
