"""Overwriting what LMDB no longer uses: a deleted value stays in the file until its pages are.

A page that is free belongs to no snapshot that anybody may still open: the last commit, the one
before it (to which a power cut may lead back), and those of living readers. All others are filled
with zeros, as is the gap in each tree page, where LMDB leaves what it has removed from that page.

What a disk keeps of overwritten sectors (wear levelling, snapshots, backups) is beyond a program.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatkv_store import pages
from chatkv_store.environment import DATA_FILE
from chatkv_store.errors import StoreDamaged
from chatkv_store.page_format import PagesDamaged, unused_part

if TYPE_CHECKING:
    from chatkv_store.environment import Environment

_PIECE_BYTES = 1 << 20  # overwritten at once, so that the memory for it stays small
_READER = re.compile(r"^\s*\d+\s+[0-9a-f]+\s+(\d+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Erased:
    num_bytes: int  # overwritten that were not zero before
    num_kept_bytes: int  # free pages that somebody may still be reading; erased the next time


def erase(env: Environment, databases: dict[str, dict[str, bool]]) -> Erased:
    """Overwrite the free pages of `env`; other processes wait to write meanwhile, and read on."""
    meta = env.databases["meta"]
    for _ in range(2):  # two commits later, no snapshot that may be opened holds what was deleted
        env.write(lambda txn: txn.put(b"erased", os.urandom(8), db=meta))
    env.sync()
    flags = {name.encode(): pages.flags_of(options) for name, options in databases.items()}

    def work(txn: Any) -> Erased:
        with (env.path / DATA_FILE).open("r+b", buffering=0) as file:
            try:
                # The writer's lock is held: the last commit stays the last one.
                found = pages.check(file.fileno(), txn.id() - 1, env.page_bytes, flags)
            except PagesDamaged as error:
                raise StoreDamaged(f"{file.name} is damaged: {error}") from None
            erased = _erase(file.fileno(), found, env.readers(), txn.id() - 1)
            os.fsync(file.fileno())
        return erased

    return env.look_alone(work)


def _erase(file: int, found: pages.Pages, readers: str, last_commit: int) -> Erased:
    """What a transaction has freed is unused where every snapshot in use is as new as it. The last
    commit is the second one of ours, and has freed nothing that was ever deleted."""
    freed_by = min([last_commit - 1, *map(int, _READER.findall(readers))])
    size = found.page_bytes
    erased = kept = 0
    unused: list[int] = []
    for by, numbers in found.free:
        if by <= freed_by:
            unused += numbers
        elif by < last_commit:
            kept += len(numbers) * size
    unused += range(found.num_pages, -(-os.fstat(file).st_size // size))
    for first, count in _runs(sorted(unused)):
        for start in range(first * size, (first + count) * size, _PIECE_BYTES):
            length = min(_PIECE_BYTES, (first + count) * size - start)
            erased += _zero(file, start, length)
    for number in found.tree:
        low, high = unused_part(os.pread(file, size, number * size))
        erased += _zero(file, number * size + low, high - low)
    return Erased(erased, kept)


def _zero(file: int, start: int, length: int) -> int:
    """Write zeros where there are none; returns the bytes written."""
    content = os.pread(file, length, start)
    if not content.strip(b"\0"):
        return 0
    os.pwrite(file, bytes(len(content)), start)
    return len(content)


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Sorted numbers as (first, how many in a row)."""
    first, count = -1, 0
    for number in numbers:
        if number == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count
