"""Whether two processes have one store open: the same file on the same running machine."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from chatkv_store.environment import DATA_FILE

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def identity(store: BlockStore) -> str | None:
    """Equal for two stores only if they are one: a digest of the system's boot, of which there is
    one at a time, and of the data file's device and number in it. None where that cannot be told.
    """
    with suppress(OSError):
        file = (store.path / DATA_FILE).stat()
        about = f"{_BOOT_ID.read_text().strip()}/{file.st_dev}/{file.st_ino}"
        return hashlib.blake2b(about.encode(), digest_size=32, person=b"chatkv-store-1").hexdigest()
    return None
