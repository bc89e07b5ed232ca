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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.errors import ChatkvError, UsageError
from chatkv.server.asked import Asked
from chatkv.server.choice import Choice
from chatkv.server.hub import Hub
from chatkv.server.matching import Matching, Place, said_as_text
from chatkv.server.metrics import Metrics
from chatkv.server.offered import Offered
from chatkv.server.parts import opens_thoughts
from chatkv.server.stream import Emit
from chatkv.server.wire import Event
from chatkv.session.generation import ModelParts
from chatkv.session.scratch import answer_once, go_on
from chatkv.session.turn import Listener, TurnResult

if TYPE_CHECKING:
    from chatkv.runtime import Runtime


@dataclass(frozen=True)
class Answers:
    """Answers requests over one hub; `answer` is run on a thread of its own for each."""

    hub: Hub
    offered: Offered
    metrics: Metrics
    recent: dict[bytes, str] = field(default_factory=dict)

    def answer(self, asked: Asked, emit: Emit, cancel: threading.Event) -> None:
        runtime = self.runtime(asked.model, emit)
        if asked.tools and "tools" not in (runtime.prepared.template or ""):
            name = runtime.prepared.name
            raise UsageError(f"{name} knows no tools: its chat template leaves them out")
        asked = _formed(asked, runtime.scratch_parts(asked.owner))
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
        matching = Matching(self.hub, runtime, asked, self.recent)
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


def _formed(asked: Asked, parts: ModelParts) -> Asked:
    """`asked` with the grammar of its form, which is tried before anything is changed."""
    is_thinking = asked.prompt is None and opens_thoughts(parts.template)
    options = replace(asked.options, grammar=asked.form.grammar(is_thinking))
    parts.grammar(options)
    return replace(asked, options=options)


def _result(choices: list[Choice], about: dict[str, Any]) -> dict[str, Any]:
    """The data of `result`. Tokens of the prompt are counted once: all choices have the same."""
    results = [choice.result for choice in choices if choice.result is not None]
    first = results[0]
    tokens, timing = first.tokens, first.timing
    cached = tokens.reused + tokens.loaded
    generated = sum(result.tokens.generated for result in results)
    hit = about["hit"]
    if hit == "none" and cached >= BLOCK_TOKENS:
        hit = "blocks"  # what other conversations begin with as well
    rate = timing.decode_tokens_per_s
    timings = {
        "session": about.get("session", ""),
        "cache_n": cached,
        "prompt_n": tokens.computed + tokens.remote,
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
        "remote_n": tokens.remote,
        "plan": first.plan.chosen,
        "plan_expected_ms": round(first.plan.predicted_ms, 3),
        "plan_ms": round(first.plan_actual_ms, 3),
        "draft_source": first.speculation.source,
        "draft_n": sum(result.speculation.drafted for result in results),
        "draft_n_accepted": sum(result.speculation.accepted for result in results),
        "hit": hit,
        "diverged_at": about["diverged_at"],
    }
    return {
        "model": first.model,
        "choices": [choice.to_json() for choice in choices],
        "prompt_tokens": tokens.prompt,
        "cached_tokens": cached,
        "generated_tokens": generated,
        "load_ms": timing.load_model_ms,
        "timings": timings,
        "remote": first.remote,
        "notices": list(first.notices),
    }


def dumps(value: Any) -> str:
    """JSON as it goes over the wire."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
