"""An engine over a tiny random decoder, and answers as a turn makes them, without text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from chatkv.engine.engine import Engine, Preempted
from chatkv.engine.options import SamplingOptions
from chatkv.engine.paged import PagedPool
from chatkv.engine.pool import BlockPool
from chatkv.engine.runner import PagedRunner
from chatkv.engine.sampling import Sampler
from chatkv.engine.sequence import TokenSequence
from chatkv.model.config import ModelConfig
from chatkv.model.decoder import Decoder
from chatkv.model.weights import expected_shapes

CONFIG = ModelConfig("llama", 96, 32, 48, 2, 4, 2, 8, 1e-5, 1e4, 1024)


def make_weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The same each time."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in sorted(expected_shapes(CONFIG).items()):
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            noise = 1 + 0.2 * noise
        elif "embed" not in name:
            noise *= shape[1] ** -0.5
        weights[name] = noise.to(dtype)
    return weights


def make_engine(
    num_blocks: int = 40, dtype: torch.dtype = torch.float32, max_idle_tokens: int | None = None
) -> Engine:
    decoder = Decoder(CONFIG, make_weights(dtype))
    return Engine(decoder, BlockPool(CONFIG, num_blocks, dtype, decoder.device), max_idle_tokens)


def repeat(step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """A recording as a GPU makes it, but that it computes anew each time."""
    result = step()

    def again() -> None:
        result.copy_(step())

    return result, again


def make_paged(decoder: Decoder, num_blocks: int = 40, with_graphs: bool = False) -> Engine:
    """Over blocks that lie anywhere, as on a GPU."""
    pool = PagedPool(decoder.config, num_blocks, decoder.dtype, decoder.device)
    pool.kv.fill_(float("nan"))  # what was never written must never be read
    made = Engine(decoder, pool)
    if with_graphs:
        made.runner = PagedRunner(decoder, pool, repeat)
    return made


def some_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, CONFIG.vocab_size, (count,), generator=generator).tolist()


def answer(
    engine: Engine,
    ids: Sequence[int],
    count: int,
    *,
    name: str | None = None,
    cancelled: Callable[[], bool] | None = None,
    on_token: Callable[[int], None] = lambda token: None,
    on_progress: Callable[[int, int], None] | None = None,
    on_preempted: Callable[[], None] = lambda: None,
) -> list[int]:
    """The first `count` greedy tokens after `ids`; comes back where it has to step aside."""
    sequence = TokenSequence(name=name) if name is None else engine.memory.sequence(name)
    sampler = Sampler(SamplingOptions(temperature=0), 0)
    made: list[int] = []
    with engine.memory.use(sequence):
        sequence.become(ids, min(sequence.common_prefix(ids), len(ids) - 1))
        logits = engine.prefill(sequence, on_progress, cancelled)
        while True:
            left = count - len(made)
            try:
                for token, _ in engine.decode(
                    sequence, logits, sampler, frozenset(), left, cancelled
                ):
                    made.append(token)
                    on_token(token)
                return made
            except Preempted:
                on_preempted()
                engine.memory.drop(sequence)
                logits = engine.prefill(sequence, None, cancelled)


class Turn(threading.Thread):
    """A function in a thread of its own; `result` waits for it and raises what it raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work, self._result = work, None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self.error = error

    def result(self, timeout: float = 60) -> object:
        self.join(timeout)
        assert not self.is_alive(), "the turn hangs"
        if self.error is not None:
            raise self.error
        return self._result
