"""A conversation without a model: it answers what a test tells it to, when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from chatkv.client import ChatRequest, Ready, TurnText
from chatkv.restore.plan import Plan
from chatkv.session.turn import Listener, Timing, TokenCounts, TurnOptions, TurnResult
from chatkv_store.conversations import Conversations

STATS: dict[str, Any] = {
    "tokens": {"prompt": 1234, "reused": 200, "loaded": 1000, "computed": 34, "generated": 12},
    "plan": {
        "chosen": "reload",
        "predicted_ms": 40.0,
        "actual_ms": 48.5,
        "alternatives_ms": {"reload": 40.0, "re-prefill": 910.0, "both": 55.0},
    },
    "timing": {
        "load_model_ms": 900.0,
        "restore_ms": 42.0,
        "prefill_ms": 31.0,
        "ttft_ms": 80.0,
        "decode_tokens_per_s": 25.0,
    },
    "loaded_bytes": 11_534_336,
    "regret_ms": 8.5,
    "notices": [],
}


@dataclass
class Script:
    """What the engine does. `pieces`: the next answer; `hold` makes it wait until it is set."""

    store: Conversations
    pieces: list[str] = field(default_factory=lambda: ["Hello ", "**there**."])
    progress: list[tuple[str, int, int]] = field(
        default_factory=lambda: [
            ("restore", 1, 2),
            ("prefill", 1200, 1234),
            ("prefill", 1234, 1234),
        ]
    )
    hold: threading.Event | None = None  # an answer stops before its last piece until then
    hold_open: threading.Event | None = None
    fail: Exception | None = None  # the next turn, before it begins
    break_off: Exception | None = None  # ... or in the middle
    open_fails: Exception | None = None
    notices: tuple[str, ...] = ()
    ready: Ready = field(default_factory=lambda: Ready(1200, 200, 1000, 0, 45.0))
    drafts: list[str] = field(default_factory=list)
    warmed: list[str] = field(default_factory=list)
    opened: list[ChatRequest] = field(default_factory=list)
    sent: list[tuple[str, TurnOptions, str | None]] = field(default_factory=list)

    @contextmanager
    def connect(
        self, request: ChatRequest, on_progress: Callable[[str, int, int], None] | None
    ) -> Iterator[ScriptedChat]:
        if on_progress is None:
            self.warmed.append(request.resume or "")
        else:
            self.opened.append(request)
            if self.hold_open is not None:
                on_progress("preparing the model", 1, 4)
                self.hold_open.wait(20)
        if self.open_fails is not None:
            failure, self.open_fails = self.open_fails, None
            raise failure
        yield ScriptedChat(self, request)


class ScriptedChat:
    """See `chatkv.client.Chat`. Its turns are kept in a real store."""

    is_shared = True
    blocks = None

    def __init__(self, script: Script, request: ChatRequest) -> None:
        self._script, self._store = script, script.store
        self.is_resumed = request.resume is not None
        self.model = request.model or "Scripted-1B"
        self.max_tokens = 8192
        self.num_unsaved = 0
        self.notices: list[str] = []
        found = script.store.get_session(request.resume) if request.resume else None
        self.session = (found or script.store.create_session(model=self.model)).id

    @property
    def title(self) -> str:
        return self._store.get_session(self.session).title

    @property
    def num_tokens(self) -> int:
        return self._store.get_session(self.session).num_tokens

    @property
    def turns(self) -> list[TurnText]:
        return [TurnText.of(turn) for turn in self._store.chain(self.session)]

    def status(self) -> dict[str, Any]:
        return {"pid": 1}

    def send(
        self, text: str, options: TurnOptions, listener: Listener, system: str | None = None
    ) -> TurnResult:
        self._script.sent.append((text, options, system))
        self._fail_if_told()
        with self._store.lease(self.session):
            begun = self._store.begin_turn(
                self.session, user_text=text, prompt_ids=range(20), system_text=system
            )
            return self._answer(begun.id, "", listener)

    def resume_reply(self, options: TurnOptions, listener: Listener) -> TurnResult:
        self._fail_if_told()
        with self._store.lease(self.session):
            last = self._store.chain(self.session)[-1]
            self._store.move_head(self.session, last.parent_id)
            begun = self._store.begin_turn(
                self.session, user_text=last.user_text, prompt_ids=range(20)
            )
            return self._answer(begun.id, last.reply_text, listener)

    def rewind(self, num_turns: int) -> None:
        self._fail_if_told()
        turns = self._store.chain(self.session)
        head = turns[num_turns - 1].id if num_turns else None
        with self._store.lease(self.session):
            self._store.move_head(self.session, head)

    def switch(self, turn_id: str) -> None:
        with self._store.lease(self.session):
            self._store.move_head(self.session, turn_id)

    def draft(self, text: str, system: str | None = None) -> int:
        self._script.drafts.append(text)
        return self.num_tokens + len(text.split())

    def restore(self) -> Ready:
        return self._script.ready

    def _fail_if_told(self) -> None:
        failure, self._script.fail = self._script.fail, None
        if failure is not None:
            raise failure

    def _answer(self, turn_id: str, before: str, listener: Listener) -> TurnResult:
        script = self._script
        for stage, done, total in script.progress:
            listener.on_progress(stage, done, total)
        said = before
        *front, last = script.pieces
        for piece in front:
            said += piece
            listener.on_text(piece)
        if script.hold is not None:
            while not script.hold.wait(0.01) and not listener.cancelled():
                pass
        if script.break_off is not None:
            failure, script.break_off = script.break_off, None
            self._finish(turn_id, said, "interrupted")
            raise failure
        cancelled = listener.cancelled()
        if not cancelled:
            said += last
            listener.on_text(last)
        finish = "interrupted" if cancelled else "stop"
        turn = self._finish(turn_id, said, finish)
        plan = STATS["plan"]
        return TurnResult(
            session=self.session,
            turn=turn.index,
            text=said,
            finish_reason=finish,  # type: ignore[arg-type]
            tokens=TokenCounts(**STATS["tokens"]),
            plan=Plan(plan["chosen"], plan["predicted_ms"], plan["alternatives_ms"]),
            plan_actual_ms=plan["actual_ms"],
            timing=Timing(**STATS["timing"]),
            model=self.model,
            notices=script.notices,
            last_logits=None,
        )

    def _finish(self, turn_id: str, said: str, finish: str) -> Any:
        return self._store.finish_turn(
            turn_id,
            reply_text=said,
            reply_ids=range(12),
            rng_draws_after=12,
            state="interrupted" if finish == "interrupted" else "done",
            finish_reason=finish,
            stats=STATS,
        )
