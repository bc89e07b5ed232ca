"""One request of whatever dialect, answered: what it names is found, the turn is run, the next
request is prepared for. What happens is told as events, which the dialects write down.

    session     where the answer goes (its id; hit, diverged_at: see `matching`)
    progress    "prefill", tokens done, of all
    text        a piece of the answer: data = choice, kind (content, reasoning, call), logprobs
    result      data = choices, tokens, timings
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from chatkv.errors import ChatkvError, UsageError
from chatkv.server.asked import Asked
from chatkv.server.hub import Hub
from chatkv.server.matching import Matching, Place, said_as_text
from chatkv.server.metrics import Metrics
from chatkv.server.offered import Offered
from chatkv.server.parts import Kind, Parts, Said, call_in, opens_thoughts, said_in
from chatkv.server.stream import Emit
from chatkv.server.wire import Event
from chatkv.session.generation import ModelParts
from chatkv.session.scratch import answer_once, go_on
from chatkv.session.turn import Listener, TurnResult

if TYPE_CHECKING:
    from torch import Tensor

    from chatkv.model.tokenizer import Tokenizer
    from chatkv.runtime import Runtime


@dataclass(frozen=True)
class Answers:
    """Answers requests over one hub; `answer` is run on a thread of its own for each."""

    hub: Hub
    offered: Offered
    metrics: Metrics

    def answer(self, asked: Asked, emit: Emit, cancel: threading.Event) -> None:
        runtime = self.runtime(asked.model, emit)
        if asked.tools and "tools" not in (runtime.prepared.template or ""):
            name = runtime.prepared.name
            raise UsageError(f"{name} knows no tools: its chat template leaves them out")
        if asked.prompt is not None or asked.is_scratch:
            emit(Event("session", data={"session": "", "model": runtime.prepared.name}))
            first = self._scratch(runtime, asked, emit, cancel, 0)
            about: dict[str, Any] = {"hit": "none", "diverged_at": None}
        else:
            first, about = self._turn(runtime, asked, emit, cancel)
        choices = [first]
        for index in range(1, asked.num_choices):
            if not cancel.is_set():
                choices.append(self._scratch(runtime, asked, emit, cancel, index))
        data = _result(choices, about)
        self.metrics.answered(data)
        emit(Event("result", data=data))

    def warm_up(self) -> None:
        """Load the default model, so that the first request need not wait for it."""
        with suppress(ChatkvError):  # whoever asks first hears why
            self.runtime("")

    def runtime(self, model: str, emit: Emit | None = None) -> Runtime:
        """The model that is called `model`, loaded."""

        def progress(stage: str, done: int, total: int) -> None:
            if emit is not None:
                emit(Event("progress", stage, done, total))

        return self.hub.runtime(self.offered.spec_of(model), "auto", progress)

    def _turn(
        self, runtime: Runtime, asked: Asked, emit: Emit, cancel: threading.Event
    ) -> tuple[Choice, dict[str, Any]]:
        matching = Matching(self.hub, runtime, asked)
        with matching.place(cancel) as place:
            held = place.held
            conversation = held.conversation
            about = {
                "session": held.session_id,
                "model": runtime.prepared.name,
                "hit": place.hit,
                "diverged_at": place.diverged_at,
            }
            emit(Event("session", data=about))
            choice = Choice.of(asked, conversation.model, emit, 0)
            choice.is_resumed = not place.split.said
            listener = choice.listener(cancel)
            choice.result = self._send(place, asked, listener)
            said = choice.finish()
            matching.note(place, said.message())
            return choice, about

    def _send(self, place: Place, asked: Asked, listener: Listener) -> TurnResult:
        conversation, split = place.held.conversation, place.split
        if not split.said:
            return conversation.resume_reply(asked.options, listener)
        text, said = said_as_text(split.said)
        system = split.system if not conversation.turns else None
        return conversation.send(text, asked.options, listener, system, said)

    def _scratch(
        self, runtime: Runtime, asked: Asked, emit: Emit, cancel: threading.Event, index: int
    ) -> Choice:
        """An answer that leaves nothing; further choices take further seeds."""
        parts = runtime.scratch_parts(asked.owner)
        options = replace(asked.options, seed=(asked.options.seed or 0) + index)
        choice = Choice.of(asked, parts, emit, index)
        listener = choice.listener(cancel)
        if asked.prompt is not None:
            ids = parts.tokenizer.encode_rendered(asked.prompt, ((0, len(asked.prompt)),))
            if not ids:
                raise UsageError("prompt must not be empty")
            choice.result = go_on(parts, ids, options, listener)
        else:
            template = parts.template.with_tools(asked.tools)
            parts = replace(parts, template=template)
            choice.result = answer_once(parts, asked.messages, options, listener)
        choice.finish()
        return choice


@dataclass
class Choice:
    """One of a request's answers while it is made."""

    is_thinking: bool
    index: int
    emit: Emit
    parts: Parts
    tokenizer: Tokenizer
    has_tools: bool
    num_logprobs: int | None
    result: TurnResult | None = None
    said: Said | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)
    is_resumed: bool = False  # the client has the beginning of the answer already
    _num_shown: int = 0  # of logprobs
    _num_calls: int = 0
    _has_begun: bool = False

    @classmethod
    def of(cls, asked: Asked, model: ModelParts, emit: Emit, index: int) -> Choice:
        is_thinking = asked.prompt is None and opens_thoughts(model.template)
        parts = Parts(is_thinking, bool(asked.tools))
        has_tools, tokenizer = bool(asked.tools), model.tokenizer
        return cls(is_thinking, index, emit, parts, tokenizer, has_tools, asked.num_logprobs)

    def listener(self, cancel: threading.Event) -> Listener:
        def is_cancelled() -> bool:
            self._begin()
            return cancel.is_set()

        watch = {} if self.num_logprobs is None else {"on_token": self._token}
        return Listener(self._text, self._progress, is_cancelled, **watch)

    def finish(self) -> Said:
        """Show what was held back; the whole answer, taken apart."""
        self._show(self.parts.flush())
        assert self.result is not None
        self.said = said_in(self.result.text, self.has_tools, self.is_thinking)
        return self.said

    def _begin(self) -> None:
        """It was accepted: nothing can refuse it any more before its first token."""
        if not self._has_begun and self.index == 0:
            self.emit(Event("progress", "begin"))
        self._has_begun = True

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._begin()
        self.emit(Event("progress", stage, done, total))

    def _text(self, text: str) -> None:
        self._show(self.parts.push(text))

    def _show(self, found: list[tuple[Kind, str]]) -> None:
        for kind, text in found:
            self.shown[kind] = self.shown.get(kind, "") + text
            data: dict[str, Any] = {"choice": self.index, "kind": kind}
            if kind == "call":
                call = call_in(text, self._num_calls)
                if call is None:
                    data["kind"] = "content"
                else:
                    data |= {"call": call, "number": self._num_calls}
                    self._num_calls += 1
            if self.logprobs[self._num_shown :]:
                data["logprobs"] = self.logprobs[self._num_shown :]
                self._num_shown = len(self.logprobs)
            self.emit(Event("text", text=text, data=data))

    def _token(self, token: int, logits: Tensor) -> None:
        """Natural logarithms of probabilities at temperature 1, whatever was drawn with."""
        chances = torch.log_softmax(logits.double(), -1)
        best = chances.topk(self.num_logprobs or 0)
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        self.logprobs.append(
            self._logprob(token, float(chances[token]))
            | {"top_logprobs": [self._logprob(other, chance) for other, chance in top]}
        )

    def _logprob(self, token: int, chance: float) -> dict[str, Any]:
        text = self.tokenizer.decode([token], skip_special=False)
        return {"token": text, "logprob": chance, "bytes": list(text.encode())}


def _result(choices: list[Choice], about: dict[str, Any]) -> dict[str, Any]:
    """The data of `result`. Tokens of the prompt are counted once: all choices have the same."""
    results = [choice.result for choice in choices if choice.result is not None]
    first = results[0]
    tokens, timing = first.tokens, first.timing
    cached = tokens.reused + tokens.loaded
    generated = sum(result.tokens.generated for result in results)
    rate = timing.decode_tokens_per_s
    timings = {
        "session": about.get("session", ""),
        "cache_n": cached,
        "prompt_n": tokens.computed,
        "prompt_ms": round(timing.prefill_ms, 3),
        "prompt_per_second": round(tokens.computed / timing.prefill_ms * 1e3, 3)
        if timing.prefill_ms
        else None,
        "predicted_n": tokens.generated,
        "predicted_ms": round(tokens.generated / rate * 1e3, 3) if rate else 0.0,
        "predicted_per_second": round(rate, 3) if rate else None,
        "restore_ms": round(timing.restore_ms, 3),
        "ttft_ms": round(timing.ttft_ms, 3),
        "reused_n": tokens.reused,
        "loaded_n": tokens.loaded,
        "plan": first.plan.chosen,
        "hit": about["hit"],
        "diverged_at": about["diverged_at"],
    }
    return {
        "model": first.model,
        "choices": [_choice(choice) for choice in choices],
        "prompt_tokens": tokens.prompt,
        "cached_tokens": cached,
        "generated_tokens": generated,
        "load_ms": timing.load_model_ms,
        "timings": timings,
        "notices": list(first.notices),
    }


def _choice(choice: Choice) -> dict[str, Any]:
    assert choice.said is not None and choice.result is not None
    new = choice.said
    if choice.is_resumed:
        shown = choice.shown
        new = replace(new, content=shown.get("content", ""), reasoning=shown.get("reasoning", ""))
    return {
        "index": choice.index,
        **asdict(new),
        "reasoning_tokens": len(choice.tokenizer.encode(new.reasoning)),
        "finish_reason": choice.result.finish_reason,
        "logprobs": choice.logprobs if choice.num_logprobs is not None else None,
    }


def dumps(value: Any) -> str:
    """JSON as it goes over the wire."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
