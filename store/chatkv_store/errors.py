"""Every way the disk tier can refuse, as one tree; `str()` of each is one clear line.

StoreError                  the disk tier cannot do what was asked
├── StoreFull               no space left on the disk, or the budget is spent
├── StoreReadOnly           the files or their folder may not be written
├── StoreBusy               another process holds what is needed; its pid is named
├── StoreVersionError       written by a newer chatkv
├── StoreDamaged            the bytes on disk are not what was written
├── SessionNotFound         no conversation answers to this name
└── SessionAmbiguous        several do; they are named
"""

from __future__ import annotations


class StoreError(Exception):
    """The disk tier cannot do what was asked."""


class StoreFull(StoreError):
    """No space left on the disk, or the budget is spent."""


class StoreReadOnly(StoreError):
    """The files or their folder may not be written."""


class StoreBusy(StoreError):
    """Another process holds what is needed."""


class StoreVersionError(StoreError):
    """The files were written by a newer chatkv."""


class StoreDamaged(StoreError):
    """The bytes on disk are not what was written."""


class SessionNotFound(StoreError):
    """No conversation answers to this id, prefix or title."""


class SessionAmbiguous(StoreError):
    """Several conversations answer to this prefix or title."""
