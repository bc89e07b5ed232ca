"""Every error the disk tier raises, as one tree.

    StoreError                 one line: what, where, what to do
    ├── StoreFull              the cap, the map or the disk has no room; nothing was written
    │   └── BudgetFull         only what is worth more is in the way: nothing anybody need know
    ├── StoreVersionError      written by a newer chatkv
    ├── StoreDamaged           the file is not what LMDB or SQLite wrote
    ├── StoreBusy              somebody else holds it
    ├── StoreReadOnly          no permission to write here
    ├── StoreLocked            encrypted, and no passphrase opens it
    ├── SessionNotFound        an id, prefix or title that names no session
    ├── SessionAmbiguous       ... or several
    └── BlockMiss              one KV block that cannot be used: recompute it

`BlockMiss` is the everyday one: any block may be missing at any time, and the cost is time only.
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of all errors of the disk tier; `str()` is one clear line."""


class StoreFull(StoreError):
    """No room: the byte cap is reached or the disk is full. What was stored before stays."""


class BudgetFull(StoreFull):
    """The cap is reached, and nothing stored is worth less than what is new: the cache is as it
    should be."""


class StoreVersionError(StoreError):
    """The store was written by a newer version, whose format this one does not know."""


class StoreDamaged(StoreError):
    """The file itself is broken (cut, overwritten, of another kind)."""


class StoreBusy(StoreError):
    """Another process, or another object of this process, holds what is needed."""


class StoreReadOnly(StoreError):
    """The store was opened for reading, or lies where this user may not write."""


class StoreLocked(StoreError):
    """The store is encrypted; the passphrase is wrong or not to be found."""


class SessionNotFound(StoreError):
    """No session has this id, prefix or title."""


class SessionAmbiguous(StoreError):
    """Several sessions match; the message names them."""


class BlockMiss(StoreError):
    """A block cannot be used; `reason` says why. The caller recomputes it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
