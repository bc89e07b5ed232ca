"""One pass of the model for the pieces of a step: what goes in, where its KV lies, logits.

Over a pool of blocks (`PagedRunner`), a step that decodes and nothing else runs as a recorded graph
where there is one: a pass of one token launches some hundred kernels, and launching takes longer
than they do. A graph is recorded for a number of new tokens, when it is first needed; a step takes
the smallest that it fits into, its last rows standing for nothing. A drafted token is a row as any
other, over the same blocks as the token in front of it, whose KV is written before either attends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatkv.engine.decode_graph import DecodeGraph, Launch, Record, Row, is_in_rows
from chatkv.engine.device_draws import can_draw
from chatkv.engine.options import SamplingOptions
from chatkv.engine.paged import PagedPool
from chatkv.engine.piece import Piece, with_fronts
from chatkv.engine.pool import BLOCK_TOKENS, BlockPool, Pool, RunSpan
from chatkv.engine.sampling import Sampler
from chatkv.engine.sequence import TokenSequence
from chatkv.engine.trail import MAX_ROWS
from chatkv.model.batch import PagedBatch
from chatkv.model.decoder import Decoder, Pass

# Where a token could not be drawn on the device, since the tail of its distribution counts, the
# next ones hardly can: for so many steps none is launched ahead.
PAUSE_STEPS = 16
# New tokens that the graphs are recorded for; a step of more runs without one.
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Runner(Protocol):
    """Computes steps. num_layers: into so many parts a pass can be cut, 1: none."""

    @property
    def num_layers(self) -> int: ...

    def forward(self, pieces: Sequence[Piece]) -> Sequence[Tensor | None]:
        """`Piece.logits` of each piece, on the CPU where its token is not drawn already; None where
        a piece has not been through all layers yet (`Piece.until`)."""

    def can_draw(self, sampler: Sampler) -> bool:
        """Whether steps that decode may draw the next token of this sampler (`Piece.sampler`)."""


def runner_for(decoder: Decoder, pool: Pool) -> Runner:
    if isinstance(pool, PagedPool):
        from chatkv.engine.graphs import record_on

        return PagedRunner(decoder, pool, record_on(pool.device))
    assert isinstance(pool, BlockPool)
    return SpanRunner(decoder, pool)


class SpanRunner:
    """Sequences one by one, over views of consecutive blocks; each stops at any layer."""

    keeps_hidden = False  # whether pieces get what drafts go on from

    def __init__(self, decoder: Decoder, pool: BlockPool) -> None:
        self.decoder, self.pool = decoder, pool

    @property
    def num_layers(self) -> int:
        return self.decoder.config.num_layers

    def forward(self, pieces: Sequence[Piece]) -> Sequence[Tensor | None]:
        passes = {piece: piece.passing or self._begin(piece) for piece in pieces}
        stops = [piece.until or self.num_layers for piece in pieces]
        for piece in pieces:
            if piece.front is not None:
                self._with_front(piece, piece.front, passes[piece])
        self.decoder.advance(list(passes.values()), stops)
        ended = [one for one, stop in zip(pieces, stops, strict=True) if stop == self.num_layers]
        logits = dict(zip(ended, self._logits(ended, passes), strict=True)) if ended else {}
        for piece in pieces:
            piece.passing = None if piece in logits else passes[piece]
        return [logits.get(piece) for piece in pieces]

    def _with_front(self, piece: Piece, front: Piece, behind: Pass) -> None:
        """Take both through the layers that `front` is computed in."""
        ahead = self._begin(front)
        while ahead.layer < self.num_layers:
            stop = piece.goes_on(ahead.layer) if piece.goes_on is not None else self.num_layers
            if stop == ahead.layer:
                return
            self.decoder.advance([ahead, behind], [stop, stop])

    def _begin(self, piece: Piece) -> Pass:
        run, draft = piece.sequence.run, piece.instead if piece.draft or piece.is_short else None
        span = RunSpan(self.pool, run, piece.start, piece.length, piece.wait_layer, draft)
        return self.decoder.begin(torch.tensor(piece.ids, device=self.decoder.device), span)

    def _logits(self, pieces: Sequence[Piece], passes: Mapping[Piece, Pass]) -> list[Tensor]:
        kept = [MAX_ROWS if self.keeps_hidden else 1 + len(piece.draft) for piece in pieces]
        rows = [passes[piece].hidden[-most:] for piece, most in zip(pieces, kept, strict=True)]
        parts = torch.split(self.decoder.normed(rows), [len(part) for part in rows])
        if self.keeps_hidden:
            for piece, part in zip(pieces, parts, strict=True):
                piece.hidden = part.clone() if len(pieces) > 1 else part
        wanted = [part[-1 - len(piece.draft) :] for piece, part in zip(pieces, parts, strict=True)]
        return by_piece(self.decoder.logits(wanted), pieces)

    def can_draw(self, sampler: Sampler) -> bool:
        return False


class PagedRunner:
    """All sequences together, over blocks that lie anywhere. record None: without graphs.

    Where every token of a recorded step is drawn on the device, the step behind it is launched
    before anybody has seen them: the device never waits for a turn. Turns that go on as expected
    find their next step on its way; where one joins, or says something else, it was for nothing.
    Nobody is harmed by it: it writes behind the tokens that count, into blocks that are the turn's
    when it is launched, and whatever is done with these later is done behind it.
    """

    def __init__(self, decoder: Decoder, pool: PagedPool, record: Record | None) -> None:
        self.decoder, self.pool, self._record = decoder, pool, record
        self._graphs: dict[int, DecodeGraph] = {}
        self._tokens = torch.zeros(GRAPH_SIZES[-1], dtype=torch.int64, device=pool.device)
        self._ahead: Launch | None = None
        self._pause = 0  # steps
        self.num_ahead = 0  # steps that were on their way when turns asked for them

    @property
    def num_layers(self) -> int:
        return 1

    def can_draw(self, sampler: Sampler) -> bool:
        return self._record is not None and can_draw(sampler)

    def forward(self, pieces: Sequence[Piece]) -> Sequence[Tensor]:
        launch, self._ahead = self._ahead, None
        rows = launch.rows_of(pieces) if launch is not None else None
        if launch is not None and rows is not None:
            self.num_ahead += 1
        else:
            graph = self._graph_for(pieces)
            if graph is None:
                parts = with_fronts(pieces)
                found = dict(zip(parts, by_piece(_on_host(self._pass(parts)), parts), strict=True))
                return [found[piece] for piece in pieces]
            rows = [0, *accumulate(piece.length for piece in pieces[:-1])]
            launch = graph.launch([row for piece in pieces for row in Row.all_of(piece)])
        self._pause = max(0, self._pause - 1)
        if not self._pause and all(piece.may_go_ahead for piece in pieces):
            behind = [launch.rows[row].behind(row) for row in rows]
            self._ahead = self._graph_of(len(pieces)).launch(behind)
        tokens = launch.tokens()
        if self._ahead is not None:
            self._ahead.ids = [tokens[row] for row in rows]
        for piece, row in zip(pieces, rows, strict=True):
            if piece.sampler is not None and tokens[row] >= 0:
                piece.token = tokens[row]
            elif piece.sampler is not None:
                self._pause = PAUSE_STEPS
        is_drawn = all(piece.token is not None for piece in pieces)
        logits = launch.logits if is_drawn else _on_host(launch.logits)
        ends = [row + piece.length for row, piece in zip(rows, pieces, strict=True)]
        return [
            logits[row:end] if piece.draft else logits[row]
            for piece, row, end in zip(pieces, rows, ends, strict=True)
        ]

    def prepare(self) -> None:
        """Compile and record what the first turn will need, so that it waits for neither."""
        sequence = TokenSequence([0, 0, 0])
        self.pool.reserve(sequence.run, 3)
        self.forward([Piece(sequence, 0, 2)])
        sampler = Sampler(SamplingOptions(), 0)
        self.forward([Piece(sequence, 2, 3, is_decode=True, sampler=sampler)])
        self.pool.release(sequence.run)

    def _graph_for(self, pieces: Sequence[Piece]) -> DecodeGraph | None:
        num_rows = sum(piece.length for piece in pieces)
        if self._record is None or num_rows > GRAPH_SIZES[-1]:
            return None
        return self._graph_of(num_rows) if all(map(is_in_rows, pieces)) else None

    def _graph_of(self, num_rows: int) -> DecodeGraph:
        assert self._record is not None
        size = next(size for size in GRAPH_SIZES if size >= num_rows)
        if size not in self._graphs:
            self._graphs[size] = DecodeGraph(
                self.decoder, self.pool, size, self._record, self._tokens
            )
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
