"""Conversations as they are listed, searched, read, renamed, forked and deleted; needs no model.

GET    /sessions?search=TEXT&limit=N    by last use, newest first; those with every word of TEXT
GET    /sessions/ID                     all of its turns, those that were left behind too
POST   /sessions/ID/rename              {"title"}
POST   /sessions/ID/fork                {"at": how many turns it keeps, null for all}
DELETE /sessions/ID                     for good; its KV is dropped from memory

Who comes with a token sees what belongs to it; over the engine's own socket, its user sees all.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from chatkv.errors import UsageError
from chatkv.server.body import body_as
from chatkv.server.hub import Hub
from chatkv.server.wire import ForkRequest, RenameRequest
from chatkv_store.conversations import SearchHit, Session, Turn
from chatkv_store.errors import SessionNotFound, StoreError

MAX_LISTED, MAX_TITLE_CHARS = 1000, 500


class Library:
    """The routes over one hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub, self._store = hub, hub.conversations

    def routes(self) -> list[Route]:
        return [
            Route("/sessions", self.list, methods=["GET"]),
            Route("/sessions/{id}", self.show, methods=["GET"]),
            Route("/sessions/{id}", self.delete, methods=["DELETE"]),
            Route("/sessions/{id}/rename", self.rename, methods=["POST"]),
            Route("/sessions/{id}/fork", self.fork, methods=["POST"]),
        ]

    async def list(self, request: Request) -> Response:
        """Conversations by last use, newest first."""
        words, limit = request.query_params.get("search", ""), _limit(request)

        def look() -> list[dict[str, Any]]:
            if words.strip():
                hits = self._store.search(words, None)
                found = [hit for hit in hits if is_visible(request, hit.session)]
                return [hit.session.to_json() | _about(hit) for hit in found[:limit]]
            sessions = self._store.list_sessions()
            return [one.to_json() for one in sessions if is_visible(request, one)][:limit]

        return JSONResponse({"sessions": await run_in_threadpool(look)})

    async def show(self, request: Request) -> Response:
        """A conversation with its whole tree."""

        def look() -> dict[str, Any]:
            with suppress(StoreError):
                self._store.recover()  # say "interrupted" of a turn whose process is gone
            session = find(self._hub, request, request.path_params["id"])
            turns: list[Turn] = []
            if not _is_unsaid(self._hub, session):  # what is open knows its head as it was
                session = self._store.get_session(session.id)
                turns = self._store.tree(session.id)
            models = self._hub.status()["models"]
            limits = {model["model"]: model["context"] for model in models}
            return session.to_json() | {
                "head": session.head,
                "max_tokens": limits.get(session.model),
                "tree": [_turn(turn) for turn in turns],
            }

        return JSONResponse(await run_in_threadpool(look))

    async def rename(self, request: Request) -> Response:
        """Give a conversation another title."""
        title = (await body_as(request, RenameRequest)).title
        if not title.strip() or len(title) > MAX_TITLE_CHARS:
            raise UsageError(f"a title needs between 1 and {MAX_TITLE_CHARS} characters")

        def change() -> dict[str, Any]:
            session = find(self._hub, request, request.path_params["id"])
            return self._store.rename(session.id, title).to_json()

        return JSONResponse(await run_in_threadpool(change))

    async def fork(self, request: Request) -> Response:
        """A new conversation that shares the first turns of this one."""
        at_turn = (await body_as(request, ForkRequest)).at

        def change() -> dict[str, Any]:
            session = find(self._hub, request, request.path_params["id"])
            return self._store.fork(session.id, at_turn).to_json()

        return JSONResponse(await run_in_threadpool(change))

    async def delete(self, request: Request) -> Response:
        """Delete a conversation for good."""

        def change() -> dict[str, Any]:
            session = find(self._hub, request, request.path_params["id"])
            is_unsaid = _is_unsaid(self._hub, session)
            self._hub.release(session.id)
            return {
                "deleted": session.id,
                "turns": 0 if is_unsaid else self._store.delete_session(session.id),
            }

        return JSONResponse(await run_in_threadpool(change))


def find(hub: Hub, request: Request, session_id: str) -> Session:
    """The session with this id, where whoever asks may see it. Raises SessionNotFound."""
    with suppress(SessionNotFound):
        session = hub.session(session_id)
        if is_visible(request, session):
            return session
    raise SessionNotFound(f"there is no session {session_id[:100]!r}")


def is_visible(request: Request, session: Session) -> bool:
    owner = request.scope.get("chatkv.owner")  # None: it came over the engine's own socket
    return owner is None or bool(session.settings.get("owner", "") == owner)


def _is_unsaid(hub: Hub, session: Session) -> bool:
    """Nothing was said in it yet, so that it is in no file."""
    try:
        return hub.conversations.get_session(session.id).id != session.id
    except SessionNotFound:
        return True


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", "100")
    if not (given.isascii() and given.isdigit() and 0 < int(given[:9]) <= MAX_LISTED):
        raise UsageError(f"limit must be a whole number from 1 to {MAX_LISTED}")
    return int(given)


def _about(hit: SearchHit) -> dict[str, Any]:
    return {"turn": hit.turn_index, "hits": hit.num_hits, "snippet": hit.snippet}


def _turn(turn: Turn) -> dict[str, Any]:
    about = {"id": turn.id, "parent": turn.parent_id, "created_at": turn.created_at}
    return about | turn.to_json()
