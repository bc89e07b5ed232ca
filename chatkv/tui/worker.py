"""Where a face waits for answers: one thread talks to the conversation, another prefills drafts.

Neither touches a widget. What they hear becomes messages; text is put aside and fetched with
`take_text`, because a model may write faster than a screen can be painted.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from textual.message import Message

from chatkv.client import Chat, ChatRequest
from chatkv.errors import ChatkvError, ContextFull
from chatkv.tui import messages
from chatkv_store.errors import StoreError

if TYPE_CHECKING:
    from chatkv.session.turn import Listener, TurnOptions, TurnResult

Progress = Callable[[str, int, int], None]
Result = TypeVar("Result")
# How long leaving waits for an answer to be stopped and saved.
LEAVE_S = 10.0


class Connect(Protocol):
    """`chatkv.client.connect`, with all but the request filled in."""

    def __call__(
        self, request: ChatRequest, on_progress: Progress | None
    ) -> AbstractContextManager[Chat]: ...


@dataclass(frozen=True)
class _Draft:
    text: str
    system: str | None = None
    session: str | None = None  # another one, that the user may be about to open


class Worker:
    """What is asked of it is done one after the other; nothing here waits but `close`."""

    def __init__(self, connect: Connect, post: Callable[[Message], object]) -> None:
        self._connect, self._post = connect, post
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._chat: Chat | None = None
        self._opened = ExitStack()
        self._request = ChatRequest()  # what is open, or was meant to be
        self._cancel = threading.Event()
        self._text: list[str] = []
        self._lock = threading.Lock()
        self._draft: _Draft | None = None
        self._draft_came = threading.Condition()
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._work, name="turns", daemon=True),
            threading.Thread(target=self._work_ahead, name="drafts", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop what is running, keep what was said, and let the conversation go."""
        self._is_over = True
        self._cancel.set()
        self._jobs.put(None)
        with self._draft_came:
            self._draft_came.notify()
        if self._threads[0].is_alive():
            self._threads[0].join(LEAVE_S)

    # --- what can be asked ----------------------------------------------------------------------

    def open(self, request: ChatRequest) -> None:
        """Go to another conversation. Opened or OpenFailed follows, and Restored."""
        self._jobs.put(lambda: self._open(request))

    def send(
        self, text: str, options: TurnOptions, system: str | None = None, after: int | None = None
    ) -> None:
        """Say something, behind the first `after` turns where that is given."""

        def turn(chat: Chat, listener: Listener) -> TurnResult:
            if after is not None:
                chat.rewind(after)
            return chat.send(text, options, listener, system)

        self._turn(turn)

    def go_on(self, options: TurnOptions) -> None:
        """Go on with the last answer."""
        self._turn(lambda chat, listener: chat.resume_reply(options, listener))

    def rewind(self, num_turns: int) -> None:
        self._change(lambda chat: chat.rewind(num_turns))

    def switch(self, turn_id: str) -> None:
        """Go on from behind another turn of the conversation's tree."""
        self._change(lambda chat: chat.switch(turn_id))

    def draft(self, text: str, system: str | None = None) -> None:
        """Prefill what is being typed. Only the newest draft counts."""
        self._ahead(_Draft(text, system))

    def warm(self, session: str) -> None:
        """Restore a conversation that may be opened next."""
        if self._chat is not None and self._chat.is_shared:  # else it would load a second model
            self._ahead(_Draft("", session=session))

    def stop(self) -> None:
        """End the answer that is being made, and keep it."""
        self._cancel.set()

    def look(self, look: Callable[[Chat], Result]) -> Result:
        """What `look` sees of the conversation that is open, at once, also beside a turn."""
        if self._chat is None:
            raise ChatkvError("no conversation is open: /new begins one")
        return look(self._chat)

    def take_text(self) -> str:
        """What was answered since the last call."""
        with self._lock:
            text = "".join(self._text)
            self._text.clear()
        return text

    # --- the thread of turns --------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        if self._chat is not None and not self._chat.is_shared:
            self._threads[1].join(LEAVE_S)  # it computes with what is closed now
        with suppress(ChatkvError, StoreError, OSError):
            self._opened.close()

    def _open(self, request: ChatRequest) -> None:
        self._request = request
        try:
            self._opened.close()  # what was open is saved, and free for others
            self._chat = None
            self._chat = self._opened.enter_context(self._connect(request, self._progress))
        except Exception as error:
            self._post(messages.OpenFailed(_told(error)))
            return
        chat = self._chat
        self._post(messages.Opened(_facts(chat), chat.is_resumed, tuple(chat.notices)))
        if not chat.turns:
            return
        with suppress(ChatkvError, StoreError, OSError):  # a turn will say it
            self._post(messages.Restored(chat.session, chat.restore()))

    def _turn(self, turn: Callable[[Chat, Listener], TurnResult]) -> None:
        self._cancel.clear()
        self._jobs.put(lambda: self._answer(turn))

    def _answer(self, turn: Callable[[Chat, Listener], TurnResult]) -> None:
        from chatkv.session.turn import Listener

        began = False

        def progress(stage: str, done: int, total: int) -> None:
            nonlocal began
            began = True
            self._progress(stage, done, total)

        listener = Listener(self._hear, progress, self._cancel.is_set)
        if self._chat is None:
            self._open(self._request)  # it may be possible now
        chat = self._chat
        try:
            if chat is None:
                raise ChatkvError("the message was not sent")
            result = turn(chat, listener)
        except Exception as error:
            facts, full = _facts(chat) if chat is not None else None, isinstance(error, ContextFull)
            self._post(messages.TurnFailed(facts, _told(error), full, was_kept=began))
            return
        self._post(messages.Answered(_facts(chat), result.notices))

    def _change(self, change: Callable[[Chat], None]) -> None:
        def job() -> None:
            try:
                if self._chat is None:
                    raise ChatkvError("no conversation is open: /new begins one")
                change(self._chat)
            except Exception as error:
                self._post(messages.ChangeFailed(_told(error)))
                return
            self._post(messages.TurnsChanged(_facts(self._chat)))

        self._jobs.put(job)

    def _hear(self, piece: str) -> None:
        with self._lock:
            is_first = not self._text
            self._text.append(piece)
        if is_first:
            self._post(messages.TextArrived())

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._post(messages.Worked(stage, done, total))

    # --- the thread of drafts -------------------------------------------------------------------

    def _ahead(self, draft: _Draft) -> None:
        with self._draft_came:
            self._draft = draft
            self._draft_came.notify()

    def _work_ahead(self) -> None:
        while True:
            with self._draft_came:
                self._draft_came.wait_for(lambda: self._is_over or self._draft is not None)
                draft, self._draft = self._draft, None
            if self._is_over or draft is None:
                return
            # Work ahead is a kindness: where it fails, the turn itself will say why.
            with suppress(Exception):
                self._prefill(draft)

    def _prefill(self, draft: _Draft) -> None:
        if draft.session is not None:
            with self._connect(ChatRequest(resume=draft.session), None) as other:
                other.restore()
        elif (chat := self._chat) is not None:
            cached = chat.draft(draft.text, draft.system)
            self._post(messages.Drafted(draft.text, cached))


def _facts(chat: Chat) -> messages.Facts:
    return messages.Facts(
        session=chat.session,
        title=chat.title,
        model=chat.model,
        num_tokens=chat.num_tokens,
        max_tokens=chat.max_tokens,
        num_unsaved=chat.num_unsaved,
        turns=tuple(chat.turns),
    )


def _told(error: Exception) -> str:
    """One line for the user, whatever happened."""
    if isinstance(error, (ChatkvError, StoreError)):
        return " ".join(str(error).split())
    return f"something went wrong here: {error!r}"
