"""How much disk the KV cache may take: a cap on its files, and what must stay free around them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from chatkv_store.errors import StoreError

GIB = 1 << 30
DEFAULT_MAX_BYTES, DEFAULT_MAX_SHARE = 20 * GIB, 0.10  # of the disk; the smaller holds
DEFAULT_FREE_BYTES, DEFAULT_FREE_SHARE = 1 * GIB, 0.05

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """Both hold at every instant. None: no limit."""

    max_bytes: int | None = None  # of the store's files, metadata included
    min_free_bytes: int = 0  # what the store never takes of the disk's free space


def default_budget(path: Path, variables: Mapping[str, str] = os.environ) -> Budget:
    """CHATKV_KV_MAX_BYTES and CHATKV_KV_MIN_FREE_BYTES ("20GiB"), else shares of path's disk.

    Raises StoreError where a variable is no size.
    """
    disk = os.statvfs(_existing(path))
    disk_bytes = disk.f_blocks * disk.f_frsize
    cap = variables.get("CHATKV_KV_MAX_BYTES")
    floor = variables.get("CHATKV_KV_MIN_FREE_BYTES")
    return Budget(
        _variable("CHATKV_KV_MAX_BYTES", cap)
        if cap
        else min(DEFAULT_MAX_BYTES, int(disk_bytes * DEFAULT_MAX_SHARE)),
        _variable("CHATKV_KV_MIN_FREE_BYTES", floor)
        if floor
        else min(DEFAULT_FREE_BYTES, int(disk_bytes * DEFAULT_FREE_SHARE)),
    )


def parse_size(text: str) -> int:
    """Bytes in "20GiB", "1.5 GB", "4096"; ValueError where that is no size.

    KiB, MiB, GiB, TiB count by 1024, kB, MB, GB, TB by 1000.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f'"{text}" is no size: write it like 20GiB')
    return int(float(found[1]) * _UNITS[(found[2] or "").lower()])


def disk_free_bytes(path: Path) -> int:
    """Free bytes of the file system that holds `path`, or would."""
    found = os.statvfs(_existing(path))
    return found.f_bavail * found.f_frsize


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _variable(name: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise StoreError(f"{name}: {error}") from None
