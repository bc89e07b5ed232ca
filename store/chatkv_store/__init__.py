"""The disk tier: KV blocks in LMDB, conversations in SQLite. Imports no torch.

Names are imported when first used: listing a cache needs neither numpy nor zstandard, and starts
in about a tenth of a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore as BlockStore
    from chatkv_store.blocks import Match as Match
    from chatkv_store.blocks import NewBlock as NewBlock
    from chatkv_store.blocks import PutResult as PutResult
    from chatkv_store.blocks import StoredBlock as StoredBlock
    from chatkv_store.conversations import Conversations as Conversations
    from chatkv_store.conversations import Session as Session
    from chatkv_store.conversations import Turn as Turn
    from chatkv_store.errors import BlockMiss as BlockMiss
    from chatkv_store.errors import SessionAmbiguous as SessionAmbiguous
    from chatkv_store.errors import SessionNotFound as SessionNotFound
    from chatkv_store.errors import StoreBusy as StoreBusy
    from chatkv_store.errors import StoreDamaged as StoreDamaged
    from chatkv_store.errors import StoreError as StoreError
    from chatkv_store.errors import StoreFull as StoreFull
    from chatkv_store.errors import StoreLocked as StoreLocked
    from chatkv_store.errors import StoreReadOnly as StoreReadOnly
    from chatkv_store.errors import StoreVersionError as StoreVersionError
    from chatkv_store.integrity import Finding as Finding
    from chatkv_store.keys import block_key as block_key
    from chatkv_store.keys import namespace as namespace
    from chatkv_store.layout import KVLayout as KVLayout
    from chatkv_store.loader import LoadResult as LoadResult
    from chatkv_store.loader import load_blocks as load_blocks
    from chatkv_store.writer import BlockWriter as BlockWriter

_HOMES = {
    "blocks": ("BlockStore", "Match", "NewBlock", "PutResult", "StoredBlock"),
    "conversations": ("Conversations", "Session", "Turn"),
    "errors": (
        "BlockMiss",
        "SessionAmbiguous",
        "SessionNotFound",
        "StoreBusy",
        "StoreDamaged",
        "StoreError",
        "StoreFull",
        "StoreLocked",
        "StoreReadOnly",
        "StoreVersionError",
    ),
    "integrity": ("Finding",),
    "keys": ("block_key", "namespace"),
    "layout": ("KVLayout",),
    "loader": ("LoadResult", "load_blocks"),
    "writer": ("BlockWriter",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
