"""One answer of a request while it is made: heard token by token, told part by part."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from chatkv.server.asked import Asked
from chatkv.server.parts import Kind, Parts, Said, call_in, opens_thoughts, said_in
from chatkv.server.stream import Emit
from chatkv.server.wire import Event
from chatkv.session.generation import ModelParts
from chatkv.session.turn import Listener, TurnResult

if TYPE_CHECKING:
    from torch import Tensor

    from chatkv.model.tokenizer import Tokenizer


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

    def to_json(self) -> dict[str, Any]:
        """One of the `choices` of a result."""
        assert self.said is not None and self.result is not None
        new = self.said
        if self.is_resumed:
            content, reasoning = self.shown.get("content", ""), self.shown.get("reasoning", "")
            new = replace(new, content=content, reasoning=reasoning)
        return {
            "index": self.index,
            **asdict(new),
            "reasoning_tokens": len(self.tokenizer.encode(new.reasoning)),
            "finish_reason": self.result.finish_reason,
            "logprobs": self.logprobs if self.num_logprobs is not None else None,
        }

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
