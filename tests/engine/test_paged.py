"""A pool whose blocks lie anywhere and belong to several runs: against plain lists; and answers
over it against those over consecutive blocks, for every architecture, with graphs and without."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from chatkv.engine.engine import Engine
from chatkv.engine.memory import Memory
from chatkv.engine.on_device import engine_on
from chatkv.engine.paged import PagedPool
from chatkv.engine.piece import Piece
from chatkv.engine.pool import BLOCK_TOKENS, BlockPool, Pool, Run
from chatkv.engine.runner import GRAPH_SIZES, PagedRunner
from chatkv.engine.sequence import TokenSequence
from chatkv.engine.shift import take_out
from chatkv.errors import ContextFull
from chatkv.model.batch import PagedBatch
from chatkv.model.catalog import find_model
from chatkv.model.config import ModelConfig
from chatkv.model.decoder import Decoder
from chatkv.model.prepared import prepare
from chatkv.model.weights import expected_shapes, load_weights
from chatkv_kernels.dispatch import has_kernel
from small_engine import (
    CONFIG,
    Turn,
    answer,
    make_engine,
    make_paged,
    make_weights,
    repeat,
    some_ids,
)

SMALL = ModelConfig("llama", 8, 4, 4, 1, 1, 1, 2, 1e-5, 1e4, 64)
CPU = torch.device("cpu")


def write(pool: Pool, run: Run, start: int, values: list[float]) -> None:
    """KV of tokens from `start` on: in all layers and heads, one number each."""
    slots = pool.slot_index(run, start, start + len(values))
    blocks = pool.blocks
    tokens = torch.tensor(values)[:, None, None, None, None]
    tokens = tokens.expand(-1, *blocks.shape[1:4], blocks.shape[5])
    blocks[slots // blocks.shape[4], :, :, :, slots % blocks.shape[4]] = tokens


def read(pool: Pool, run: Run, stop: int) -> list[float]:
    slots, blocks = pool.slot_index(run, 0, stop), pool.blocks
    tokens = blocks[slots // blocks.shape[4], :, :, :, slots % blocks.shape[4]].flatten(1)
    assert (tokens == tokens[:, :1]).all()
    return tokens[:, 0].tolist()  # type: ignore[no-any-return]


WHICH = st.integers(0, 2)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("write"), WHICH, st.sampled_from([0.0, 0.3, 0.7, 1.0]), st.integers(1, 150)
        ),
        st.tuples(st.just("adopt"), WHICH, WHICH, st.integers(0, 100)),
        st.tuples(st.just("release"), WHICH, st.just(0), st.just(0)),
    ),
    min_size=10,
    max_size=25,
)


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_each_run_keeps_its_own_kv(steps: list[tuple[str, int, float, int]]) -> None:
    pool = PagedPool(SMALL, 12, torch.float32, CPU)
    runs = [Run() for _ in range(3)]
    contents: list[list[float]] = [[] for _ in runs]
    stamp = 0.0
    for action, which, how, amount in steps:
        run, content = runs[which], contents[which]
        if action == "release":
            pool.release(run)
            content.clear()
        elif action == "write":  # a turn that keeps some of its tokens, and computes others
            kept = int(how * len(content))
            before = list(run.blocks)
            try:
                pool.reserve(run, kept + amount, kept)
            except ContextFull:
                assert list(run.blocks) == before
                continue
            assert pool.is_reserved(run, kept + amount, kept)
            values = [stamp + token for token in range(amount)]
            stamp += amount
            write(pool, run, kept, values)
            contents[which] = content[:kept] + values
        elif action == "adopt" and which != how:
            other = contents[int(how)]
            alike = next(
                (at for at, (a, b) in enumerate(zip(content, other, strict=False)) if a != b),
                min(len(content), len(other)),
            )
            if len(other) - alike < BLOCK_TOKENS:
                continue
            contents[which] = content[:alike]
            try:
                pool.adopt(run, len(other) + amount, runs[int(how)], alike, len(other))
                contents[which] = list(other)
            except ContextFull:
                pass
        held = Counter(block for run in runs for block in run.blocks)
        assert len(held) == 12 - pool.free_blocks
        assert all(pool._holders[block] == count for block, count in held.items())
        for other_run, values in zip(runs, contents, strict=True):
            assert read(pool, other_run, len(values)) == values


def test_what_is_alike_is_there_once() -> None:
    pool = PagedPool(SMALL, 12, torch.float32, CPU)
    first, second = Run(), Run()
    pool.reserve(first, 200)
    write(pool, first, 0, [float(token) for token in range(200)])
    pool.adopt(second, 220, first, 0, 200)
    assert pool.free_blocks == 12 - 4 - 1, "three whole blocks are shared, the tail is a copy"
    assert list(second.blocks[:3]) == list(first.blocks[:3])
    pool.reserve(second, 220, num_kept=70)
    write(pool, second, 70, [-1.0] * 150)
    assert read(pool, first, 200) == [float(token) for token in range(200)]
    assert list(second.blocks[:1]) == list(first.blocks[:1]), "what is in front is still shared"
    pool.release(first)
    assert read(pool, second, 71) == [float(token) for token in range(70)] + [-1.0]
    pool.release(second)
    assert pool.free_blocks == 12


def test_a_full_pool_says_what_is_free() -> None:
    pool = PagedPool(CONFIG, 2, torch.float32, CPU)
    pool.reserve(Run(), BLOCK_TOKENS)
    with pytest.raises(ContextFull, match="64 tokens of KV are free"):
        pool.reserve(Run(), 2 * BLOCK_TOKENS)


@pytest.fixture(params=[False, True], ids=["eager", "graphs"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """One over consecutive blocks, one over blocks that lie anywhere."""
    plain = make_engine()
    made = make_paged(plain.decoder, with_graphs=request.param)
    yield plain, made
    plain.close()
    made.close()


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_answers_are_those_over_consecutive_blocks(
    name: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    prepared = prepare(find_model(str(tiny_checkpoint(name)), tmp_path), "float32", tmp_path)
    config = prepared.config
    decoders = [Decoder(config, load_weights(prepared), fused=fused) for fused in (False, True)]
    plain = Engine(decoders[0], BlockPool(config, 12, torch.float32, CPU))
    other = make_paged(decoders[1], 12, with_graphs=True)
    prompts = [[(3 + 7 * i * n) % config.vocab_size for i in range(n)] for n in (1, 64, 150)]
    expected = [answer(plain, ids, 12) for ids in prompts]
    turns = [Turn(lambda ids=ids: answer(other, ids, 12)) for ids in prompts]  # type: ignore[misc]
    assert [turn.result() for turn in turns] == expected
    assert other.pool.free_blocks == 12
    plain.close()
    other.close()


def test_answers_beside_others(engines: tuple[Engine, Engine]) -> None:
    """Batches of every size up to eight, and of sizes that no graph has."""
    plain, other = engines
    lengths = [1, 2, 63, 64, 65, 130, 200, 300]
    expected = [answer(plain, some_ids(n, n), 10 + n % 7) for n in lengths]
    turns = [
        Turn(lambda n=n: answer(other, some_ids(n, n), 10 + n % 7))  # type: ignore[misc]
        for n in lengths
    ]
    assert [turn.result() for turn in turns] == expected
    if isinstance(other.runner, PagedRunner) and other.runner._graphs:
        assert max(other.runner._graphs) == 8 and set(other.runner._graphs) <= set(GRAPH_SIZES)


def test_forks_share_what_they_begin_with(engines: tuple[Engine, Engine]) -> None:
    plain, other = engines
    ids = some_ids(300, 1)
    expected = [answer(plain, [*ids, seed], 80) for seed in (1, 2)]
    assert answer(other, [*ids, 1], 80, name="first") == expected[0]
    sequence = other.memory.sequence("second")
    with other.memory.use(sequence):
        assert other.memory.share(sequence, [*ids, 2]) == 300
        assert answer(other, [*ids, 2], 80, name="second") == expected[1]
    used = other.pool.num_blocks - other.pool.free_blocks
    assert used == 2 * (380 // BLOCK_TOKENS + 1) - 300 // BLOCK_TOKENS
    assert other.memory.num_idle_tokens == used * BLOCK_TOKENS
    assert answer(other, [*ids[:100], 3], 20, name="first") == answer(plain, [*ids[:100], 3], 20)
    assert answer(other, [*ids, 2], 80, name="second") == expected[1], "it was not written over"


def test_threads_that_share_never_write_into_each_others_kv() -> None:
    """Each token's KV is its id. Turns keep some of theirs, take over more from others, write the
    rest, and look at all of it; room is short, so idle ones are given up all the time."""
    memory = Memory(PagedPool(SMALL, 24, torch.float32, CPU), 10 * BLOCK_TOKENS)
    one_turn = [threading.Lock() for _ in range(5)]
    wrong: list[str] = []
    num_shared = 0

    def turns(seed: int) -> None:
        nonlocal num_shared
        for index in range(60):
            number = (seed + index) % 5
            sequence = memory.sequence(str(number))
            with one_turn[number], memory.use(sequence):
                length = 1 + (index * 37 + seed * 11) % (4 * BLOCK_TOKENS)
                ids = [*range(length), 10_000 + 100 * seed + index]
                num_shared += memory.share(sequence, ids)
                kept = min(sequence.common_prefix(ids), len(ids) - 1)
                sequence.become(ids, kept)
                try:
                    memory.pool.reserve(sequence.run, len(ids), kept)
                except ContextFull:
                    continue
                write(memory.pool, sequence.run, kept, [float(token) for token in ids[kept:]])
                sequence.num_cached = len(ids)
                if read(memory.pool, sequence.run, len(ids)) != ids:
                    wrong.append(f"{seed} {index}")

    threads = [Turn(lambda seed=seed: turns(seed)) for seed in range(4)]  # type: ignore[misc]
    for thread in threads:
        thread.result()
    assert not wrong and num_shared > 10 * BLOCK_TOKENS
    for number in range(5):
        memory.forget(str(number))
    assert memory.pool.free_blocks == 24


def test_turns_that_are_in_each_others_way_come_back() -> None:
    plain = make_engine()
    small = make_paged(plain.decoder, num_blocks=5)
    expected = [answer(plain, some_ids(n, n), 120) for n in (70, 71)]
    turns = [Turn(lambda n=n: answer(small, some_ids(n, n), 120)) for n in (70, 71)]  # type: ignore[misc]
    assert [turn.result() for turn in turns] == expected
    assert small.pool.free_blocks == 5
    plain.close()
    small.close()


def test_tokens_are_taken_out_as_of_consecutive_blocks() -> None:
    pools: list[Pool] = [kind(CONFIG, 8, torch.float32, CPU) for kind in (BlockPool, PagedPool)]
    sequences = []
    for pool in pools:
        sequence = TokenSequence(list(range(200)), num_cached=190)
        pool.reserve(sequence.run, 200)
        write(pool, sequence.run, 0, [float(token) for token in range(200)])
        sequences.append(sequence)
    fork = Run()
    pools[1].adopt(fork, 190, sequences[1].run, 0, 190)
    for pool, sequence in zip(pools, sequences, strict=True):
        take_out(pool, sequence, 5, 150)
    moved = []
    for pool, sequence in zip(pools, sequences, strict=True):
        slots, blocks = pool.slot_index(sequence.run, 0, 45), pool.blocks
        moved.append(blocks[slots // blocks.shape[4], :, :, :, slots % blocks.shape[4]])
    assert torch.equal(*moved)
    assert read(pools[1], fork, 190) == [float(token) for token in range(190)]


def test_a_decoder_over_the_kernels_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: what a GPU computes, but for its rounding."""
    pytest.importorskip("triton")
    plain = make_engine()
    other = make_paged(Decoder(CONFIG, make_weights(), fused=True), 4, with_graphs=True)
    ids = some_ids(12, 3)
    expected = answer(plain, ids, 3)
    called: set[str] = set()

    def kernel(self: has_kernel[..., Any], *arguments: Any, **options: Any) -> Any:
        called.add(self.reference.__name__)
        return self.kernel(*arguments, **options)

    monkeypatch.setattr(has_kernel, "__call__", kernel)
    assert answer(other, ids, 3) == expected
    attention = {"rope_write", "paged_decode", "paged_prefill"}
    assert called == attention | {"rms_norm", "add_rms_norm", "silu_mul"}
    plain.close()
    other.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_device_computes_what_a_cpu_does(device: str) -> None:
    """Logits of prefill, of recorded steps and of the same steps without a recording, in 16 bits;
    beside those of a CPU in float32."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device and -m gpu")
    config = replace(CONFIG, hidden_size=128, intermediate_size=256, head_dim=64)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if shape[1:] else 1.0)
        for name, shape in sorted(expected_shapes(config).items())
    }
    halves = {name: weight.to(torch.float16) for name, weight in weights.items()}
    exact = Decoder(config, {name: weight.float() for name, weight in halves.items()})
    there, _ = engine_on(torch.device(device), config, halves, 1 << 32, 4096, 1 << 20)
    plain = Engine(exact, BlockPool(config, 64, torch.float32, CPU))
    recorded, pool = there.runner, there.pool
    assert isinstance(recorded, PagedRunner) and isinstance(pool, PagedPool)
    if device == "cpu":
        recorded._record = repeat
    sequences = [TokenSequence(some_ids(length, length)) for length in (70, 3, 130)]
    twins = [TokenSequence(list(sequence.ids)) for sequence in sequences]
    steps = [sequence.ids.pop() for sequence in sequences]
    for sequence, twin in zip(sequences, twins, strict=True):
        pool.reserve(sequence.run, 200)
        plain.pool.reserve(twin.run, 200)
        end = len(sequence.ids)
        actual = recorded.forward([Piece(sequence, 0, end)])[0]
        expected = plain.runner.forward([Piece(twin, 0, end)])[0]
        assert (actual - expected).abs().max() < 0.02 * expected.abs().max()
    pieces = [Piece(one, len(one.ids), len(one.ids) + 1, is_decode=True) for one in sequences]
    for sequence, token in zip(sequences, steps, strict=True):
        sequence.ids.append(token)
    replayed = [recorded.forward(pieces) for _ in range(2)]
    assert max(recorded._graphs) == 4, "three sequences take the graph for four"
    launched = PagedRunner(there.decoder, pool, None).forward(pieces)
    for row, (twin, piece) in enumerate(zip(twins, pieces, strict=True)):
        expected = plain.runner.forward([Piece(twin, piece.start, piece.stop)])[0]
        bound = 0.02 * expected.abs().max()
        assert torch.equal(replayed[0][row], replayed[1][row])
        assert (replayed[0][row] - expected).abs().max() < bound
        assert (launched[row] - expected).abs().max() < bound
    there.close()
    plain.close()


def test_a_pass_that_decodes_reads_nothing_from_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it could not be recorded. On `meta` there is nothing to read, and trying to is an
    error; the launches of kernels are held to the same by being compiled from such tensors."""
    results = {
        "rms_norm": lambda x, *_: x,
        "add_rms_norm": lambda x, residual, *_: (x, residual),
        "silu_mul": lambda gate_up: gate_up.chunk(2, -1)[0],
        "rope_write": lambda heads, *_: heads[:, : CONFIG.num_heads],
        "paged_decode": lambda query, *_: query,
    }
    monkeypatch.setattr(
        has_kernel, "__call__", lambda self, *given: results[self.reference.__name__](*given)
    )
    weights = {name: weight.to("meta") for name, weight in make_weights().items()}
    decoder = Decoder(CONFIG, weights, device="meta")
    pool = PagedPool(CONFIG, 4, torch.float32, torch.device("meta"))
    rows = torch.empty(4, 2, dtype=torch.int32, device="meta")
    table = torch.empty(2, 4, dtype=torch.int32, device="meta")
    batch = PagedBatch(pool.blocks, rows[1], rows[2].long(), table, rows[3])
    assert decoder.forward(rows[0], batch).shape == (2, CONFIG.vocab_size)
