"""From token ids to the next token: chunked prefill and decode over the block pool.

Knows sequences of ids and their KV. Does not know text, sessions or disks: whoever restores a
sequence writes its KV into the pool and moves `num_cached`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from chatkv.engine.arriving import Arriving, LayerMissing
from chatkv.engine.budget import CHUNK_TOKENS
from chatkv.engine.draft_costs import DraftCosts
from chatkv.engine.drafts import Draft
from chatkv.engine.memory import Memory
from chatkv.engine.piece import Piece
from chatkv.engine.pool import BLOCK_TOKENS, BlockPool, Pool
from chatkv.engine.runner import SpanRunner, runner_for
from chatkv.engine.sampling import Sampler
from chatkv.engine.scheduler import POLL_S, Cancelled, Scheduler
from chatkv.engine.sequence import TokenSequence
from chatkv.engine.shares import is_short
from chatkv.engine.speculation import Speculation
from chatkv.errors import ContextFull
from chatkv.model.decoder import Decoder
from chatkv.model.mtp import Foresight, Predictor


class Preempted(Exception):
    """Others need the memory: a turn has to give its blocks back, and to wait for them."""


@dataclass
class Engine:
    """One decoder and its block pool, for any number of turns at once.

    max_idle_tokens: KV that may stay in the pool between turns; by default half of it.
    """

    decoder: Decoder
    pool: Pool
    max_idle_tokens: int | None = None

    def __post_init__(self) -> None:
        idle = self.max_idle_tokens
        if idle is None:
            idle = self.pool.num_blocks * BLOCK_TOKENS // 2
        self.memory = Memory(self.pool, idle)
        self.drafts: Engine | None = None
        self.foresight: Foresight | None = None
        self._predictor: Predictor | None = None
        self.runner = runner_for(self.decoder, self.pool)
        self.scheduler = Scheduler(self._forward, self.runner.num_layers)
        self.memory.on_leave = self.scheduler.leave

    def close(self) -> None:
        """End the thread that computes. Weights and KV are freed with the last reference to this,
        not when Python looks for cycles, which it may not do for gigabytes."""
        if self.drafts is not None:
            self.drafts.close()
        self.scheduler.close()
        self.scheduler.forward = _ended
        self.memory.close()

    def draft_with(self, engine: Engine) -> None:
        """Let a smaller model, of the same tokens, draft for this one."""
        self.drafts = engine

    def predict_with(self, foresight: Foresight) -> None:
        """Let modules or heads of the model's own draft for it."""
        assert isinstance(self.runner, SpanRunner), "recorded steps keep nothing to draft from"
        self.foresight, self._predictor = foresight, None

    @property
    def predictor(self) -> Predictor:
        """What `foresight` makes: few want it. From then on steps keep what it goes on from."""
        assert self.foresight is not None and isinstance(self.runner, SpanRunner)
        if self._predictor is None:
            self._predictor, self.runner.keeps_hidden = self.foresight.make(), True
        return self._predictor

    @property
    def draft_costs(self) -> DraftCosts:
        """What drafts take here."""
        return self.scheduler.draft_costs

    @property
    def max_tokens(self) -> int:
        """The longest sequence that can be computed."""
        return min(self.decoder.max_position, self.pool.num_blocks * BLOCK_TOKENS)

    def prefill(
        self,
        sequence: TokenSequence,
        on_progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        arriving: Arriving | None = None,
        is_background: bool = False,
    ) -> Tensor:
        """Compute every id that has no KV yet; logits after the last one, [vocab_size] float32.

        What `arriving` brings meanwhile is skipped. Waits for room that others are using.

        on_progress(done, total) is told after every chunk. Raises Cancelled and Preempted between
        steps, and ContextFull before anything is computed.
        """
        total = len(sequence.ids)
        if total > self.max_tokens:
            raise ContextFull(
                f"the conversation has {total} tokens, and the model's context ends at "
                f"{self.max_tokens}: start a new session or fork an earlier turn"
            )
        assert sequence.num_cached < total, "prefill needs at least one token to compute"
        self.reserve(sequence, cancelled)
        try:
            return self._prefill(sequence, on_progress, cancelled, arriving, is_background)
        finally:
            if sequence not in self.memory.room:  # nobody will ask for more of it
                self.scheduler.leave(sequence)

    def _prefill(
        self,
        sequence: TokenSequence,
        on_progress: Callable[[int, int], None] | None,
        cancelled: Callable[[], bool] | None,
        arriving: Arriving | None,
        is_background: bool,
    ) -> Tensor:
        total, since, logits = len(sequence.ids), time.monotonic(), None
        as_few = arriving is None and is_short(total - sequence.num_cached, total)

        def is_over() -> bool:
            is_cancelled = cancelled is not None and cancelled()
            return is_cancelled or self.memory.room.must_give_way(sequence)

        while sequence.num_cached < total:
            if cancelled is not None and cancelled():
                raise Cancelled
            if self.memory.room.must_give_way(sequence):
                raise Preempted
            start = sequence.num_cached
            piece = Piece(
                sequence, start, total, since, is_background=is_background, is_short=as_few
            )
            if arriving is not None:
                gap = arriving.next_gap(start, total, CHUNK_TOKENS)
                piece.wait_layer, piece.goes_on = gap.wait_layer, gap.goes_on
                if gap.behind is not None:
                    piece.front = Piece(sequence, gap.start, gap.stop)
                piece.start, piece.stop = gap.behind or gap[:2]
                # As where all of it was there before: the same bits.
                piece.is_short = piece.stop == total and is_short(total - piece.start, total)
                if gap.behind is not None or gap.wait_layer is None:
                    sequence.num_cached = gap.start  # else that is not there yet
            try:
                logits = self.scheduler.run(piece, is_over)
            except LayerMissing:
                continue  # the next gap begins where the KV ends
            except Cancelled:
                continue  # above it is told why, if it still is so
            if piece.hidden is not None:
                sequence.trail.extend(piece.stop - len(piece.hidden), piece.hidden)
            if arriving is not None:
                arriving.computed(sequence.num_cached)
            if on_progress is not None:
                on_progress(sequence.num_cached, total)
        assert logits is not None
        return logits

    def decode(
        self,
        sequence: TokenSequence,
        logits: Tensor,
        sampler: Sampler,
        stop_ids: frozenset[int],
        max_new_tokens: int,
        cancelled: Callable[[], bool] | None = None,
        speculation: Speculation | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Sample tokens one by one, each appended to the sequence and yielded with the logits it
        was drawn from. Ends after a stop id, max_new_tokens, a full context or a cancel; the last
        token yielded has no KV yet. With `speculation`, a step computes drafted tokens too: those
        that are then sampled need no step of their own.

        Raises Preempted where its blocks are for others to have, or they have them already: give
        them back, and call again with the logits after its last id. Waits where there is no room
        for its next block; raises Cancelled and ContextFull then.
        """
        draft, rows, row, drawn, hidden = Draft(), logits[None], 0, None, None
        try:
            for count in range(max_new_tokens):
                if drawn is not None:
                    token = sampler.accept(drawn)
                else:
                    token = sampler.pick(rows[row], draft.drawn_at(row))
                drafted = draft.index_of(token, row)
                if speculation is not None:
                    speculation.heard(token, drafted is not None)
                sequence.ids.append(token)
                yield token, rows[row]
                last = token in stop_ids or count + 1 == max_new_tokens
                total = len(sequence.ids)
                if last or total >= self.max_tokens or (cancelled and cancelled()):
                    return
                # While it was away with its reader, its blocks may have gone to others.
                if sequence.num_cached < total - 1 or self.memory.room.must_give_way(sequence):
                    raise Preempted
                if drafted is not None:
                    if drafted != row:  # its KV is behind the draft's long branch
                        assert isinstance(self.pool, BlockPool), "trees are for the CPU"
                        self.pool.move(sequence.run, total - 1 + drafted - row, total - 1)
                    sequence.num_cached, row = total, drafted + 1
                    if hidden is not None:
                        sequence.trail.extend(total - 1, hidden[row : row + 1])
                    continue
                self._wait_for_room(sequence, cancelled)
                if speculation is not None:
                    most = min(max_new_tokens - count - 2, self.max_tokens - total)
                    most = self._room_for_draft(sequence, min(most, speculation.drafter.most))
                    draft = speculation.draft(sequence.ids, most)
                piece = Piece(sequence, total - 1, total, is_decode=True)
                piece.draft, piece.instead = draft.tokens, draft.instead
                if not draft and self.runner.can_draw(sampler):
                    piece.sampler = sampler
                    more = min(1, self.max_tokens - total)
                    piece.may_go_ahead = self._room_for_draft(sequence, more) > 0
                computed = self.scheduler.run(piece)
                rows, row, drawn = computed if draft else computed[None], 0, piece.token
                hidden = piece.hidden
                if hidden is not None:
                    sequence.trail.extend(total - 1, hidden[:1])
        finally:
            self.scheduler.leave(sequence)

    def _room_for_draft(self, sequence: TokenSequence, most: int) -> int:
        """For how many tokens behind the sequence's ids there is room that nobody else wants."""
        total, kept, pool = len(sequence.ids), sequence.num_cached, self.pool
        if most <= 0 or pool.is_reserved(sequence.run, total + most, kept):
            return max(most, 0)
        if self.memory.take_free(sequence, total + most):
            return most
        most = min(most, sequence.run.capacity - total)
        return most if pool.is_reserved(sequence.run, total + most, kept) else 0

    def reserve(self, sequence: TokenSequence, cancelled: Callable[[], bool] | None = None) -> None:
        """Room for all of the sequence's ids: waits until others have given it back, in the order
        of `Room`. Where it has to give way itself meanwhile, its KV goes with its blocks.

        Raises Cancelled, and ContextFull where nobody is left who could give any back.
        """
        while True:
            try:
                return self._wait_for_room(sequence, cancelled)
            except Preempted:
                self.memory.drop(sequence)

    def _wait_for_room(self, sequence: TokenSequence, cancelled: Callable[[], bool] | None) -> None:
        if self.pool.is_reserved(sequence.run, len(sequence.ids), sequence.num_cached):
            return
        room = self.memory.room
        if room.is_next(sequence) and self.memory.make_room(sequence):
            return
        with room.waiting(sequence):
            while not (room.is_next(sequence) and self.memory.make_room(sequence)):
                if cancelled is not None and cancelled():
                    raise Cancelled
                if room.must_give_way(sequence):
                    raise Preempted
                self.pool.wait_for_room(POLL_S)
        self.pool.notify()  # whoever comes next

    def _forward(self, pieces: Sequence[Piece]) -> Sequence[Tensor | None]:
        """One pass of the model over the new tokens of several sequences."""
        return self.runner.forward(pieces)


def _ended(pieces: Sequence[Piece]) -> Sequence[Tensor | None]:
    raise AssertionError("the engine is closed")
