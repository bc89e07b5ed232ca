"""A decode worker in the tests' process: a runtime with one conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chatkv.engine.options import SamplingOptions
from chatkv.runtime import Runtime
from chatkv.session.turn import Listener, TurnOptions, TurnResult

# Several chunks of 512 tokens, and a part of a block at the end.
LONG = "The tide comes in and the tide goes out, and nobody knows why it does. " * 22


@dataclass
class Decoder:
    """A runtime of its own home, and one conversation in it."""

    runtime: Runtime
    conversation: Any

    def say(self, text: str = LONG, listener: Listener | None = None, **more: Any) -> TurnResult:
        options = {"max_tokens": 8, "restore": "remote"} | more
        sampling = SamplingOptions(temperature=0)
        return self.conversation.send(text, TurnOptions(sampling, **options), listener)
