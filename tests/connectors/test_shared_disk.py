"""A guest has one store for all who ask in its process, and makes no settings for its host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from chatkv.connectors.shared_disk import SharedDisk, folders_of
from chatkv_store.blocks import BlockStore
from program import environment

OURS = (
    *("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"),
    *("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"),
)


def test_a_process_opens_the_store_once_and_closes_it_with_the_last_share(home: Path) -> None:
    place = folders_of(str(home))
    assert place == folders_of(None)
    one, other = SharedDisk(place), SharedDisk(place)
    assert one.store is other.store is not None
    assert one.writer is other.writer
    one.close()
    one.close()
    assert other.store is not None and other.store.stats()["blocks"] == 0
    other.close()
    with BlockStore(place.kv):  # nobody has it open
        pass


def test_a_store_that_cannot_be_opened_is_said_and_done_without(home: Path) -> None:
    place = folders_of(str(home)).make()
    place.kv.write_text("no folder")
    disk = SharedDisk(place)
    assert (disk.store, disk.writer) == (None, None)
    assert "KV is not kept" in disk.notices[0]
    disk.close()


def test_a_host_keeps_its_own_settings() -> None:
    """What chatkv sets for libraries that it loads, the processes of a host would inherit."""
    alone = environment()
    for name in OURS:
        alone.pop(name, None)
    code = "import os, sys, types; sys.modules['vllm'] = types.ModuleType('vllm')\n"
    code += "before = dict(os.environ); import chatkv; assert os.environ == before"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=alone)
