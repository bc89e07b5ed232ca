"""What an engine process holds: loaded models, and the conversations that are open in them.

A conversation is open while somebody talks to it and a few seconds longer; its lease is free then
for other programs, while its KV stays in memory as long as there is room.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chatkv.errors import UsageError
from chatkv.model.catalog import find_model
from chatkv.paths import Folders
from chatkv.runtime import Runtime
from chatkv.session.request import ChatRequest, Found, WantedDtype, find
from chatkv_store.conversations import Conversations
from chatkv_store.errors import StoreBusy

if TYPE_CHECKING:
    from chatkv.session.conversation import Conversation

Progress = Callable[[str, int, int], None]

# How long a conversation stays open after its last use: drafts come every few hundred ms.
LINGER_S = 5.0
# One in which nothing was said yet is known to nobody else.
LINGER_UNSAID_S = 3600.0
# A third model would hardly fit beside the KV of two.
MAX_MODELS = 2


@dataclass(eq=False)
class Held:
    """An open conversation. `lock` is held by the one turn, draft or change that uses it."""

    runtime: Runtime
    conversation: Conversation
    is_resumed: bool
    kv_codec: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    used_at: float = 0.0
    cancels: set[threading.Event] = field(default_factory=set)

    @property
    def session_id(self) -> str:
        return self.conversation.session.id


class Hub:
    """Opens, lends and closes. Every method may be called from any thread."""

    def __init__(self, folders: Folders, clock: Callable[[], float] = time.monotonic) -> None:
        self.folders = folders
        self.conversations = Conversations(folders.conversations, must_open=False)
        self._clock = clock
        self._lock = threading.RLock()
        self._loading = threading.Lock()  # one model at a time
        self._runtimes: dict[tuple[str | None, str], Runtime] = {}  # the last used one last
        self._held: dict[str, Held] = {}

    def open(self, request: ChatRequest, on_progress: Progress | None = None) -> Held:
        """The conversation that `request` names, open; a new one has an id, and no turn."""
        if request.resume is not None and (known := self._unsaid(request.resume)) is not None:
            return known
        found = find(self.conversations, request)
        find_model(found.model, self.folders.cache)  # a wrong name is said before anything else
        runtime = self.runtime(found.model, found.dtype, on_progress)
        with self._lock:
            held = self._held.get(found.session.id) if found.session is not None else None
            if held is not None and (held.runtime, held.kv_codec) == (runtime, found.kv_codec):
                held.used_at = self._clock()
                return held
            if held is not None:
                self._close(held)
            return self._open(runtime, found, request)

    @contextmanager
    def use(self, session_id: str, cancel: threading.Event) -> Iterator[Held]:
        """The conversation for a turn, a draft or a change, alone; opened where it is not.

        Raises StoreBusy where another turn of it is running.
        """
        with self._lock:
            held = self._held.get(session_id)
        if held is None:
            held = self.open(ChatRequest(resume=session_id))
        if not held.lock.acquire(timeout=1.0):
            raise StoreBusy(f"session {session_id} is answering already: stop it, or fork it")
        try:
            held.cancels.add(cancel)
            yield held
        finally:
            held.cancels.discard(cancel)
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
        """Close a conversation now, and drop its KV from memory: it is about to be deleted."""
        self.cancel(session_id)
        with self._lock:
            held = self._held.get(session_id)
        if held is not None:
            with held.lock, self._lock:
                self._close(held)
        for runtime in list(self._runtimes.values()):
            runtime.forget(session_id)

    def tidy(self) -> None:
        """Close what nobody has used for a while."""
        now = self._clock()
        with self._lock:
            for held in list(self._held.values()):
                conversation = held.conversation
                linger_s = LINGER_S if conversation.turns else LINGER_UNSAID_S
                is_due = now - held.used_at > linger_s and not conversation.journal.num_unsaved
                if is_due and held.lock.acquire(blocking=False):
                    try:
                        self._close(held)
                    finally:
                        held.lock.release()

    @property
    def num_running(self) -> int:
        """Turns, drafts and changes that are going on."""
        with self._lock:
            return sum(held.lock.locked() for held in self._held.values())

    @property
    def num_unsaved(self) -> int:
        """Turns that are in memory only, because they could not be written."""
        with self._lock:
            return sum(held.conversation.journal.num_unsaved for held in self._held.values())

    def status(self) -> dict[str, Any]:
        """What is loaded and open, for people and programs."""
        with self._lock:
            distinct = {id(runtime): runtime for runtime in self._runtimes.values()}
            return {
                "models": [runtime.status() for runtime in distinct.values()],
                "open_sessions": list(self._held),
                "running": [held.session_id for held in self._held.values() if held.lock.locked()],
            }

    def cancel_all(self) -> None:
        """Stop everything that is running."""
        with self._lock:
            sessions = list(self._held)
        for session_id in sessions:
            self.cancel(session_id)

    def close(self) -> None:
        """Stop everything, keep what was said, write what is queued."""
        self.cancel_all()
        for held in list(self._held.values()):
            with held.lock, self._lock:
                self._close(held)
        for runtime in self._runtimes.values():
            runtime.close()
        self.conversations.close()

    def runtime(
        self, model: str | None, dtype: WantedDtype, on_progress: Progress | None = None
    ) -> Runtime:
        """The model, loaded where it is not yet; the one used longest ago makes room."""
        with self._loading:
            key = (model, dtype)
            runtime = self._runtimes.pop(key, None) or self._same(model, dtype)
            if runtime is None:
                self._make_room()
                runtime = Runtime(self.folders, self.conversations, model, dtype, on_progress)
            self._runtimes[key] = runtime
            return runtime

    # --- inside ---------------------------------------------------------------------------------

    def _same(self, model: str | None, dtype: str) -> Runtime | None:
        """A loaded runtime that a session's own settings mean: "auto" was resolved to its dtype."""
        for runtime in self._runtimes.values():
            if runtime.model_spec == model and runtime.prepared.dtype == dtype:
                return runtime
        return None

    def _make_room(self) -> None:
        distinct = list({id(runtime): runtime for runtime in self._runtimes.values()}.values())
        if len(distinct) < MAX_MODELS:
            return
        for runtime in distinct:
            with self._lock:
                mine = [held for held in self._held.values() if held.runtime is runtime]
                if any(held.lock.locked() for held in mine):
                    continue
                for held in mine:
                    self._close(held)
                self._runtimes = {k: r for k, r in self._runtimes.items() if r is not runtime}
            runtime.close()
            return
        raise UsageError(
            f"{MAX_MODELS} models are answering already: wait for one of them, or stop it"
        )

    def _unsaid(self, reference: str) -> Held | None:
        """A conversation that was opened here and in which nothing was said yet: in no file."""
        with self._lock:
            held = self._held.get(reference)
            if held is None or held.conversation.turns:
                return None
            held.used_at = self._clock()
            return held

    def _open(self, runtime: Runtime, found: Found, request: ChatRequest) -> Held:
        session = found.session or runtime.new_session(seed=request.seed, kv_codec=found.kv_codec)
        conversation = runtime.open(session, found.kv_codec)
        held = Held(runtime, conversation, found.session is not None, found.kv_codec)
        held.used_at = self._clock()
        self._held[session.id] = held
        return held

    def _close(self, held: Held) -> None:
        self._held.pop(held.session_id, None)
        with suppress(Exception):  # a full disk: said by the turn that met it
            held.conversation.close()
