"""A model with random weights on a device, its engine, and a stopwatch: what `bench_gpu` measures.

Everything runs on a CPU too, for tests; what it then measures means nothing.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from chatkv.engine.on_device import engine_on
from chatkv.engine.paged import PagedPool
from chatkv.engine.piece import Piece
from chatkv.engine.runner import PagedRunner
from chatkv.engine.sequence import TokenSequence
from chatkv.model.config import ModelConfig
from chatkv.model.weights import expected_shapes
from chatkv.restore.cost import CostFile
from chatkv.restore.restorer import Restorer
from chatkv.restore.saver import DiskTier
from chatkv.restore.staging import DEVICE_BYTES, Staged, reach
from chatkv_store import BlockStore, KVLayout
from chatkv_store.writer import BlockWriter

LLAMA_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 5e5, 131072)
SMOLLM2 = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, 1e5, 8192, tie_embeddings=True)
NAMESPACE = b"bench".ljust(32, b"\0")


class RandomWeights(Mapping[str, Tensor]):
    """Drawn as they are asked for, so that no second copy of a model lies anywhere."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = expected_shapes(config), dtype, device

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        empty = torch.empty(shape, dtype=self._dtype, device=self._device)
        return empty.fill_(1) if len(shape) == 1 else empty.normal_(0, shape[1] ** -0.5)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class Rig:
    """An engine of this config, with a pool of num_tokens tokens full of random KV."""

    def __init__(
        self,
        config: ModelConfig,
        num_tokens: int,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self._folder = tempfile.TemporaryDirectory()
        self.scratch = Path(self._folder.name) / "scratch"
        self.is_gpu = device.type == "cuda"
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        free_bytes = torch.cuda.mem_get_info(device)[0] if self.is_gpu else 1 << 40
        weights = RandomWeights(config, dtype, device)
        self.engine, self.ledger = engine_on(
            device, config, weights, free_bytes, num_tokens, DEVICE_BYTES
        )
        assert isinstance(self.engine.pool, PagedPool)
        assert isinstance(self.engine.runner, PagedRunner)
        self.pool, self.runner = self.engine.pool, self.engine.runner
        for block in self.pool.kv:
            block.normal_()
        name = str(dtype).removeprefix("torch.")
        self.layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, name)  # type: ignore[arg-type]
        kv = reach(self.pool, self.layout)
        assert isinstance(kv, Staged)
        self.kv = kv

    def close(self) -> None:
        self.engine.close()
        self._folder.cleanup()
        self.pool.kv = torch.empty(0)
        del self.runner, self.engine, self.kv
        if self.is_gpu:
            torch.cuda.empty_cache()

    def sync(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repeats: int = 5) -> float:
        """The median of `repeats` runs, after one that is not counted."""
        work()
        times = []
        for _ in range(repeats):
            self.sync()
            began = time.perf_counter()
            work()
            self.sync()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def host(self, num_bytes: int, is_pinned: bool = True) -> Tensor:
        """Bytes of host memory that have been written to."""
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned and self.is_gpu)
        return memory.fill_(1)

    def ids(self, count: int) -> list[int]:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(0, self.config.vocab_size, (count,), generator=generator).tolist()

    @contextmanager
    def sequence(self, num_tokens: int) -> Iterator[TokenSequence]:
        """One that has its KV: what the pool holds of its own."""
        sequence = TokenSequence(self.ids(num_tokens))
        self.pool.reserve(sequence.run, num_tokens)
        sequence.num_cached = num_tokens
        try:
            yield sequence
        finally:
            self.pool.release(sequence.run)

    def step(self, *sequences: TokenSequence) -> None:
        """The last token of each, computed once more."""
        ends = [len(sequence.ids) for sequence in sequences]
        self.runner.forward(
            [
                Piece(sequence, end - 1, end, is_decode=True)
                for sequence, end in zip(sequences, ends, strict=True)
            ]
        )

    @contextmanager
    def stored(
        self, num_tokens: int, codec: str = "lossless"
    ) -> Iterator[tuple[Restorer, list[int]]]:
        """A store with the KV of num_tokens tokens, computed for it, and what restores them."""
        ids = self.ids(num_tokens)
        with (
            tempfile.TemporaryDirectory() as folder,
            BlockStore(Path(folder) / "kv") as store,
            BlockWriter(store) as writer,
        ):
            disk = DiskTier(store, writer, NAMESPACE, codec)
            costs = CostFile(Path(folder) / "costs.json")
            restorer = Restorer(self.engine, self.layout, disk, costs, "bench")
            sequence = TokenSequence(ids)
            self.engine.prefill(sequence)
            while not self._is_stored(store, sequence):
                restorer.save(sequence, tail=True)  # what the queue had no room for
                writer.flush()
            self.pool.release(sequence.run)
            yield restorer, ids

    def _is_stored(self, store: BlockStore, sequence: TokenSequence) -> bool:
        return store.match(NAMESPACE, sequence.ids, self.layout).num_tokens == len(sequence.ids)
