"""Recorded steps that decode, and what comes of them: logits, and the tokens that follow.

The tokens stay on the device as well, so that the next step can be launched before anybody has
looked at them: its new token is then "what followed in row 3". While a turn reads its token, the
device computes what comes behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chatkv.engine.device_draws import NUM_SETTINGS, draw_rows, settings_of
from chatkv.engine.paged import PagedPool
from chatkv.engine.piece import Piece
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.engine.sampling import Sampler
from chatkv.engine.sequence import TokenSequence
from chatkv.model.batch import PagedBatch
from chatkv.model.decoder import Decoder

# Inputs that may be in use: those of the step that runs, of the one launched behind it, and of one
# that was launched for nothing.
NUM_INPUTS = 3

# A pass over tensors that stay where they are, and what it returns: record(step) runs it, and gives
# its result and a function that runs it again, writing over that result.
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


@dataclass(frozen=True)
class Row:
    """A new token at `position` of a sequence: `id`, or where it is below zero, what followed in
    row -1 - id of the launch before. The next one is drawn by `sampler`, if at all, at `draws`."""

    sequence: TokenSequence
    position: int
    id: int
    sampler: Sampler | None
    draws: int
    blocks: Sequence[int]  # of the run, up to that of the token

    @classmethod
    def all_of(cls, piece: Piece) -> list[Row]:
        """Of a piece's token, and one more for each that is drafted behind it."""
        sequence, sampler = piece.sequence, piece.sampler
        draws = sampler.draws if sampler is not None else 0
        return [
            cls(sequence, position, id, sampler, draws, _blocks(sequence, position))
            for position, id in enumerate(piece.ids, piece.start)
        ]

    def behind(self, row: int) -> Row:
        """The token that follows this one, which is in that row of its launch."""
        assert self.sampler is not None
        position, draws = self.position + 1, self.draws + (self.sampler.options.temperature > 0)
        blocks = _blocks(self.sequence, position)
        return Row(self.sequence, position, -1 - row, self.sampler, draws, blocks)

    def is_for(self, piece: Piece, id: int) -> bool:
        """Whether this is what a turn asks for: its row was launched with `id`."""
        return (
            piece.start == self.position
            and piece.end == self.position + 1
            and piece.is_decode
            and piece.wait_layer is None
            and piece.sequence.ids[piece.start] == id
            and piece.sampler is self.sampler
            and piece.sampler is not None
            and piece.sampler.draws == self.draws
            and list(_blocks(piece.sequence, piece.start)) == list(self.blocks)
        )


def is_in_rows(piece: Piece) -> bool:
    """Whether a recorded step can compute it: a token, and what is drafted behind it in a row."""
    is_one = len(piece.draft) == piece.length - 1
    return is_one and not piece.instead and piece.wait_layer is None


class Launch:
    """A step on its way, and its results: `logits` [rows, vocab_size] on the device. ids: of rows
    whose token was that of a launch before, once they are known."""

    def __init__(self, rows: Sequence[Row], logits: Tensor, tokens: Tensor) -> None:
        self.rows, self.logits = rows, logits
        self.ids: list[int] = []
        self._tokens = tokens
        self._done = None
        if logits.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def tokens(self) -> list[int]:
        """What follows in each row, -1 where it must be drawn from the logits. Waits for the step,
        and for no other."""
        if self._done is not None:
            self._done.synchronize()
        return [int(token) for token in self._tokens]

    def rows_of(self, pieces: Sequence[Piece]) -> list[int] | None:
        """Where the pieces' tokens are; None where not all have been launched just so."""
        by_sequence = {row.sequence: index for index, row in enumerate(self.rows)}
        found = [by_sequence.get(piece.sequence, -1) for piece in pieces]
        matches = all(
            row >= 0 and self.rows[row].is_for(piece, self.ids[row])
            for row, piece in zip(found, pieces, strict=True)
        )
        return found if matches else None


class _Inputs:
    """What changes from step to step, on the host: one tensor of int32 that is copied to the device
    whole (ids, positions, slots and lengths of the rows, then their block tables), and settings."""

    def __init__(self, size: int, width: int, max_blocks: int, is_pinned: bool) -> None:
        num_inputs = 4 * width + size * max_blocks
        self.whole = torch.zeros(num_inputs, dtype=torch.int32, pin_memory=is_pinned)
        numbers = self.whole.numpy()
        self.rows = numbers[: 4 * width].reshape(4, width)[:, :size]
        self.table = numbers[4 * width :].reshape(size, max_blocks)
        shape = (size, NUM_SETTINGS)
        self.settings = torch.zeros(shape, dtype=torch.float64, pin_memory=is_pinned)
        self.tokens = torch.zeros(size, dtype=torch.int64, pin_memory=is_pinned)

    def fill(self, rows: Sequence[Row]) -> None:
        """A row that stands for nothing has a slot below zero and no length."""
        ids, positions, slots, lengths = self.rows
        ids[:] = positions[:] = lengths[:] = 0
        slots[:] = -1
        for index, row in enumerate(rows):
            ids[index], positions[index] = row.id, row.position
            slots[index] = row.blocks[-1] * BLOCK_TOKENS + row.position % BLOCK_TOKENS
            lengths[index] = row.position + 1
            self.table[index, : len(row.blocks)] = row.blocks


class DecodeGraph:
    """A pass for up to `size` new tokens: of so many sequences, or of fewer with drafts.

    tokens: int64, at least `size`; on the device, shared by all graphs of a runner: what followed
    in each row of the last launch.
    """

    def __init__(
        self, decoder: Decoder, pool: PagedPool, size: int, record: Record, tokens: Tensor
    ) -> None:
        self._decoder, self._pool, self._tokens = decoder, pool, tokens
        max_blocks = min(-(-decoder.max_position // BLOCK_TOKENS), pool.num_blocks)
        # Rows begin at multiples of 16 bytes: kernels are compiled anew for addresses that do not.
        width = -(-size // 4) * 4
        is_gpu = pool.device.type == "cuda"
        self._hosts = [_Inputs(size, width, max_blocks, is_gpu) for _ in range(NUM_INPUTS)]
        self._num_launches = 0
        self._inputs = torch.empty_like(self._hosts[0].whole, device=pool.device)
        self._rows = self._inputs[: 4 * width].view(4, width)[:, :size]
        self._table = self._inputs[4 * width :].view(size, max_blocks)
        self._hosts[0].fill(())
        self._inputs.copy_(self._hosts[0].whole)
        kept = tokens.clone()  # they may be needed still, and recording writes over them
        self.logits, self._replay = record(self._step)
        tokens.copy_(kept)

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row]) -> Launch:
        """Begin a step. Before a launch three later, somebody must have waited for it, or for one
        behind it."""
        host = self._hosts[self._num_launches % NUM_INPUTS]
        self._num_launches += 1
        host.fill(rows)
        self._inputs.copy_(host.whole, non_blocking=True)
        self._replay()
        logits = self.logits[: len(rows)].clone()  # the next launch writes over it
        tokens = self._tokens[: len(rows)]
        if any(row.sampler is not None and row.sampler.options.temperature for row in rows):
            for of_row, row in zip(host.settings.numpy(), rows, strict=False):
                of_row[:] = 0.0 if row.sampler is None else settings_of(row.sampler, row.draws)
            settings = host.settings[: len(rows)].to(logits.device, non_blocking=True)
            draw_rows(logits, settings, tokens)
        found = host.tokens[: len(rows)]
        found.copy_(tokens, non_blocking=True)
        return Launch(rows, logits, found)

    def _step(self) -> Tensor:
        ids, positions, slots, lengths = self._rows
        batch = PagedBatch(self._pool.blocks, positions, slots.long(), self._table, lengths)
        followed = self._tokens[(-1 - ids).clamp(min=0).long()].clamp(min=0)
        logits = self._decoder.forward(torch.where(ids < 0, followed, ids.long()), batch)
        self._tokens[: len(ids)] = logits.argmax(1)
        return logits


def _blocks(sequence: TokenSequence, position: int) -> Sequence[int]:
    return sequence.run.blocks[: position // BLOCK_TOKENS + 1]
