"""What an engine process holds: loaded models, and the conversations that are open in them.

A conversation is open while somebody talks to it and a few seconds longer; its lease is free then
for other programs, while its KV stays in memory as long as there is room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chatkv.engine.scheduler import Cancelled
from chatkv.model.catalog import find_model
from chatkv.paths import Folders
from chatkv.restore.prefill_worker import PrefillWorker
from chatkv.runtime import Runtime
from chatkv.server.models import Models, Progress, closed
from chatkv.session.request import ChatRequest, Found, KVCodec, WantedDtype, WantedWeights, find
from chatkv_store.conversations import Conversations, Session
from chatkv_store.errors import SessionNotFound, StoreBusy

if TYPE_CHECKING:
    from chatkv.session.conversation import Conversation
    from chatkv_store.blocks import BlockStore

log = logging.getLogger("chatkv.server")

# How long a conversation stays open after its last use: drafts come every few hundred ms.
LINGER_S = 5.0
# How long a turn waits for the one that is just ending.
PATIENCE_S = 1.0
FLUSH_S = 10.0
# Sessions in which nothing was said yet; each chat that is started begins with one.
MAX_UNSAID = 1000


@dataclass(eq=False)
class Held:
    """An open conversation. `lock` is held by the one turn, draft or change that uses it."""

    runtime: Runtime
    conversation: Conversation
    is_resumed: bool
    kv_codec: KVCodec
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_drafting: bool = False  # the lock's holder is a draft
    used_at: float = 0.0
    cancels: set[threading.Event] = field(default_factory=set)

    @property
    def session_id(self) -> str:
        return self.conversation.session.id

    @property
    def is_answering(self) -> bool:
        return self.lock.locked() and not self.is_drafting


class Hub:
    """Opens, lends and closes. Every method may be called from any thread.

    `_lock` guards what is in the dictionaries, for moments; a Held's own lock is held as long as
    a turn takes, and may be taken with `_lock` only where it is not waited for.
    """

    def __init__(
        self,
        folders: Folders,
        clock: Callable[[], float] = time.monotonic,
        prefill: PrefillWorker | None = None,
    ) -> None:
        self.folders = folders
        self.conversations = Conversations(folders.conversations, must_open=False)
        self._clock = clock
        self._lock = threading.RLock()
        self._models = Models(folders, self.conversations, self._lock, self._let_go, prefill)
        self._held: dict[str, Held] = {}
        self._unsaid: dict[str, Found] = {}  # closed, and in no file to be opened from
        self._is_closed = False

    # --- conversations ----------------------------------------------------------------------------

    def open(self, request: ChatRequest, on_progress: Progress | None = None) -> Held:
        """The conversation that `request` names, open; a new one has an id, and no turn."""
        found = self._find(request)
        find_model(found.model, self.folders.cache)  # a wrong name is said before anything else
        while True:
            runtime = self.runtime(found.model, found.dtype, on_progress, found.weights)
            with self._lock:
                if self._is_closed:
                    raise closed()
                if runtime not in self._models.loaded:
                    continue  # it had to make room for another one already
                held = self._held.get(found.session.id) if found.session is not None else None
                if held is None:
                    return self._open(runtime, found, request)
                if (held.runtime, held.kv_codec) != (runtime, found.kv_codec):
                    self._close_idle(held)
                    return self._open(runtime, found, request)
                held.used_at = self._clock()
                held.conversation.journal.refresh()
                return held

    @property
    def blocks(self) -> BlockStore | None:
        """The KV on the disk; None where it cannot be opened, or no model is loaded yet."""
        return self._models.blocks

    def session(self, session_id: str) -> Session:
        """The session with this id, whole, also where nothing was said in it yet. Raises
        SessionNotFound."""
        with self._lock:
            held, unsaid = self._held.get(session_id), self._unsaid.get(session_id)
        if held is not None:
            return held.conversation.session
        found = unsaid.session if unsaid is not None else None
        found = found or self.conversations.get_session(session_id)
        if found.id != session_id:  # a prefix, or a title
            raise SessionNotFound(f"there is no session {session_id!r}")
        return found

    @contextmanager
    def use(
        self, session_id: str, cancel: threading.Event, is_draft: bool = False
    ) -> Iterator[Held]:
        """The conversation for a turn, a draft or a change, alone; opened where it is not.

        Waits for a draft, which whoever comes has to cancel first. Raises StoreBusy where a turn
        is running, and Cancelled.
        """
        held = self._take(session_id, cancel)
        try:
            held.is_drafting = is_draft
            held.cancels.add(cancel)
            yield held
        finally:
            held.cancels.discard(cancel)
            held.is_drafting = False
            held.used_at = self._clock()
            held.lock.release()

    def cancel(self, session_id: str) -> bool:
        """Stop what is running in a session; False where nothing is."""
        with self._lock:
            held = self._held.get(session_id)
            running = list(held.cancels) if held is not None else []
        for cancel in running:
            cancel.set()
        return bool(running)

    def release(self, session_id: str) -> None:
        """Close a conversation and drop its KV from memory, with all that was computed of it on
        the disk: it is about to be deleted. StoreBusy where it is answering."""
        with self._lock:
            held = self._held.get(session_id)
        if held is not None:
            with self.use(session_id, threading.Event()) as held, self._lock:
                self._close(held)
        with self._lock:
            self._unsaid.pop(session_id, None)
        for runtime in self._models.loaded:
            runtime.forget(session_id)
        self._models.flush(FLUSH_S)

    def tidy(self) -> None:
        """Close what nobody has used for a while; what could not be written is tried again."""
        now = self._clock()
        with self._lock:
            for held in list(self._held.values()):
                if now - held.used_at > LINGER_S and held.lock.acquire(blocking=False):
                    try:
                        self._tidy(held, now)
                    finally:
                        held.lock.release()

    @property
    def num_running(self) -> int:
        """Turns, drafts and changes that are going on."""
        with self._lock:
            return sum(held.lock.locked() for held in self._held.values())

    def save(self) -> int:
        """Try to write what could not be written yet; how many turns are in memory only."""
        with self._lock:
            for held in self._held.values():
                if held.conversation.journal.num_unsaved and held.lock.acquire(blocking=False):
                    try:
                        held.conversation.journal.save()
                    finally:
                        held.lock.release()
            return self.num_unsaved

    @property
    def num_unsaved(self) -> int:
        """Turns that are in memory only, because they could not be written."""
        with self._lock:
            idle = (held for held in self._held.values() if not held.is_answering)
            return sum(held.conversation.journal.num_unsaved for held in idle)

    def status(self) -> dict[str, Any]:
        """What is loaded and open, for people and programs."""
        with self._lock:
            return {
                "models": [runtime.status() for runtime in self._models.loaded],
                "open_sessions": list(self._held),
                "answering": [held.session_id for held in self._held.values() if held.is_answering],
            }

    def cancel_all(self) -> None:
        """Stop everything that is running, and begin nothing more."""
        with self._lock:
            self._is_closed = True
            sessions = list(self._held)
        for session_id in sessions:
            self.cancel(session_id)

    def close(self) -> None:
        """Stop everything, keep what was said, write what is queued."""
        self.cancel_all()
        for held in list(self._held.values()):
            with held.lock, self._lock:
                self._close(held)
        self._models.close()
        self.conversations.close()

    def runtime(
        self,
        model: str | None,
        dtype: WantedDtype,
        on_progress: Progress | None = None,
        weights: WantedWeights = "auto",
    ) -> Runtime:
        """The model, loaded where it is not yet; an idle one may have to make room."""
        return self._models.get(model, dtype, on_progress, weights)

    # --- inside -----------------------------------------------------------------------------------

    def _let_go(self, runtime: Runtime) -> bool:
        mine = [held for held in self._held.values() if held.runtime is runtime]
        if any(held.lock.locked() or held.conversation.journal.num_unsaved for held in mine):
            return False
        for held in mine:
            self._close(held)
        return True

    def _find(self, request: ChatRequest) -> Found:
        with self._lock:
            held = self._held.get(request.resume or "")
            if held is not None and not held.conversation.turns:
                return _found(held)
            if request.resume in self._unsaid:
                return self._unsaid[request.resume]
        return find(self.conversations, request)

    def _take(self, session_id: str, cancel: threading.Event) -> Held:
        deadline, is_last = self._clock() + PATIENCE_S, False
        while True:
            with self._lock:
                held = self._held.get(session_id)
            if held is None:
                held = self.open(ChatRequest(resume=session_id))
            if held.lock.acquire(timeout=0.02):
                with self._lock:
                    if self._is_closed:
                        held.lock.release()
                        raise closed()
                    if self._held.get(session_id) is held:
                        return held
                held.lock.release()  # it was closed in between
            elif held.is_drafting:
                deadline = self._clock() + PATIENCE_S
            elif is_last:
                raise _answering(session_id)
            else:  # once more: the draft that was waited for may have ended just now
                is_last = self._clock() > deadline
            if cancel.is_set():
                raise Cancelled

    def _open(self, runtime: Runtime, found: Found, request: ChatRequest) -> Held:
        session = found.session or runtime.new_session(
            seed=request.seed, kv_codec=found.kv_codec, owner=request.owner
        )
        conversation = runtime.open(session, found.kv_codec)
        is_resumed = found.session is not None and session.id not in self._unsaid
        held = Held(runtime, conversation, is_resumed, found.kv_codec)
        held.used_at = self._clock()
        self._held[session.id] = held
        self._unsaid.pop(session.id, None)
        return held

    def _tidy(self, held: Held, now: float) -> None:
        journal = held.conversation.journal
        if journal.num_unsaved and not journal.save():
            held.used_at = now
        else:
            self._close(held)

    def _close_idle(self, held: Held) -> None:
        """Close it, to open it otherwise."""
        if not held.lock.acquire(blocking=False):
            raise _answering(held.session_id)
        try:
            self._close(held)
        finally:
            held.lock.release()

    def _close(self, held: Held) -> None:
        self._held.pop(held.session_id, None)
        if not held.conversation.turns:
            self._unsaid[held.session_id] = _found(held)
            while len(self._unsaid) > MAX_UNSAID:
                del self._unsaid[next(iter(self._unsaid))]
        try:
            held.conversation.close()
        except Exception as error:  # the turn that met it has said so
            log.warning("session %s: %s", held.session_id, error)
        if held.conversation.journal.num_unsaved:
            log.warning("session %s: what was said last could not be saved", held.session_id)


def _found(held: Held) -> Found:
    """What opens a conversation in which nothing was said yet once more."""
    runtime = held.runtime
    return Found(
        held.conversation.session,
        runtime.model_spec,
        runtime.prepared.dtype,
        runtime.prepared.stored,
        held.kv_codec,
    )


def _answering(session_id: str) -> StoreBusy:
    return StoreBusy(f"session {session_id} is answering already: stop it, or fork it")
