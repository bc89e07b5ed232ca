"""A conversation as a face sees it, wherever its model computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from chatkv.client.local import OpenChat, open_chat
from chatkv.paths import Folders
from chatkv.session.ready import Ready
from chatkv.session.request import ChatRequest
from chatkv_store.errors import StoreError

if TYPE_CHECKING:
    from chatkv.client.link import Link
    from chatkv.session.turn import Listener, TurnOptions, TurnResult
    from chatkv_store.blocks import BlockStore
    from chatkv_store.records import Turn

Progress = Callable[[str, int, int], None]
# off: compute here; running: in the engine where one runs, else here; start: in the engine.
Where = Literal["off", "running", "start"]


@dataclass(frozen=True)
class TurnText:
    """One turn as it is read."""

    turn: int
    system: str | None
    user: str
    reply: str
    state: str
    finish_reason: str | None
    stats: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, turn: Turn) -> TurnText:
        """What is stored of it, without ids."""
        return cls(
            turn.index,
            turn.system_text,
            turn.user_text,
            turn.reply_text,
            turn.state,
            turn.finish_reason,
            turn.stats,
        )


class Chat(Protocol):
    """An open conversation. Errors are ChatkvError and StoreError; turns are 1, 2, ..."""

    model: str
    is_resumed: bool
    max_tokens: int
    notices: list[str]  # lines for the user about the start

    @property
    def is_shared(self) -> bool:
        """Whether it computes in a process that holds other conversations too."""

    @property
    def blocks(self) -> BlockStore | None:
        """The KV cache, where this process has it open: it can be opened once in a process."""

    def status(self) -> dict[str, Any]:
        """What is loaded where it computes; the fields that /status of an engine has."""

    @property
    def session(self) -> str:
        """Its id."""

    @property
    def title(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Length of the log."""

    @property
    def num_unsaved(self) -> int:
        """Turns that could not be written yet."""

    @property
    def turns(self) -> Sequence[TurnText]:
        """What was said so far."""

    def send(
        self, text: str, options: TurnOptions, listener: Listener, system: str | None = None
    ) -> TurnResult:
        """Say something and hear the answer; `listener.cancelled` stops it."""

    def resume_reply(self, options: TurnOptions, listener: Listener) -> TurnResult:
        """Go on with the last answer, where it was stopped or cut."""

    def rewind(self, num_turns: int) -> None:
        """Take back the turns behind the first num_turns; they stay as a branch."""

    def switch(self, turn_id: str) -> None:
        """Go on from behind another turn of the session's tree."""

    def draft(self, text: str, system: str | None = None) -> int:
        """Prefill what is being typed as far as it is settled ("": restore the history); how many
        tokens of the log and it are ready. A newer draft, or a turn, ends it, from any thread."""

    def restore(self) -> Ready:
        """Bring the history into memory: a draft of nothing, told in full."""


@contextmanager
def connect(
    folders: Folders,
    request: ChatRequest,
    on_progress: Progress | None = None,
    where: Where = "running",
) -> Iterator[Chat]:
    """The conversation that `request` names. CHATKV_ENGINE=off computes here in any case; so does
    an engine that cannot be started, which is said."""
    notices: list[str] = []
    link: Link | None = None
    if where != "off" and os.environ.get("CHATKV_ENGINE") != "off":
        from chatkv.client import engine
        from chatkv.client.link import EngineGone

        try:
            link = engine.start(folders) if where == "start" else engine.running(folders)
        except (EngineGone, engine.EngineBusy, OSError) as error:
            notices.append(f"this chat computes by itself: {error}")
    if link is not None:
        from chatkv.client.remote import RemoteChat

        yield RemoteChat(folders, link, _whole(request), on_progress)
        return
    with open_chat(folders, request, on_progress) as opened:
        chat = LocalChat(opened)
        chat.notices += notices
        yield chat


def resolved(folders: Folders, request: ChatRequest) -> ChatRequest:
    """`request` with its session's id. What it names wrongly is said now: UsageError, ModelError
    and StoreError, before a model is loaded or anything is shown."""
    if request.resume is not None or request.resume_last:
        from chatkv.session.request import find
        from chatkv_store.conversations import Conversations

        with Conversations(folders.conversations, must_open=False) as store:
            with suppress(StoreError):
                store.recover()  # an answer that a crash cut off is shown as such
            session = find(store, request).session
        assert session is not None  # else it was refused
        request = replace(request, resume=session.id, resume_last=False)
    if request.model is not None:
        from chatkv.model.catalog import find_model

        find_model(request.model, folders.cache)
    return request


def _whole(request: ChatRequest) -> ChatRequest:
    """With a path that the engine finds too, from its own folder."""
    if request.model is None or not Path(request.model).exists():
        return request
    return replace(request, model=str(Path(request.model).absolute()))


class LocalChat:
    """A conversation in this process."""

    is_shared = False

    def __init__(self, opened: OpenChat) -> None:
        self._runtime = opened.runtime
        self._conversation, self.is_resumed = opened.conversation, opened.is_resumed
        self.model = opened.runtime.prepared.name
        self.max_tokens = opened.runtime.engine.max_tokens
        self.notices = list(opened.runtime.notices)
        self._in_use = threading.Lock()  # by a turn or a draft
        self._newer = threading.Event()  # ends the draft that is running

    @property
    def blocks(self) -> BlockStore | None:
        disk = self._conversation.model.restorer.disk
        return disk.store if disk is not None else None

    def status(self) -> dict[str, Any]:
        from chatkv.process import resident_bytes

        return {
            "pid": os.getpid(),
            "memory_bytes": resident_bytes(),
            "models": [self._runtime.status()],
            "open_sessions": [self.session],
            "answering": [self.session] if self._in_use.locked() else [],
        }

    @property
    def session(self) -> str:
        return self._conversation.session.id

    @property
    def title(self) -> str:
        return self._conversation.session.title

    @property
    def num_tokens(self) -> int:
        return len(self._conversation.log)

    @property
    def num_unsaved(self) -> int:
        return self._conversation.journal.num_unsaved

    @property
    def turns(self) -> list[TurnText]:
        return [TurnText.of(turn) for turn in self._conversation.turns]

    def send(
        self, text: str, options: TurnOptions, listener: Listener, system: str | None = None
    ) -> TurnResult:
        with self._alone():
            return self._conversation.send(text, options, listener, system)

    def resume_reply(self, options: TurnOptions, listener: Listener) -> TurnResult:
        with self._alone():
            return self._conversation.resume_reply(options, listener)

    def rewind(self, num_turns: int) -> None:
        with self._alone():
            self._conversation.rewind(num_turns)

    def switch(self, turn_id: str) -> None:
        with self._alone():
            self._conversation.switch(turn_id)

    def draft(self, text: str, system: str | None = None) -> int:
        return self._make_ready(text, system).cached

    def restore(self) -> Ready:
        return self._make_ready("", None)

    def _make_ready(self, text: str, system: str | None) -> Ready:
        from chatkv.session.ahead import make_ready

        with self._alone() as newer:
            return make_ready(self._conversation, text, newer.is_set, system)

    @contextmanager
    def _alone(self) -> Iterator[threading.Event]:
        """Use the conversation, once the draft that is running has ended."""
        self._newer.set()
        with self._in_use:
            self._newer = threading.Event()
            yield self._newer
