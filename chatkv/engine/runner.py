"""One pass of the model for the pieces of a step: what goes in, where its KV lies, logits.

Over a pool of blocks (`PagedRunner`), a step that decodes and nothing else runs as a recorded graph
where there is one: a pass of one token launches some hundred kernels, and launching takes longer
than they do. A graph is recorded for a number of sequences, when it is first needed; a step takes
the smallest that it fits into, its last rows standing for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatkv.engine.paged import PagedPool
from chatkv.engine.pool import BLOCK_TOKENS, BlockPool, Pool, RunSpan
from chatkv.engine.scheduler import Piece
from chatkv.engine.sequence import TokenSequence
from chatkv.model.batch import PagedBatch
from chatkv.model.decoder import Decoder

# Sequences that the graphs are recorded for; a step of more runs without one.
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64)

# A pass over tensors that stay where they are, and what it returns: record(step) runs it, and gives
# its result and a function that runs it again, writing over that result.
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


class Runner(Protocol):
    """Computes steps."""

    def forward(self, pieces: Sequence[Piece]) -> Sequence[Tensor]:
        """`Piece.logits` of each piece, on the CPU."""


def runner_for(decoder: Decoder, pool: Pool) -> Runner:
    if isinstance(pool, PagedPool):
        from chatkv.engine.graphs import record_on

        return PagedRunner(decoder, pool, record_on(pool.device))
    assert isinstance(pool, BlockPool)
    return SpanRunner(decoder, pool)


class SpanRunner:
    """Sequences one by one, over views of consecutive blocks."""

    def __init__(self, decoder: Decoder, pool: BlockPool) -> None:
        self.decoder, self.pool = decoder, pool

    def forward(self, pieces: Sequence[Piece]) -> Sequence[Tensor]:
        ids: list[int] = []
        spans = []
        for piece in pieces:
            ids += piece.ids
            run, is_draft = piece.sequence.run, bool(piece.draft)
            spans.append(
                RunSpan(self.pool, run, piece.start, piece.length, piece.wait_layer, is_draft)
            )
        device = self.decoder.device
        wanted = wanted_rows(pieces, device)
        logits = self.decoder.forward(torch.tensor(ids, device=device), spans, rows=wanted)
        return by_piece(logits, pieces)


class PagedRunner:
    """All sequences together, over blocks that lie anywhere. record None: without graphs.

    A step has left the device when `forward` returns, so the blocks of a turn that ends may be
    given to another one.
    """

    def __init__(self, decoder: Decoder, pool: PagedPool, record: Record | None) -> None:
        self.decoder, self.pool, self._record = decoder, pool, record
        self._graphs: dict[int, DecodeGraph] = {}

    def forward(self, pieces: Sequence[Piece]) -> Sequence[Tensor]:
        graph = self._graph_for(pieces)
        logits = graph.run(pieces) if graph is not None else self._pass(pieces)
        return by_piece(_on_host(logits), pieces)

    def prepare(self) -> None:
        """Compile and record what the first turn will need, so that it waits for neither."""
        sequence = TokenSequence([0, 0, 0])
        self.pool.reserve(sequence.run, 3)
        self.forward([Piece(sequence, 0, 2)])
        self.forward([Piece(sequence, 2, 3, is_decode=True)])
        self.pool.release(sequence.run)

    def _graph_for(self, pieces: Sequence[Piece]) -> DecodeGraph | None:
        is_decode = all(piece.length == 1 and piece.wait_layer is None for piece in pieces)
        if self._record is None or not is_decode or len(pieces) > GRAPH_SIZES[-1]:
            return None
        size = next(size for size in GRAPH_SIZES if size >= len(pieces))
        if size not in self._graphs:
            self._graphs[size] = DecodeGraph(self.decoder, self.pool, size, self._record)
        return self._graphs[size]

    def _pass(self, pieces: Sequence[Piece]) -> Tensor:
        device = self.pool.device

        def tensor(values: npt.ArrayLike, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(np.asarray(values), dtype=dtype).to(device)

        lengths = [piece.length for piece in pieces]
        widest = max(-(-piece.end // BLOCK_TOKENS) for piece in pieces)
        table = np.zeros((len(pieces), widest), dtype=np.int32)
        for row, piece in zip(table, pieces, strict=True):
            used = piece.sequence.run.blocks[: -(-piece.end // BLOCK_TOKENS)]
            row[: len(used)] = used
        ids = np.concatenate([piece.ids for piece in pieces])
        positions = np.concatenate([np.arange(piece.start, piece.end) for piece in pieces])
        rows = np.repeat(np.arange(len(pieces)), lengths)
        slots = table[rows, positions // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS
        waits = [piece.wait_layer for piece in pieces if piece.wait_layer is not None]
        assert len(waits) <= 1, "a piece that waits has a step of its own"
        batch = PagedBatch(
            self.pool.blocks,
            tensor(positions, torch.int32),
            tensor(slots + positions % BLOCK_TOKENS, torch.int64),
            tensor(table, torch.int32),
            tensor([piece.end for piece in pieces], torch.int32),
            starts=tensor([0, *accumulate(lengths)], torch.int32) if max(lengths) > 1 else None,
            max_new=max(lengths),
            wait_layer=waits[0] if waits else None,
        )
        wanted = wanted_rows(pieces, device)
        return self.decoder.forward(tensor(ids, torch.int64), batch, rows=wanted)


class DecodeGraph:
    """A pass for up to `size` sequences with one new token each.

    What changes from step to step lies in one tensor of int32, `inputs`, that is copied to the
    device whole: ids, positions, slots and lengths of the rows, then their block tables. A row
    that stands for nothing has a slot below zero and no length.
    """

    def __init__(self, decoder: Decoder, pool: PagedPool, size: int, record: Record) -> None:
        self._decoder, self._pool = decoder, pool
        self._max_blocks = min(-(-decoder.max_position // BLOCK_TOKENS), pool.num_blocks)
        # Rows begin at multiples of 16 bytes: kernels are compiled anew for addresses that do not.
        width = -(-size // 4) * 4
        num_inputs = 4 * width + size * self._max_blocks
        is_gpu = pool.device.type == "cuda"
        self._host = torch.zeros(num_inputs, dtype=torch.int32, pin_memory=is_gpu)
        self._inputs = torch.empty_like(self._host, device=pool.device)
        numbers = self._host.numpy()
        self._rows = numbers[: 4 * width].reshape(4, width)[:, :size]
        self._table = numbers[4 * width :].reshape(size, self._max_blocks)
        self._device_rows = self._inputs[: 4 * width].view(4, width)[:, :size]
        self._device_table = self._inputs[4 * width :].view(size, self._max_blocks)
        self._fill(())
        self.logits, self._replay = record(self._step)

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> Tensor:
        """Logits after each piece, on the device; the next run writes over them."""
        self._fill(pieces)
        self._replay()
        return self.logits[: len(pieces)]

    def _fill(self, pieces: Sequence[Piece]) -> None:
        ids, positions, slots, lengths = self._rows
        ids[:] = positions[:] = lengths[:] = 0
        slots[:] = -1
        for row, piece in enumerate(pieces):
            blocks = piece.sequence.run.blocks[: -(-piece.stop // BLOCK_TOKENS)]
            ids[row] = piece.sequence.ids[piece.start]
            positions[row] = piece.start
            slots[row] = blocks[-1] * BLOCK_TOKENS + piece.start % BLOCK_TOKENS
            lengths[row] = piece.stop
            self._table[row, : len(blocks)] = blocks
        self._inputs.copy_(self._host, non_blocking=True)

    def _step(self) -> Tensor:
        ids, positions, slots, lengths = self._device_rows
        table = self._device_table
        batch = PagedBatch(self._pool.blocks, positions, slots.long(), table, lengths)
        return self._decoder.forward(ids, batch)


def wanted_rows(pieces: Sequence[Piece], device: torch.device) -> Tensor | None:
    """The rows of a pass whose logits are wanted: of each piece the last one, and with a draft as
    many more as that has tokens. None: nobody has a draft."""
    if not any(piece.draft for piece in pieces):
        return None
    rows: list[int] = []
    for piece, end in zip(pieces, accumulate(piece.length for piece in pieces), strict=True):
        rows += range(end - len(piece.draft) - 1, end)
    return torch.tensor(rows, device=device)


def by_piece(logits: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """`Piece.logits` of each piece, from the logits of the rows that are wanted."""
    parts = torch.split(logits, [1 + len(piece.draft) for piece in pieces])
    return [part if piece.draft else part[0] for part, piece in zip(parts, pieces, strict=True)]


def _on_host(logits: Tensor) -> Tensor:
    """A copy that nobody writes over, once the device is done with the step."""
    if logits.device.type != "cuda":
        return logits.clone()
    host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
    host.copy_(logits, non_blocking=True)
    torch.cuda.current_stream(logits.device).synchronize()
    return host
