"""What the ledger says beforehand, against what tensors then take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from chatkv.engine.device_draws import ROWS, draw_rows
from chatkv.engine.ledger import (
    activation_bytes,
    dense_bytes,
    drawing_bytes,
    fit,
    ledger,
    saved_bytes,
    weight_bytes,
)
from chatkv.engine.on_device import engine_on
from chatkv.engine.paged import PagedPool
from chatkv.errors import ModelError
from chatkv.model.batch import PagedBatch
from chatkv.model.catalog import find_model
from chatkv.model.config import ModelConfig
from chatkv.model.decoder import Decoder
from chatkv.model.prepared import prepare
from chatkv.model.quantise import is_quantised, join, quantise
from chatkv.model.quantised_linear import dequantised
from chatkv.model.weights import expected_shapes, load_weights
from chatkv_kernels.dispatch import has_kernel
from small_engine import CONFIG, answer, make_engine, make_weights, some_ids

LLAMA_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 5e5, 131072)
GIB = 1 << 30
CPU = torch.device("cpu")


def tensors_of(thing: Any) -> Iterator[torch.Tensor]:
    """Every tensor that an object holds, through attributes, lists and tuples."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for item in thing:
            yield from tensors_of(item)
    elif hasattr(thing, "__dict__"):
        yield from tensors_of(list(vars(thing).values()))


@pytest.fixture(autouse=True)
def _plain_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what a CPU packs for itself has no address."""
    monkeypatch.setattr("chatkv.model.linear.packs_on_cpu", lambda dtype: False)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_weights(name: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    prepared = prepare(find_model(str(tiny_checkpoint(name)), tmp_path), "float32", tmp_path)
    decoder = Decoder(prepared.config, load_weights(prepared), fused=True)
    held = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors_of(decoder)}
    assert sum(held.values()) == weight_bytes(prepared.config, 4)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_quantised_weights(kind: Any) -> None:
    """What they save, what making one dense takes, and an engine of them."""
    config = replace(CONFIG, hidden_size=128, intermediate_size=128)
    weights: dict[str, Any] = {
        name: torch.randn(shape) * 0.05 for name, shape in expected_shapes(config).items()
    }
    dense = sum(weight.nbytes for weight in weights.values())
    for name in filter(is_quantised, weights):
        weights[name] = quantise(weights[name], kind)
    held = sum(
        part.nbytes
        for weight in weights.values()
        for part in ([weight] if isinstance(weight, torch.Tensor) else weight)
        if isinstance(part, torch.Tensor)
    )
    saved = saved_bytes(config, weights, 4)
    assert dense - saved == held
    layer = "model.layers.0.mlp."
    largest = join([weights[f"{layer}{part}_proj.weight"] for part in ("gate", "up")])
    with Peak() as peak:
        dequantised(largest, torch.bfloat16)
    assert 0 < peak.num_bytes <= dense_bytes(config)
    engine, said = engine_on(CPU, config, weights, 1 * GIB, 500, 0)
    assert said.weights == weight_bytes(config, 4) - saved
    assert len(answer(engine, some_ids(100, 1), 5)) == 5
    engine.close()


def test_kv_pool() -> None:
    pool = PagedPool(CONFIG, 7, torch.float16, CPU)
    assert ledger(CONFIG, 2, 7, 0).kv_pool == pool.kv.nbytes


class Peak(TorchDispatchMode):
    """The most bytes of new tensors that were alive at a time."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self._alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {at: one for at, one in self._alive.items() if not one[0].expired()}
        self.num_bytes = max(self.num_bytes, sum(size for _, size in self._alive.values()))
        return out


@contextmanager
def only_results(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions with kernels allocate what their kernels do: their results."""
    results: dict[str, Callable[..., Any]] = {
        "rms_norm": lambda x, *_: torch.empty_like(x),
        "add_rms_norm": lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
        "silu_mul": lambda x: x.new_empty(x.shape[0], x.shape[1] // 2),
        "rope_write": lambda x, *given: x.new_empty(
            x.shape[0], x.shape[1] - 2 * given[3].shape[1], x.shape[2]
        ),
        "paged_prefill": lambda x, *_: torch.empty_like(x),
    }
    with monkeypatch.context() as patch:
        patch.setattr(
            has_kernel, "__call__", lambda self, *given: results[self.reference.__name__](*given)
        )
        yield


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, hidden_size=64, intermediate_size=192, num_heads=8, head_dim=16),
        replace(CONFIG, hidden_size=64, intermediate_size=64, vocab_size=4096),
    ],
    ids=["most in the MLP", "most in the head"],
)
def test_activations(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {name: torch.randn(shape) for name, shape in expected_shapes(config).items()}
    decoder = Decoder(config, weights, fused=True)
    pool = PagedPool(config, 16, torch.float32, CPU)
    rows, num_seqs = 512, 8
    ids = torch.zeros(rows, dtype=torch.int64)
    batch = PagedBatch(
        pool.blocks,
        torch.zeros(rows, dtype=torch.int32),
        torch.arange(rows),
        torch.zeros(num_seqs, 2, dtype=torch.int32),
        torch.full((num_seqs,), 64, dtype=torch.int32),
        torch.arange(0, rows + 1, 64, dtype=torch.int32),
        max_new=64,
    )
    known = pool.kv, ids, batch.positions, batch.slots, *tensors_of(decoder)
    with only_results(monkeypatch), Peak(*known) as peak:
        decoder.forward(ids, batch)
    said = activation_bytes(config, 4, rows, num_seqs)
    assert peak.num_bytes <= said <= 1.1 * peak.num_bytes


def test_drawing() -> None:
    """From as many rows as are drawn from at once. (The rest are copies of logits.)"""
    config = replace(CONFIG, vocab_size=4096)
    logits = torch.randn(ROWS, config.vocab_size)
    settings, tokens = torch.full((ROWS, 5), 0.5, dtype=torch.float64), logits.argmax(1)
    with Peak(logits, settings, tokens) as peak:
        draw_rows(logits, settings, tokens)
    said = drawing_bytes(config, 0)
    assert peak.num_bytes <= said <= 1.5 * peak.num_bytes


def test_the_pool_gets_what_is_left() -> None:
    num_blocks, found = fit(LLAMA_8B, 2, 24 * GIB, 10**6, 256 << 20)
    assert 0.93 * 24 * GIB < found.total <= 0.95 * 24 * GIB
    assert found.kv_pool == num_blocks * 64 * 131072  # 128 KiB a token
    assert fit(LLAMA_8B, 2, 80 * GIB, 1000, 0)[0] == 1000
    assert 15 * GIB < found.weights < 15.1 * GIB


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ModelError, match=r"needs 15\.\d GiB .* \(15\.0 GiB of weights\), .* 11\.4"):
        fit(LLAMA_8B, 2, 12 * GIB, 1000, 0)


def test_an_engine_takes_what_the_ledger_says_and_answers() -> None:
    layers: list[tuple[int, int]] = []
    engine, said = engine_on(
        CPU, CONFIG, make_weights(), 1 * GIB, 500, 0, lambda *done: layers.append(done)
    )
    assert layers == [(1, 2), (2, 2)]
    assert engine.pool.num_blocks == 8 and said.kv_pool == engine.pool.blocks.nbytes
    plain = make_engine()
    assert answer(engine, some_ids(100, 1), 10) == answer(plain, some_ids(100, 1), 10)
    plain.close()
    engine.close()
