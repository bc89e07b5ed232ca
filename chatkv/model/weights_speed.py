"""How fast a model's matrices are with weights of fewer bits, beside full ones, on this CPU.

Measured on random matrices of its shapes, one of each: nothing of the model is loaded for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from chatkv.model.config import ModelConfig
from chatkv.model.few_rows import MeasuredRows
from chatkv.model.linear import Linear
from chatkv.model.prepared import Dtype
from chatkv.model.quantise import Layout, QuantisedWeight
from chatkv.model.quantised_linear import QuantisedLinear
from chatkv.model.timing import compare
from chatkv.model.weights import TORCH_DTYPES, expected_shapes
from chatkv_kernels.linear_quantised import Weight4, Weight8

Progress = Callable[[str, int, int], None]

# Rows of a chunk of prefill that is long enough to be bound by arithmetic.
_CHUNK = 128
_CHUNK_ROUNDS = 4
_JOINED = (
    ("self_attn.q", "self_attn.k", "self_attn.v"),
    ("self_attn.o",),
    ("mlp.gate", "mlp.up"),
    ("mlp.down",),
)


@dataclass(frozen=True)
class Speed:
    """Seconds per token of all matrices but the head's."""

    decode_s: float
    prefill_s: float


@dataclass(frozen=True)
class Speeds:
    """Of full weights, and of those of fewer bits; is_steady: whether they would be found again."""

    full: Speed
    few: Speed
    is_steady: bool

    @property
    def decode_ratio(self) -> float:
        """How many times as fast those of fewer bits are."""
        return self.full.decode_s / self.few.decode_s

    @property
    def prefill_ratio(self) -> float:
        return self.full.prefill_s / self.few.prefill_s


def matrices(
    config: ModelConfig, own: Mapping[str, Layout]
) -> Counter[tuple[int, int, Layout | None]]:
    """Outputs, inputs and layout of the matrices that a decoder multiplies with, and how many it
    has of each: those that read one input are one."""
    shapes, found = expected_shapes(config), Counter[tuple[int, int, Layout | None]]()
    for layer in range(config.num_layers):
        for parts in _JOINED:
            names = [f"model.layers.{layer}.{part}_proj.weight" for part in parts]
            stored = {own.get(name) for name in names}
            for layout in stored:
                outputs = sum(shapes[name][0] for name in names if own.get(name) == layout)
                found[outputs, shapes[names[0]][1], layout] += 1
    return found


@torch.inference_mode()
def measure(
    config: ModelConfig,
    own: Mapping[str, Layout],
    dtype: Dtype,
    cache: Path,
    on_progress: Progress | None = None,
) -> Speeds:
    """Of a model whose projections may be stored as `own` says, by name; the others are full. Takes
    a few seconds; `cache` is the folder of the notes."""
    few_rows = MeasuredRows(cache, TORCH_DTYPES[dtype])
    shapes = matrices(config, own)
    sums = [[0.0, 0.0], [0.0, 0.0]]
    is_steady = True
    for done, ((num_out, num_in, layout), count) in enumerate(shapes.items()):
        if on_progress is not None:
            on_progress("measuring this machine", done, len(shapes))
        full = Linear(torch.empty(num_out, num_in).uniform_(-1, 1).to(TORCH_DTYPES[dtype]))
        few: Callable[[Tensor], Tensor] = full
        if layout is not None:
            weight = _weight(num_out, num_in, layout)
            few = QuantisedLinear(weight, None, TORCH_DTYPES[dtype], few_rows)
        for place, (rows, rounds) in enumerate(((1, None), (_CHUNK, _CHUNK_ROUNDS))):
            x = torch.randn(rows, num_in).to(TORCH_DTYPES[dtype])
            ways = [lambda: full(x), lambda: few(x)]  # noqa: B023
            compared = compare(ways) if rounds is None else compare(ways, rounds)
            is_steady = is_steady and compared.is_steady
            for way, seconds in zip(sums, compared.seconds, strict=True):
                way[place] += count * seconds / rows
    return Speeds(Speed(*sums[0]), Speed(*sums[1]), is_steady)


def _weight(num_out: int, num_in: int, layout: Layout) -> QuantisedWeight:
    """One whose numbers mean nothing; what orders inputs costs next to nothing."""
    parts = {}
    for name, (shape, dtype) in (
        replace(layout, is_reordered=False).parts((num_out, num_in)).items()
    ):
        if dtype.is_floating_point:
            parts[name] = torch.ones(shape, dtype=dtype)
        else:
            parts[name] = torch.randint(-100, 100, shape, dtype=dtype)
    if layout.kind == "int4":
        zeros = parts.get("zeros")
        return Weight4(parts["codes"], parts["scales"], zeros, num_in, layout.group_size)
    return Weight8(parts["codes"], parts["scales"], layout.group_size)
