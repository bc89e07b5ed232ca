"""KV of a prompt before anybody asks: computed where it is not stored, and stored.

Whoever begins with the same tokens then, a new conversation or a client that names none, need not
compute them. Nothing is answered and no conversation begins, so until one does nobody uses these
blocks, and they are the first to go where room is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chatkv.errors import ContextFull
from chatkv.model.template import ChatTemplate
from chatkv.model.tokenizer import Tokenizer
from chatkv.restore.restorer import Restorer

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Warmed:
    """Tokens of the prompt, and how many of them had to be computed."""

    num_tokens: int
    num_computed: int


def warm_prompt(
    restorer: Restorer,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[dict[str, Any]],
    on_progress: Progress = lambda stage, done, total: None,
) -> Warmed:
    """Compute and queue the KV of what a model reads before it answers `messages`; where they end
    with no question, of the messages alone. Raises ContextFull."""
    is_asked = messages[-1]["role"] in ("user", "tool")
    rendered = template.render(list(messages), add_generation_prompt=is_asked)
    ids = tokenizer.encode_rendered(rendered.text, rendered.content_spans)
    engine = restorer.engine
    if len(ids) >= engine.max_tokens:
        raise ContextFull(
            f"this has {len(ids)} tokens, but the context ends at {engine.max_tokens}"
        )
    sequence = restorer.scratch_sequence()

    def prefilled(done: int, total: int) -> None:
        restorer.save(sequence)
        on_progress("prefill", done, total)

    with engine.memory.use(sequence):
        planned = restorer.plan(sequence, ids, history=0)
        restored = restorer.restore(sequence, planned)
        try:
            engine.prefill(sequence, prefilled, arriving=restored.arriving)
        finally:
            if restored.arriving is not None:
                restored.arriving.close()
        restorer.save(sequence, tail=True)
    return Warmed(len(ids), len(ids) - restored.reused - restored.num_loaded)
