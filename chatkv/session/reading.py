"""Token ids for turns that were imported as words.

A conversation from elsewhere has no ids of its own: they are those that this model's template and
tokenizer make of its words, turn by turn, as if it had been held here. They are made when the
conversation is opened and written when it goes on, and from then on the log is the truth as
anywhere else. What the model has not computed itself is marked as adopted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from chatkv.errors import UsageError

if TYPE_CHECKING:
    from chatkv.model.template import ChatTemplate
    from chatkv.model.tokenizer import Tokenizer
    from chatkv_store.records import Session, Turn


@dataclass(frozen=True)
class Reader:
    """Reads for one model; `name` and `digest` tell it and its tokenizer apart from others."""

    name: str
    digest: str
    template: ChatTemplate
    tokenizer: Tokenizer

    def read(self, session: Session, turns: Sequence[Turn]) -> list[Turn]:
        """`turns` with ids for those that have none.

        Raises UsageError where the ids of the others mean something else to this model, ModelError
        where its template cannot write the conversation.
        """
        self._check(session, turns)
        read: list[Turn] = []
        for turn in turns:
            before = read[-1] if read else None
            if not turn.prompt_ids:
                turn = self._with_ids(turns[0].system_text, before, turn)
            read.append(turn)
        return read

    def _check(self, session: Session, turns: Sequence[Turn]) -> None:
        with_ids = next((turn for turn in turns if turn.prompt_ids), None)
        if with_ids is None:
            return
        known = session.settings.get("tokenizer") or with_ids.stats.get("tokenizer")
        if known != self.digest:
            raise UsageError(
                f"session {session.id} was held with {session.model or 'another model'}, and "
                f"{self.name} reads its tokens differently: leave --model out, or start a new "
                "session"
            )

    def _with_ids(self, system: str | None, before: Turn | None, turn: Turn) -> Turn:
        prompt_ids = self._prompt_ids(system, before, turn)
        # Templates trim what they write of a reply; ids that keep its edges would differ from that.
        answer = turn.reply_text.strip()
        spans = ((0, len(answer)),)
        reply_ids = self.tokenizer.encode_continuation(answer, spans, prompt_ids[-1])
        return replace(
            turn,
            tokens_before=before.tokens_before + before.num_tokens if before else 0,
            prompt_ids=array("I", prompt_ids),
            reply_ids=array("I", reply_ids),
            stats=turn.stats | {"is_adopted": True, "tokenizer": self.digest},
        )

    def _prompt_ids(self, system: str | None, before: Turn | None, turn: Turn) -> list[int]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if before is None:
            rendered = self.template.render([*messages, *_asked(turn)], add_generation_prompt=True)
            return self.tokenizer.encode_rendered(rendered.text, rendered.content_spans)
        # What stands before the last reply does not matter to what follows it; to write all of it
        # again for each turn would take quadratic time.
        messages += _asked(before)
        messages += [{"role": "assistant", "content": before.reply_text}, *_asked(turn)]
        rendered = self.template.continuation(messages)
        text, spans = rendered.text, rendered.content_spans
        end = self._end_of(before)
        if end and text.startswith(end):
            text = text[len(end) :]
            spans = tuple((first - len(end), last - len(end)) for first, last in spans)
        last_id = [*before.prompt_ids[-1:], *before.reply_ids[-1:]][-1]
        return self.tokenizer.encode_continuation(text, spans, last_id)

    def _end_of(self, before: Turn) -> str:
        """The text of the stop token that a reply which was sampled here ends with."""
        ids = before.reply_ids[-1:]
        if ids and ids[0] in self.tokenizer.stop_ids:
            return self.tokenizer.decode(ids, skip_special=False)
        return ""


def _asked(turn: Turn) -> list[dict[str, Any]]:
    return turn.stats.get("said") or [{"role": "user", "content": turn.user_text}]
