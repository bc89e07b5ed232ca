"""What `bench_gpu` measures on a device: each section gives values and baselines of its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_rig import Rig
from torch import Tensor

from chatkv.engine.options import SamplingOptions
from chatkv.engine.piece import Piece
from chatkv.engine.runner import GRAPH_SIZES
from chatkv.engine.sampling import Sampler
from chatkv.engine.sequence import TokenSequence
from chatkv_kernels.linear import linear
from chatkv_kernels.linear_quantised import (
    linear_fp8,
    linear_int4,
    linear_int8,
    quantise_weight_fp8,
    quantise_weight_int4,
    quantise_weight_int8,
)
from chatkv_store.codec import by_name

# name → (value, baseline); a figure that is not there could not be measured.
Found = dict[str, tuple[float, float | None]]
Answer = Iterator[tuple[TokenSequence, int]]

STORED_CODECS = ("lossless", "packed", "int4")
DEVICE_CODECS = ("packed", "int8", "fp8", "int4")


@dataclass(frozen=True)
class Sizes:
    """Tokens of history, and bytes of plain copies."""

    decode: tuple[int, ...] = (512, 8192, 32768)
    prefill: tuple[int, ...] = (2048, 8192, 32768)
    restored: int = 8192
    stored: int = 4096
    saved: int = 128  # tokens decoded while their blocks are saved
    copied: int = 1 << 30
    prompt: int = 32

    @property
    def pool(self) -> int:
        """Tokens that the pool has to hold."""
        return 2 * max(*self.decode, *self.prefill, self.restored, self.stored) + 64 * 64


def copies(rig: Rig, sizes: Sizes) -> Found:
    """The roofs: plain copies within the device, and from the host's memory to it."""
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=rig.device).fill_(1)
    target = torch.empty_like(source)
    within_s = rig.seconds(lambda: target.copy_(source))
    pinned, pageable = rig.host(sizes.copied), rig.host(sizes.copied // 4, is_pinned=False)
    pinned_s = rig.seconds(lambda: target.copy_(pinned, non_blocking=True))
    pageable_s = rig.seconds(lambda: target[: pageable.numel()].copy_(pageable))
    pageable_rate = pageable.numel() / pageable_s / 1e9
    return {
        "HBM copy": (2 * sizes.copied / within_s / 1e9, None),
        "pinned host to device": (sizes.copied / pinned_s / 1e9, pageable_rate),
    }


def decode(rig: Rig, sizes: Sizes, copy_rate: float) -> Found:
    """Whole steps, the logits' way to the host included, as bytes read a second."""
    found: Found = {}
    config = rig.config
    embedding = config.vocab_size * config.hidden_size * rig.dtype.itemsize
    weights = rig.ledger.weights - (0 if config.tie_embeddings else embedding)
    for num_tokens in sizes.decode:
        with rig.sequence(num_tokens) as sequence:
            step_s = rig.seconds(lambda one=sequence: rig.step(one), 20)  # type: ignore[misc]
        num_bytes = weights + num_tokens * rig.layout.bytes_per_token
        found[f"decode at {num_tokens}"] = num_bytes / step_s / 1e9, copy_rate
    return found


class _Contiguous:
    """One sequence in memory of its own (a `Span`), for the library's attention."""

    draft = place = None

    def __init__(self, rig: Rig, length: int) -> None:
        layout = rig.layout
        shape = (layout.num_layers, 2, layout.num_kv_heads, length, layout.head_dim)
        self.kv = torch.empty(shape, dtype=rig.dtype, device=rig.device)
        self.start, self.length = 0, length

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.kv[layer, 0].copy_(keys.transpose(0, 1))
        self.kv[layer, 1].copy_(values.transpose(0, 1))
        return self.kv[layer, 0], self.kv[layer, 1]


def prefill(rig: Rig, sizes: Sizes) -> Found:
    """One pass over a whole prompt: paged, and with the library's attention over plain memory."""
    found: Found = {}
    for num_tokens in sizes.prefill:
        with rig.sequence(num_tokens) as sequence:
            piece = Piece(sequence, 0, num_tokens)
            paged_s = rig.seconds(lambda one=piece: rig.runner.forward([one]), 3)  # type: ignore[misc]
        span = _Contiguous(rig, num_tokens)
        ids = torch.tensor(rig.ids(num_tokens), device=rig.device)
        plain_s = rig.seconds(
            lambda ids=ids, span=span: rig.engine.decoder.forward(ids, [span]),  # type: ignore[misc]
            3,
        )
        found[f"prefill of {num_tokens}"] = num_tokens / paged_s, num_tokens / plain_s
        del span
    return found


def answered(rig: Rig, ids: list[int], num_new: int, seed: int, temperature: float) -> Answer:
    """What decodes an answer behind these ids, whose KV is whatever the pool holds."""
    with rig.sequence(len(ids)) as sequence:
        sequence.ids = list(ids)
        # To random weights all tokens are about as likely; to a model hardly more than these.
        sampler = Sampler(SamplingOptions(temperature, top_k=40), seed)
        logits = torch.randn(rig.config.vocab_size, generator=torch.Generator().manual_seed(seed))
        steps = rig.engine.decode(sequence, logits, sampler, frozenset(), num_new)
        yield from ((sequence, token) for token, _ in steps)


def answers(rig: Rig, sizes: Sizes) -> Found:
    """Whole answers, tokens drawn and read, beside the steps alone."""
    num_tokens, num_new = sizes.decode[0], sizes.saved
    with rig.sequence(num_tokens + num_new // 2) as sequence:
        step_s = rig.seconds(lambda: rig.step(sequence), 20)
    ids = rig.ids(num_tokens)
    found: Found = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 0.7)):
        seconds = rig.seconds(lambda t=temperature: list(answered(rig, ids, num_new, 1, t)), 3)  # type: ignore[misc]
        found[f"answer, {name}"] = seconds / num_new * 1e3, step_s * 1e3
    return found


def codec(rig: Rig, sizes: Sizes) -> Found:
    """Encoding and decoding on the device, bytes of KV a second."""
    if rig.dtype == torch.float32:
        return {}
    found: Found = {}
    values = rig.pool.kv[: min(64, rig.pool.num_blocks)]
    table = torch.arange(len(values), dtype=torch.int32, device=rig.device)
    num_bytes = values.nbytes
    codecs = rig.kv.way.codecs
    for name in DEVICE_CODECS:
        number = by_name(name).id
        payloads, ends = codecs.pack(name, values, 0)
        starts, stop = ends[:-1], rig.layout.block_tokens
        pack_s = rig.seconds(partial(codecs.pack, name, values, 0))
        encoded = (number, payloads, starts)
        unpack_s = rig.seconds(partial(codecs.unpack, *encoded, rig.pool.kv, table, stop))
        found[f"packing, {name}"] = num_bytes / pack_s / 1e9, None
        found[f"unpacking, {name}"] = num_bytes / unpack_s / 1e9, None
    return found


def linears(rig: Rig, sizes: Sizes) -> Found:
    """One row through the model's matrices: by the kernels, and by the library. All rates count
    weights as 16 bits, so that they tell how much sooner quantised ones are done."""
    layer = rig.engine.decoder.layers[0]
    matrices: list[Any] = [layer.qkv, layer.output, layer.gate_up, layer.down]
    weights = [
        matrix.weight.to_dense() if matrix.weight.is_mkldnn else matrix.weight
        for matrix in matrices
    ]
    rows = [torch.randn(1, weight.shape[1], device=rig.device).to(rig.dtype) for weight in weights]

    def rate(function: Callable[[Tensor, Any], Tensor], quantise: Callable[[Tensor], Any]) -> float:
        made = [quantise(weight) for weight in weights]

        def work() -> None:
            for row, weight in zip(rows, made, strict=True):
                function(row, weight)

        return sum(weight.nbytes for weight in weights) / rig.seconds(work, 20) / 1e9

    library = rate(F.linear, lambda weight: weight)
    return {
        "linears of one row": (rate(linear, lambda weight: weight), library),
        "linears of one row, int8": (rate(linear_int8, quantise_weight_int8), library),
        "linears of one row, fp8": (rate(linear_fp8, quantise_weight_fp8), library),
        "linears of one row, int4": (rate(linear_int4, quantise_weight_int4), library),
    }


def memory(rig: Rig, sizes: Sizes) -> Found:
    """How far off the ledger is, once the largest steps have run. A GPU alone can tell."""
    if not rig.is_gpu:
        return {}
    sequences = [TokenSequence(rig.ids(2)) for _ in range(GRAPH_SIZES[-1])]
    prompt = TokenSequence(rig.ids(512))
    for one in (*sequences, prompt):
        rig.pool.reserve(one.run, len(one.ids))
    for size in GRAPH_SIZES:
        rig.step(*sequences[:size])
    decodes = [Piece(one, 1, 2, is_decode=True) for one in sequences]
    rig.runner.forward([*decodes, Piece(prompt, 0, 512)])
    rig.sync()
    for one in (*sequences, prompt):
        rig.pool.release(one.run)
    peak = torch.cuda.max_memory_allocated(rig.device)
    return {"ledger": (abs(rig.ledger.total / peak - 1) * 100, None)}
