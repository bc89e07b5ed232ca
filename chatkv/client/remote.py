"""A conversation in the engine's process.

The process may end at any time, by itself when it is idle, or by a crash: the next request starts
another one, and the conversation goes on from what is saved. A crash in the middle of an answer is
said, since that answer is then incomplete.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from chatkv.client import engine
from chatkv.client.chat import TurnText
from chatkv.client.link import EngineGone, Link
from chatkv.paths import Folders
from chatkv.server.wire import (
    DraftRequest,
    EngineError,
    Event,
    OptionsRequest,
    RewindRequest,
    SendRequest,
    SwitchRequest,
    raised,
)
from chatkv.session.ready import Ready
from chatkv.session.request import ChatRequest
from chatkv.session.turn import Listener, TurnOptions, TurnResult

if TYPE_CHECKING:
    from chatkv.client.chat import Progress

Result = TypeVar("Result")


class RemoteChat:
    """See `Chat`."""

    is_shared = True
    blocks = None  # the engine has it open

    def __init__(
        self,
        folders: Folders,
        link: Link,
        request: ChatRequest,
        on_progress: Progress | None = None,
    ) -> None:
        self._folders, self._link, self._request = folders, link, request
        self.num_unsaved = 0
        self._is_said = False  # something was: the session is in the file then
        self._opened(self._open(request, on_progress))
        self.is_resumed = request.resume is not None or request.resume_last

    def send(
        self, text: str, options: TurnOptions, listener: Listener, system: str | None = None
    ) -> TurnResult:
        self._be_there()
        if self.turns and self.turns[0].system == system:  # said already, in a turn that was lost
            system = None
        body = SendRequest(text, system, options)
        self._is_said = True
        result, stats = self._turn("turns", body, listener)
        self.turns.append(_turn_of(result, text, system, stats))
        return result

    def resume_reply(self, options: TurnOptions, listener: Listener) -> TurnResult:
        self._be_there()
        last = self.turns[-1] if self.turns else None
        result, stats = self._turn("continue", OptionsRequest(options), listener)
        assert last is not None  # else it was refused
        self.turns[-1] = _turn_of(result, last.user, last.system, stats)
        return result

    def rewind(self, num_turns: int) -> None:
        self._be_there()
        self._opened(self._link.call("POST", self._url("rewind"), RewindRequest(num_turns)))

    def switch(self, turn_id: str) -> None:
        self._be_there()
        self._opened(self._link.call("POST", self._url("switch"), SwitchRequest(turn_id)))

    def status(self) -> dict[str, Any]:
        return self._link.call("GET", "/status")

    def draft(self, text: str, system: str | None = None) -> int:
        return self._make_ready(text, system).cached

    def restore(self) -> Ready:
        return self._make_ready("", None)

    # --- inside ---------------------------------------------------------------------------------

    def _make_ready(self, text: str, system: str | None) -> Ready:
        self._be_there()
        for event in self._link.stream(self._url("draft"), DraftRequest(text, system)):
            if event.event == "error":
                raise raised(event)
            if event.event == "result":
                return Ready(**event.data)
        return Ready(0)

    def _url(self, action: str) -> str:
        return f"/sessions/{self.session}/{action}"

    def _open(self, request: ChatRequest, on_progress: Progress | None = None) -> dict[str, Any]:
        for event in self._link.stream("/sessions", request):
            if event.event == "progress" and on_progress is not None:
                on_progress(event.stage, event.done, event.total)
            elif event.event == "error":
                raise raised(event)
            elif event.event == "session":
                found: dict[str, Any] = event.data
        return found

    def _opened(self, found: dict[str, Any]) -> None:
        self.session: str = found["session"]
        self.title: str = found["title"]
        self.model: str = found["model"]
        self.num_tokens: int = found["num_tokens"]
        self.max_tokens: int = found["max_tokens"]
        self.notices: list[str] = found["notices"]
        self.turns: list[TurnText] = [TurnText(**turn) for turn in found["turns"]]

    def _be_there(self) -> None:
        """Where the engine has ended meanwhile, start another and open the session there."""
        try:
            self._link.call("GET", "/status")
            return
        except EngineGone:
            self._link = engine.start(self._folders)
        if self.turns or self._is_said:
            try:
                return self._opened(self._open(ChatRequest(resume=self.session)))
            except EngineError:
                if self.turns:
                    raise
        self._opened(self._open(self._request))  # nothing was said that could be found

    def _turn(
        self, action: str, body: Any, listener: Listener
    ) -> tuple[TurnResult, dict[str, Any]]:
        """A turn, and what was measured of it."""
        cancelled = False
        for event in self._events(action, body):
            if event.event == "text":
                listener.on_text(event.text)
            elif event.event == "progress":
                listener.on_progress(event.stage, event.done, event.total)
            elif event.event == "error":
                raise raised(event)
            elif event.event == "result":
                self.num_unsaved, self.title = event.data["num_unsaved"], event.data["title"]
                result, stats = TurnResult.from_json(event.data), event.data["stats"]
            if not cancelled and listener.cancelled():
                cancelled = True
                self._link.call("POST", self._url("cancel"))
        self.num_tokens = result.tokens.prompt + result.tokens.generated
        return result, stats

    def _events(self, action: str, body: Any) -> Iterator[Event]:
        return self._link.stream(self._url(action), body)


def _turn_of(result: TurnResult, user: str, system: str | None, stats: dict[str, Any]) -> TurnText:
    state = "interrupted" if result.finish_reason == "interrupted" else "done"
    return TurnText(result.turn, system, user, result.text, state, result.finish_reason, stats)
