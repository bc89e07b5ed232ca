"""Which pieces make a step: fair shares, background last but not never, cancels at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chatkv.engine.piece import Piece
from chatkv.engine.scheduler import Cancelled, Scheduler
from chatkv.engine.sequence import TokenSequence
from chatkv.engine.shares import LEAST_SLICE, MAX_PASSED_OVER, MOST_SLICE, divide
from chatkv.model.decoder import Pass
from small_engine import Turn

PIECES = st.lists(
    st.tuples(st.integers(1, 600), st.floats(0, 9), st.booleans(), st.integers(0, 40)), max_size=12
)


def piece(length: int, **options: object) -> Piece:
    return Piece(TokenSequence(), 7, 7 + length, **options)  # type: ignore[arg-type]


# --- shares of a step -----------------------------------------------------------------------------


@settings(max_examples=50)
@given(PIECES, st.integers(1, 512))
def test_a_step_is_filled_and_shared(
    wanted: list[tuple[int, float, bool, int]], tokens: int
) -> None:
    pieces = [piece(n, since=s, is_background=b, num_passed_over=p) for n, s, b, p in wanted]
    lengths = {p: p.length for p in pieces}
    batch = divide(pieces, tokens)
    assert len(set(batch)) == len(batch)
    assert all(p.start == 7 and 1 <= p.length <= lengths[p] for p in batch)
    assert sum(p.length for p in batch) == min(tokens, sum(lengths.values()))
    got = {p: p.length if p in batch else 0 for p in pieces}
    first = [p for p in pieces if not p.is_background or p.num_passed_over >= MAX_PASSED_OVER]
    last = [p for p in pieces if p not in first]
    if any(got[p] for p in last):
        assert all(got[p] == lengths[p] for p in first)
    for group, room in ((first, tokens), (last, tokens - sum(got[p] for p in first))):
        if group:
            oldest = min(group, key=lambda p: p.since)
            assert got[oldest] >= min(lengths[oldest], room / 2), "nobody starves"
            others = [p for p in group if p is not oldest]
            cut = min((lengths[p] for p in others if got[p] < lengths[p]), default=601)
            assert all(got[p] == lengths[p] for p in others if lengths[p] < cut)
            assert not any(got[p] for p in others if lengths[p] > cut), "the shortest come first"


@settings(max_examples=50)
@given(PIECES, st.floats(0.01, 512), st.integers(2, 40), st.data())
def test_a_step_takes_layers_where_it_has_no_time_for_all(
    wanted: list[tuple[int, float, bool, int]], tokens: float, num_layers: int, data: st.DataObject
) -> None:
    pieces = [piece(n, since=s, is_background=b, num_passed_over=p) for n, s, b, p in wanted]
    for one in pieces:
        if one.length <= 100 and data.draw(st.booleans()):
            layer = data.draw(st.integers(1, num_layers - 1))
            one.passing = Pass(None, torch.empty(0), layer)  # type: ignore[arg-type]
        one.is_short = one.length <= LEAST_SLICE and data.draw(st.booleans())
    begun = {one: one.stop for one in pieces if one.passing is not None}
    batch = divide(pieces, tokens, num_layers)
    assert len(set(batch)) == len(batch) and bool(batch) is bool(pieces)
    for one in batch:
        assert one.until is not None and one.layer < one.until <= num_layers
        assert one.stop == begun.get(one, one.stop), "tokens on their way stay together"
        if one not in begun and one.until < num_layers:
            assert one.length <= max(MOST_SLICE, tokens)
    done = sum(one.work(num_layers) for one in batch)
    half_a_layer = sum(one.length / num_layers / 2 for one in batch)
    is_least = len(batch) == 1 and batch[0].until == batch[0].layer + 1
    # One that is short is not left half done.
    finished = [one.work(num_layers) for one in batch if one.is_short and one.until == num_layers]
    over = max(finished, default=0) / 2
    assert done <= tokens + over + half_a_layer + 1e-6 or is_least


def test_a_short_prefill_is_not_left_half_done() -> None:
    short, other = piece(20, since=1.0), piece(20, since=2.0)
    short.is_short = other.is_short = True
    assert divide([other, short], 20, 10) == [short, other]
    assert (short.until, other.until) == (10, 5)  # each had time for a half
    for one in (short, other):
        one.until = None
    assert divide([other, short], 8, 10)[0] is short
    assert short.until is not None and short.until < 10


# --- steps ------------------------------------------------------------------------------------


class Recorder:
    """A model that notes what it is given; it computes only when it is let."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[Piece, int, int]]] = []
        self.is_busy = threading.Event()
        self._lets = threading.Semaphore(0)
        self.scheduler = Scheduler(self.forward)
        for num_decoding in range(1, 4):  # else the first such step would be without prefill
            self.scheduler.budget.observe(num_decoding, 0, 1.0)

    def forward(self, pieces: Sequence[Piece]) -> list[Tensor]:
        self.steps.append([(piece, piece.start, piece.stop) for piece in pieces])
        self.is_busy.set()
        assert self._lets.acquire(timeout=60)
        self.is_busy.clear()
        return [torch.tensor([float(piece.stop)]) for piece in pieces]

    def let(self, count: int = 1) -> None:
        self._lets.release(count)

    def run(self, piece: Piece, cancelled: Callable[[], bool] | None = None) -> Turn:
        turn = Turn(lambda: self.scheduler.run(piece, cancelled))
        return turn

    def pending(self, count: int) -> None:
        """Wait until so many pieces are waiting for the next step."""
        while len(self.scheduler._pending) != count:
            threading.Event().wait(0.001)

    def stepped(self, count: int) -> None:
        """Wait until so many steps have begun."""
        while len(self.steps) != count:
            threading.Event().wait(0.001)


@pytest.fixture
def model() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.let(1000)
    recorder.scheduler.close()


def busy(model: Recorder) -> Turn:
    """A step that is being computed: whoever asks now waits for the next one."""
    turn = model.run(piece(1))
    assert model.is_busy.wait(60)
    return turn


def test_what_is_asked_during_a_step_makes_the_next_one(model: Recorder) -> None:
    busy(model)
    wanted = [piece(1, is_decode=True), piece(5), piece(1, is_decode=True)]
    turns = [model.run(one) for one in wanted]
    model.pending(3)
    model.let(2)
    for turn, one in zip(turns, wanted, strict=True):
        assert turn.result().tolist() == [one.stop]  # type: ignore[attr-defined]
        assert one.sequence.num_cached == one.stop
    assert {one for one, _, _ in model.steps[1]} == set(wanted)


def test_beside_answers_a_prompt_is_read_in_pieces(model: Recorder) -> None:
    busy(model)
    prompt, token = piece(5000), piece(1, is_decode=True)
    turns = [model.run(prompt), model.run(token)]
    model.pending(2)
    model.let(2)
    for turn in turns:
        turn.result()
    assert token.sequence.num_cached == 8
    assert 7 < prompt.sequence.num_cached < 5000


def test_a_cancel_takes_a_piece_back_that_no_step_has_begun(model: Recorder) -> None:
    """Also while steps go on and on beside it."""
    busy(model)
    is_cancelled = threading.Event()
    waiting = model.run(piece(5, is_background=True), is_cancelled.is_set)
    model.pending(1)
    is_cancelled.set()
    with pytest.raises(Cancelled):
        waiting.result()
    model.pending(0)
    assert model.is_busy.is_set(), "the step it was waiting for is still on its way"


def test_a_cancel_waits_for_a_step_that_has_begun(model: Recorder) -> None:
    """Nothing is written into a sequence whose turn has gone on."""
    one = piece(5)
    turn = model.run(one, lambda: True)
    while not (model.steps or not turn.is_alive()):
        threading.Event().wait(0.001)
    if turn.is_alive():
        turn.join(0.2)
        assert turn.is_alive()
        model.let()
        turn.result()
        assert one.sequence.num_cached == one.stop


def test_a_step_waits_for_the_turns_of_the_last_one_but_not_for_ever(model: Recorder) -> None:
    sequences = [TokenSequence(), TokenSequence()]
    busy(model)
    turns = [model.run(Piece(s, 0, 1, is_decode=True)) for s in sequences]
    model.pending(2)
    model.let(2)
    for turn in turns:
        turn.result()
    # One of them never comes back, and nobody said so.
    model.let(2)
    model.run(Piece(sequences[0], 1, 2, is_decode=True)).result()
    model.run(Piece(sequences[0], 2, 3, is_decode=True)).result()
    assert [len(step) for step in model.steps] == [1, 2, 1, 1]


def test_background_work_is_not_starved(model: Recorder) -> None:
    """Prompts that fill every step come one after the other."""
    busy(model)
    background = piece(3000, is_background=True)
    model.run(background)
    model.pending(1)
    for num_steps in range(1, MAX_PASSED_OVER + 2):
        model.run(piece(5000))
        model.pending(2)
        model.let()
        model.stepped(num_steps + 1)
        assert background.is_started == (num_steps > MAX_PASSED_OVER)
    assert 7 < background.stop < 3000, "a share, not all"


def test_a_piece_whose_layers_arrive_is_alone_in_its_step(model: Recorder) -> None:
    """If they do not come, nobody else is told so."""
    busy(model)
    arriving = piece(5, wait_layer=lambda layer: None)
    others = [piece(1, is_decode=True), piece(5)]
    turns = [model.run(one) for one in (*others, arriving)]
    model.pending(3)
    model.let(3)
    for turn in turns:
        turn.result()
    assert [one for one, _, _ in model.steps[1]] == [arriving]
    assert {one for one, _, _ in model.steps[2]} == set(others)


def test_an_error_ends_the_turns_of_its_step_alone(
    model: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy(model)
    turns = [model.run(piece(2)), model.run(piece(1, is_decode=True))]
    model.pending(2)

    def fails(pieces: Sequence[Piece]) -> list[Tensor]:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model.scheduler, "forward", fails)
        model.let()
        for turn in turns:
            with pytest.raises(RuntimeError, match="out of memory"):
                turn.result()
    model.let()
    assert model.run(piece(2)).result() is not None


# --- layers -----------------------------------------------------------------------------------


class Layered(Recorder):
    """The same, of a model of eight layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler.num_layers = 8

    def forward(self, pieces: Sequence[Piece]) -> list[Tensor | None]:  # type: ignore[override]
        logits = super().forward(pieces)
        for one in pieces:
            one.passing = Pass(None, torch.empty(0), one.until or 8)  # type: ignore[arg-type]
        return [
            after if one.layer == 8 else None for one, after in zip(pieces, logits, strict=True)
        ]


@pytest.fixture
def layered() -> Iterator[Layered]:
    model = Layered()
    yield model
    model.let(1000)
    model.scheduler.close()


def test_answers_go_on_while_a_prompt_is_on_its_way_through_the_layers(layered: Layered) -> None:
    busy(layered)
    prompt, sequence = piece(5000), TokenSequence()
    reading = layered.run(prompt)
    layered.pending(1)
    token = layered.run(Piece(sequence, 0, 1, is_decode=True))
    layered.pending(2)
    layered.let(2)
    token.result()
    layered.stepped(3)
    assert 0 < prompt.layer < 8 and prompt.sequence.num_cached == 0
    layered.let(1000)
    reading.result()
    assert prompt.sequence.num_cached == prompt.stop
    assert LEAST_SLICE <= prompt.stop - 7 <= MOST_SLICE and not (prompt.stop - 7) % LEAST_SLICE


def test_a_cancel_ends_a_prompt_between_its_layers(layered: Layered) -> None:
    busy(layered)
    is_cancelled = threading.Event()
    prompt = piece(5000)
    reading = layered.run(prompt, is_cancelled.is_set)
    token = layered.run(piece(1, is_decode=True))
    layered.pending(2)
    layered.let()
    layered.stepped(2)
    is_cancelled.set()
    while not prompt.is_withdrawn:  # its turn waits for the step that is being computed
        threading.Event().wait(0.001)
    layered.let()
    with pytest.raises(Cancelled):
        reading.result()
    token.result()
    assert prompt.sequence.num_cached == 0 and prompt.passing is None
