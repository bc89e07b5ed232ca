"""Iteration-level scheduling: each step of the model computes what all turns need next, together.

A turn runs in a thread of its own and asks for one piece of work at a time: the next token of its
answer, or as much as may be of its prompt. One thread computes: it waits until every running
answer has asked for its next token, adds as much prefill as the budget allows, and gives each turn
its logits. (Continuous batching as in Orca, OSDI '22; chunked prefill as in Sarathi-Serve, OSDI
'24.) So a turn reads from top to bottom, a slow reader holds up nobody, and a turn that ends,
comes or is cancelled changes the next step and nothing else.

A token does not depend on who else is in its step beyond rounding: attention sees one sequence at
a time, all else is per row. In bf16 on CPUs with instructions for it rows are the same to the bit
in any company; in float32 a row alone is multiplied by another routine, and rounds differently.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from chatkv.engine.budget import StepBudget
from chatkv.engine.sequence import TokenSequence

# How long a step waits for an answer whose turn is still busy with its last token.
GRACE_S = 0.005
# How often a turn that waits asks whether it is cancelled.
POLL_S = 0.05


class Cancelled(Exception):
    """The caller's `cancelled` said so; the sequence keeps what is computed."""


@dataclass(eq=False)
class Piece:
    """The KV that a turn wants next: of ids[num_cached:stop) of its sequence.

    A step may compute only the front of a piece of prefill; the turn asks again for the rest.
    wait_layer(layer) is called before a layer attends to KV that is still arriving.
    """

    sequence: TokenSequence
    stop: int
    is_decode: bool = False
    is_background: bool = False
    wait_layer: Callable[[int], None] | None = None
    logits: Tensor | None = None  # after the last token computed, [vocab_size] float32
    error: Exception | None = None
    is_started: bool = False
    is_done: bool = False

    @property
    def length(self) -> int:
        return self.stop - self.sequence.num_cached


@dataclass
class Scheduler:
    """forward(pieces) computes each piece whole, and returns the logits after each."""

    forward: Callable[[Sequence[Piece]], Sequence[Tensor]]
    budget: StepBudget = field(default_factory=StepBudget)
    num_steps: int = 0
    _num_decoding: int = 0
    _pending: list[Piece] = field(default_factory=list)
    _thread: threading.Thread | None = None
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._changed = threading.Condition()

    def run(self, piece: Piece, cancelled: Callable[[], bool] | None = None) -> Tensor:
        """Have a piece computed, at least its front; its logits. Raises what `forward` raises, and
        Cancelled where `cancelled` says so before its step has begun."""
        with self._changed:
            self._start()
            self._pending.append(piece)
            self._changed.notify_all()
            try:
                while not piece.is_done:
                    if cancelled is None:
                        self._changed.wait()
                    elif not self._changed.wait(POLL_S) and not piece.is_started and cancelled():
                        raise Cancelled
            finally:
                self._withdraw(piece)
        if piece.error is not None:
            raise piece.error
        assert piece.logits is not None
        return piece.logits

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """While an answer is running: steps wait for its next token."""
        with self._changed:
            self._num_decoding += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_decoding -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread, once its step is done."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # --- the thread that computes ---------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
            self._thread.start()

    def _withdraw(self, piece: Piece) -> None:
        """Nothing is written into the sequence's blocks once its turn goes on."""
        if piece in self._pending:
            self._pending.remove(piece)
        while piece.is_started and not piece.is_done:
            self._changed.wait()

    def _loop(self) -> None:
        while (batch := self._next_batch()) is not None:
            if batch:  # else whoever asked was cancelled meanwhile
                self._step(batch)

    def _next_batch(self) -> list[tuple[Piece, int]] | None:
        """Pieces of the next step, each with where to stop; None: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_closed)
            self._changed.wait_for(self._has_everyone, GRACE_S)
            if self._is_closed:
                return None
            decodes = [piece for piece in self._pending if piece.is_decode]
            prefills = [piece for piece in self._pending if not piece.is_decode]
            tokens = self.budget.prefill_tokens(len(decodes))
            batch = [(piece, piece.stop) for piece in decodes] + divide(prefills, tokens)
            for piece, _ in batch:
                piece.is_started = True
                self._pending.remove(piece)
            return batch

    def _has_everyone(self) -> bool:
        return sum(piece.is_decode for piece in self._pending) >= self._num_decoding

    def _step(self, batch: Sequence[tuple[Piece, int]]) -> None:
        pieces = [piece for piece, _ in batch]
        for piece, stop in batch:
            piece.stop = stop
        num_decoding = sum(piece.is_decode for piece in pieces)
        num_prefilled = sum(piece.length for piece in pieces if not piece.is_decode)
        began = time.perf_counter()
        try:
            for piece, logits in zip(pieces, self.forward(pieces), strict=True):
                piece.logits = logits
                piece.sequence.num_cached = piece.stop
            self.budget.observe(num_decoding, num_prefilled, time.perf_counter() - began)
        except Exception as error:
            for piece in pieces:
                piece.error = error
        with self._changed:
            self.num_steps += 1
            for piece in pieces:
                piece.is_done = True
            self._changed.notify_all()


def divide(prefills: Sequence[Piece], tokens: int) -> list[tuple[Piece, int]]:
    """Share a step's tokens of prefill fairly: what one does not need, the others get. Background
    work gets what those before it leave."""
    batch: list[tuple[Piece, int]] = []
    for is_background in (False, True):
        group = [piece for piece in prefills if piece.is_background is is_background]
        for index, piece in enumerate(sorted(group, key=lambda piece: piece.length)):
            share = min(piece.length, tokens // (len(group) - index))
            if share:
                batch.append((piece, piece.sequence.num_cached + share))
                tokens -= share
    return batch
