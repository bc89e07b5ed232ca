"""One answer while it is made: restore, prefill, decode, over the KV of one sequence.

Knows tokens, KV and how text comes out of ids. Does not know where an answer is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from chatkv.engine.engine import Engine, Preempted
from chatkv.engine.sampling import Sampler
from chatkv.engine.sequence import TokenSequence
from chatkv.engine.sources import speculation
from chatkv.model.grammar import GrammarState
from chatkv.model.template import ChatTemplate
from chatkv.model.tokenizer import Tokenizer
from chatkv.restore.restored import Planned
from chatkv.restore.restorer import Restorer
from chatkv.session.record import TurnRecord
from chatkv.session.reply import Reply
from chatkv.session.turn import Listener, TurnOptions


@dataclass(frozen=True)
class ModelParts:
    """What a conversation needs of the loaded model."""

    name: str
    engine: Engine
    restorer: Restorer
    tokenizer: Tokenizer
    template: ChatTemplate
    load_model_ms: float

    def grammar(self, options: TurnOptions, ids: Sequence[int] = ()) -> GrammarState | None:
        """What an answer that has begun with `ids` must follow. Raises UsageError where it cannot,
        for which a turn should not have begun."""
        if options.grammar is None:
            return None
        return GrammarState(self.tokenizer, options.grammar, ids)


@dataclass
class Generation:
    """`reply` grows by what `sampler` draws; `record` hears what it took.

    max_ids: the reply's ids at most, those that it began with included. The sequence is in use.
    """

    model: ModelParts
    sequence: TokenSequence
    options: TurnOptions
    listener: Listener
    sampler: Sampler
    reply: Reply
    record: TurnRecord
    max_ids: int
    _has_begun: bool = False  # to answer

    def __post_init__(self) -> None:
        show, room = self.reply.on_text, self.model.engine.memory.room
        restorer, sequence = self.model.restorer, self.sequence

        # Neither refers to the turn, which has the reply: logits would stay in that circle, step
        # after step of them, until Python looks for such.
        def save() -> None:
            restorer.save(sequence, tail=True)

        def show_away(text: str) -> None:
            with room.away(sequence, save):
                show(text)

        self.reply.on_text = show_away
        options = self.options
        wanted = "off" if options.exact and options.speculate == "auto" else options.speculate
        self._speculation = speculation(wanted, self.model.engine, self.sequence, self.sampler)
        self.record.speculation = self._speculation.counts

    def run(self, planned: Planned) -> None:
        """From the plan to the last token. Raises Cancelled; then `reply` holds what was made."""
        self._restore(planned)
        # Drafts go on from this turn's own tokens: so it drafts after a restart as without one.
        self.sequence.trail.begin_at(planned.situation.history)
        compute = self._prefill
        while True:
            try:
                logits = compute()
                self._has_begun = True
                return self._decode(logits)
            except Preempted:
                self.record.was_preempted = True
                compute = self._come_back

    def _restore(self, planned: Planned) -> None:
        """Bring back the KV of the history, as planned."""

        def progress(done: int, total: int) -> None:
            self.listener.on_progress("restore", done, total)

        restored = self.model.restorer.restore(
            self.sequence, planned, progress, self.listener.cancelled
        )
        self.record.restore_done(restored)
        # What prefill need not compute, before it begins.
        self.listener.on_progress("prefill", restored.num_ready, len(planned.ids))

    def _prefill(self) -> Tensor:
        """Compute what has no KV yet, saving block by block; the logits after the last token."""
        arriving = self.record.restored.arriving if self.record.restored else None
        try:
            return self.model.engine.prefill(
                self.sequence,
                self._prefilled,
                self.listener.cancelled,
                arriving,
                self.options.is_background,
            )
        finally:
            if arriving is not None:
                arriving.close()

    def _prefilled(self, done: int, total: int) -> None:
        self.record.chunk_done(done)
        self.model.restorer.save(self.sequence)
        self.listener.on_progress("prefill", done, total)

    def _decode(self, logits: Tensor) -> None:
        """Sample until a stop token, a stop string, the limit or a cancel."""
        record, reply = self.record, self.reply
        stop_ids = self.model.tokenizer.stop_ids
        left = self.max_ids - len(reply.ids)
        steps = self.model.engine.decode(
            self.sequence,
            logits,
            self.sampler,
            stop_ids,
            left,
            self.listener.cancelled,
            self._speculation,
        )
        for token, record.last_logits in steps:
            record.token_done()
            self.listener.on_token(token, record.last_logits)
            if token in stop_ids:
                reply.push_silent(token, self.sampler.draws)
                record.finish = "stop"
                return
            reply.push(token, self.sampler.draws)
            if reply.stops.stopped:
                record.finish = "stop"
                return
            self.model.restorer.save(self.sequence)
        record.finish = "interrupted" if self.listener.cancelled() else "length"

    def _come_back(self) -> Tensor:
        """Others needed the memory: give it to them, and go on when there is room again."""
        restorer, ids = self.model.restorer, list(self.sequence.ids)
        num_computed = len(ids) - 1 if self._has_begun else self.sequence.num_cached
        restorer.swap_out(self.sequence)
        self.model.engine.reserve(self.sequence, self.listener.cancelled)
        planned = restorer.plan(
            self.sequence, ids, num_computed, self.options.restore, self.options.exact
        )
        arriving = restorer.restore(
            self.sequence, planned, cancelled=self.listener.cancelled
        ).arriving
        try:
            return self.model.engine.prefill(
                self.sequence,
                None if self._has_begun else self._prefilled,
                self.listener.cancelled,
                arriving,
                self.options.is_background,
            )
        finally:
            if arriving is not None:
                arriving.close()
