"""Weights from safetensors files: mapped, checked, and one line for each way to be broken."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from chatkv.errors import ModelError
from chatkv.model.catalog import find_model
from chatkv.model.prepared import PreparedModel, prepare
from chatkv.model.tensor_file import TensorSource, write_safetensors
from chatkv.model.weights import expected_shapes, load_weights

Checkpoint = Callable[..., Path]


def _prepare(folder: Path, dtype: Any = "float32") -> PreparedModel:
    return prepare(find_model(str(folder), folder), dtype, folder / "models")


@pytest.fixture
def checkpoint(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("llama2"), tmp_path / "checkpoint"))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture(name: str, sharded: bool, tiny_checkpoint: Checkpoint) -> None:
    """The tensors that the config asks for are those that transformers saved."""
    folder = tiny_checkpoint(name, sharded=sharded)
    original: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        original |= load_file(file)
    loaded = load_weights(_prepare(folder))
    assert loaded.keys() == original.keys()
    for tensor_name, tensor in loaded.items():
        assert torch.equal(tensor, original[tensor_name]), tensor_name


def test_tensors_are_mapped_and_not_read(smollm2: PreparedModel) -> None:
    """Of SmolLM2's 540 MB next to nothing is resident until it is used."""
    weights = load_weights(smollm2)
    maps = Path("/proc/self/smaps").read_text().split(str(smollm2.weights[0]) + "\n")[1:]
    assert maps
    resident_kb = sum(int(part.split("Rss:")[1].split()[0]) for part in maps)
    total_kb = sum(tensor.nbytes for tensor in weights.values()) // 1024
    assert total_kb > 500_000 and resident_kb < total_kb // 10
    assert all(tensor.data_ptr() % 64 == 0 for tensor in weights.values())


def test_the_writers_files_are_the_librarys(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "empty": torch.zeros(0, 4),
        "b": torch.randn(7, generator=torch.Generator().manual_seed(0)),
        "transposed": torch.arange(12.0).reshape(3, 4).T,
    }
    sources = [
        TensorSource(name, tuple(tensor.shape), lambda tensor=tensor: tensor)  # type: ignore[misc]
        for name, tensor in tensors.items()
    ]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        steps: list[tuple[int, int]] = []
        path = tmp_path / "model.safetensors"
        write_safetensors(path, sources, dtype, lambda *step, steps=steps: steps.append(step))  # type: ignore[misc]
        loaded = load_file(path)
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name], tensors[name].to(dtype)) for name in tensors)
        assert steps[-1][0] == steps[-1][1] == 25 * dtype.itemsize


# -- broken files ----------------------------------------------------------------------------------


def _fails(folder: Path, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_weights(_prepare(folder))
    line = str(caught.value)
    assert message in line and str(folder) in line and "\n" not in line


def _header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        _header(b""),
        _header(b"{", 1 << 60),
        _header(b"no json at all"),
        _header(b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'),
        _header(b'{"a": {"dtype": "F33", "shape": [4], "data_offsets": [0, 16]}}') + bytes(16),
        _header(b'{"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}') + bytes(16),
        _header(b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}') + bytes(16),
        _header(b"\xff\xfe" * 20),
    ],
)
def test_a_corrupt_header(content: bytes, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)
    _fails(checkpoint, "model.safetensors is no sound safetensors file")


def test_a_cut_file(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    _fails(checkpoint, "is no sound safetensors file")


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"lacks the tensor {NORM}"),
        (
            lambda t: [t.pop(NORM), t.pop("lm_head.weight")],
            f"lacks the tensor {NORM} and 1 more",
        ),
        (lambda t: t.update({NORM: torch.ones(63)}), f"{NORM} has shape [63], expected [64]"),
        (
            lambda t: t.update({NORM: torch.ones(64, dtype=torch.int8)}),
            f"{NORM} is stored as int8",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.gate_proj.weight_scale": torch.ones(1)}),
            "weight_scale is no tensor of a llama model",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            "q_proj.bias is no tensor of a llama model",
        ),
    ],
    ids=["missing", "two missing", "shape", "dtype", "unknown", "bias"],
)
def test_wrong_tensors_are_named(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, checkpoint: Path
) -> None:
    _rewrite(checkpoint, change)
    _fails(checkpoint, message)


def test_a_tensor_missing_from_its_shard(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint("llama2", sharded=True), tmp_path / "model"))
    shard = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][NORM]
    tensors = load_file(folder / shard)
    del tensors[NORM]
    save_file(tensors, folder / shard)
    _fails(folder, f"lacks the tensor {NORM}")


def test_what_nothing_computes_with_may_lie_in_the_file(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint("smollm"), tmp_path / "model"))
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    _rewrite(folder, lambda t: t.update(extra | {"lm_head.weight": torch.ones(384, 72)}))
    model = _prepare(folder)
    assert load_weights(model).keys() == expected_shapes(model.config).keys()
