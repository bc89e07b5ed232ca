"""A file that is forgotten has to be read from the disk again, also where LMDB has mapped it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chatkv_store.environment import DATA_FILE
from chatkv_store.page_cache import forget


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
