"""What the KV cache holds, and what is loaded and running, for whoever comes over TCP.

GET /status                  what is loaded, open and running
GET /cache                   how much is stored, and of what
GET /cache/sessions?limit=N  ... for each conversation, by last use
GET /cache/stats             how often that helped

The names are those of `chatkv cache du`, `ls` and `stats` with --format json. Who comes with a
token sees its own conversations; of the machine as a whole, only who needs none. Nothing here
changes anything.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chatkv import __version__
from chatkv.errors import UsageError
from chatkv.process import resident_bytes
from chatkv.server.carriers import owner_of
from chatkv.server.http import Handler, in_thread
from chatkv.server.hub import Hub
from chatkv.session.cache_summary import summary
from chatkv_store.blocks import BlockStore
from chatkv_store.budget import default_budget, disk_free_bytes
from chatkv_store.conversations import Session
from chatkv_store.errors import StoreError
from chatkv_store.sharing import usage

MAX_LISTED = 1000
_OF_A_MODEL = ("model", "dtype", "device", "context", "kv_bytes_per_token", "kv_tokens")


class Cache:
    """The handlers over one hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def handlers(self) -> dict[str, Handler]:
        return {
            "GET /status": self.status,
            "GET /cache": self.total,
            "GET /cache/sessions": self.sessions,
            "GET /cache/stats": self.stats,
        }

    async def status(self, request: Request) -> Response:
        """What is loaded, open and running."""
        owner = owner_of(request)

        def look() -> dict[str, Any]:
            found = self._hub.status()
            mine = {session.id for session in self._sessions(owner)}
            about: dict[str, Any] = {
                "version": __version__,
                "models": [{name: one[name] for name in _OF_A_MODEL} for one in found["models"]],
            }
            for name in ("open_sessions", "answering"):
                about[name] = [one for one in found[name] if one in mine]
            return about if owner else about | {"memory_bytes": resident_bytes()}

        return JSONResponse(await in_thread(look))

    async def total(self, request: Request) -> Response:
        """How much KV is stored."""
        owner = owner_of(request)

        def look() -> dict[str, Any]:
            blocks = self._blocks()
            shares = usage(blocks, self._hub.conversations, self._sessions(owner)).sessions
            # A block that several conversations find is counted for each of them.
            found = {
                "sessions": len(shares),
                "stored_tokens": sum(share.num_stored_tokens for share in shares),
                "unique_bytes": sum(share.unique_bytes for share in shares),
                "shared_bytes": sum(share.shared_bytes for share in shares),
            }
            return found if owner else found | disk_figures(self._hub)

        return JSONResponse(await in_thread(look))

    async def sessions(self, request: Request) -> Response:
        """What is stored for each conversation."""
        owner, limit = owner_of(request), _limit(request)

        def look() -> list[dict[str, Any]]:
            newest = self._sessions(owner)[:limit]
            found = usage(self._blocks(), self._hub.conversations, newest)
            return [share.to_json() for share in found.sessions]

        return JSONResponse({"sessions": await in_thread(look)})

    async def stats(self, request: Request) -> Response:
        """How often stored KV was found, and what that was worth."""
        owner = owner_of(request)

        def look() -> dict[str, Any]:
            blocks = self._hub.blocks
            since = (blocks.counted_since() if blocks is not None else None) or 0.0
            mine = {session.id for session in self._sessions(owner)}
            turns = self._hub.conversations.turn_stats()
            sums = summary(one for id, at, one in turns if id in mine and at >= since)
            counters = blocks.counters() if blocks is not None and not owner else {}
            return sums | counters | {"reset_at": since or None}

        return JSONResponse(await in_thread(look))

    def _sessions(self, owner: str) -> list[Session]:
        sessions = self._hub.conversations.list_sessions()
        return [one for one in sessions if one.settings.get("owner", "") == owner]

    def _blocks(self) -> BlockStore:
        blocks = self._hub.blocks
        if blocks is None:
            raise StoreError("the KV cache is not open: no model is loaded yet")
        return blocks


def disk_figures(hub: Hub) -> dict[str, int]:
    """The disk tier in numbers, empty where none is open; what the store has counted included."""
    blocks = hub.blocks
    if blocks is None:
        return {}
    stats, budget = blocks.stats(), default_budget(hub.folders.kv)
    return {
        "blocks": stats["blocks"],
        "file_bytes": stats["file_bytes"],
        "used_bytes": stats["used_bytes"],
        "reusable_bytes": stats["free_bytes"],
        "max_bytes": budget.max_bytes or 0,
        "min_free_bytes": budget.min_free_bytes,
        "disk_free_bytes": disk_free_bytes(hub.folders.cache),
        **blocks.counters(),
    }


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", "100")
    if not (given.isascii() and given.isdigit() and 0 < int(given[:9]) <= MAX_LISTED):
        raise UsageError(f"limit must be a whole number from 1 to {MAX_LISTED}")
    return int(given)
