"""A file that is forgotten has to be read from the disk again, also where LMDB has mapped it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from chatkv_store import BlockStore, reading
from chatkv_store.environment import DATA_FILE
from chatkv_store.page_cache import forget, num_in_memory
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


def test_a_store_tells_which_share_of_its_values_has_to_come_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a sample over all blocks and values, wherever these lie."""
    looked_at: list[int] = []

    def seen(start: int, stop: int) -> tuple[int, int] | None:
        looked_at.append(start)
        return ((stop - start) // 4, stop - start) if len(looked_at) % 2 else None

    tokens = 5 * 64
    with BlockStore(tmp_path) as store:
        save(store, GROUPED, range(tokens), kv_bits(GROUPED, tokens, seed=3))
        blocks = store.match(SPACE, range(tokens), GROUPED).blocks
        assert store.cold_share(blocks) == 0, "it was just written"
        monkeypatch.setattr(reading, "num_in_memory", seen)
        assert store.cold_share(blocks) == pytest.approx(0.75, abs=0.001)
        assert len(set(looked_at)) == 2 * len(blocks)
        assert store.cold_share([]) is None
        monkeypatch.setattr(reading, "num_in_memory", lambda *_: None)
        assert store.cold_share(blocks) is None
