"""A worker's KV as the block store takes it.

vLLM hands out one tensor per layer, [blocks, num_kv_heads, block_tokens, C] in shape. How a
(block, head) is laid out inside belongs to the kernels that read it: a CPU keeps all keys, packed
as its instructions want them, and then all values; others keep both of each token together. So
those block_tokens * C numbers are stored as they come, cut into two halves that stand where the
store has keys and values, and whatever the kernels depend on is part of the name (vllm_identity).
It follows that only whole blocks can be stored, and only without loss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from chatkv.errors import ModelError
from chatkv_store.chain import RunResult, StoredBlock
from chatkv_store.errors import BlockMiss
from chatkv_store.layout import DType, KVLayout

if TYPE_CHECKING:
    import numpy.typing as npt

    from chatkv_store.blocks import BlockStore

    Bits = npt.NDArray[np.unsignedinteger[Any]]

_DTYPES: dict[torch.dtype, DType] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


class KVTensors:
    """The KV of one worker, layers in the order in which they compute.

    Raises ModelError where it is of a kind that cannot be stored.
    """

    def __init__(self, caches: Mapping[str, Tensor], names: Sequence[str], block_tokens: int):
        self.layer_of = {name: index for index, name in enumerate(names)}
        self.layers = [caches[name] for name in names]
        first = self.layers[0]
        if any(one.shape != first.shape or one.dtype != first.dtype for one in self.layers):
            raise ModelError("its layers keep KV in different shapes")
        if first.dim() != 4 or first.shape[2] != block_tokens or first.shape[3] % 4:
            raise ModelError(
                f"its KV has the shape {tuple(first.shape)}, not "
                f"(blocks, heads, {block_tokens}, a multiple of 4)"
            )
        if first.dtype not in _DTYPES:
            raise ModelError(f"its KV is of {first.dtype}; it can be kept in 16 and 32 bits only")
        heads, width = first.shape[1], first.shape[3]
        self.layout = KVLayout(
            len(self.layers), heads, width // 2, _DTYPES[first.dtype], block_tokens
        )
        in_memory = first.device.type == "cpu" and all(
            one[0].is_contiguous() for one in self.layers
        )
        # Each layer as [blocks, 2, heads, tokens, head_dim]; and all of them as one array, where
        # they lie in one piece of memory.
        self._views = [_halves(one) for one in self.layers] if in_memory else None
        one_piece = _as_one(self.layers) if in_memory else None
        self._whole = None if one_piece is None else _halves(one_piece)
        self._scratch = threading.local()

    @property
    def is_in_memory(self) -> bool:
        """Whether each block of a layer is one piece of this process' memory."""
        return self._views is not None

    def take(self, block_ids: Sequence[int]) -> list[Callable[[int], Bits]]:
        """The KV of each block as it is now, as a `NewBlock` takes its values.

        On a device it is copied there, in the order of what computes it, and fetched when its
        values are asked for.
        """
        if self._views is not None:
            return [self._values(self._copy(block)) for block in block_ids]
        if not block_ids:
            return []
        wanted = torch.tensor(list(block_ids), device=self.layers[0].device)
        there = torch.stack([one.index_select(0, wanted) for one in self.layers], dim=1)
        return [self._values(fetch) for fetch in _fetchers(there, self.layout)]

    def step(self) -> Step:
        """A step that begins now."""
        return Step(self.layers[0].device)

    def destination(self, block_ids: Sequence[int], first: int) -> Blocks:
        """Where `load_blocks` puts a request's blocks, of which number `first` is block_ids[0]; not
        before what computes now is done with them."""
        return Blocks(self, block_ids, first, _reached(self.layers[0].device))

    def place(self, group: int, block: int) -> tuple[Bits, bool]:
        """Where value `group` of a block is decoded to, and whether that is the block itself; else
        it is this thread's until its next one, for `settle`."""
        layers = self.layout.value_layers(group)
        if self._whole is not None:
            return self._whole[layers.start : layers.stop, block], True
        scratch: Bits | None = getattr(self._scratch, "bits", None)
        if scratch is None:  # new memory each time would cost page faults each time
            shape = self.layout.value_shape(0, self.layout.block_tokens)
            scratch = self._scratch.bits = np.empty(shape, self.layout.bits_dtype)
        return scratch[: len(layers)], False

    def settle(self, group: int, block: int, value: Bits) -> None:
        """Set a block's layers to those of a value."""
        for layer, halves in zip(self.layout.value_layers(group), value, strict=True):
            if self._views is None:
                self._put(layer, block, halves)
            else:
                self._views[layer][block] = halves

    def _put(self, layer: int, block: int, halves: Bits) -> None:
        """Set one layer of a block to [2, heads, tokens, head_dim]."""
        into = self.layers[layer][block]
        bits = torch.from_numpy(halves.swapaxes(0, 1).copy()).view(into.dtype)
        into.copy_(bits.reshape(into.shape))
        if into.is_cuda:
            torch.cuda.current_stream(into.device).synchronize()

    def _copy(self, block: int) -> Callable[[], Bits]:
        assert self._views is not None
        taken = np.stack([one[block] for one in self._views])
        return lambda: taken

    def _values(self, whole: Callable[[], Bits]) -> Callable[[int], Bits]:
        def value(group: int) -> Bits:
            layers = self.layout.value_layers(group)
            return whole()[layers.start : layers.stop]

        return value


class Step:
    """What a step took, on the device that computed it. `computed`: the tokens of a prompt, where
    it was nothing else."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self._ended = self._now()
        self.computed: tuple[int, int] | None = None

    def end(self, computed: tuple[int, int] | None) -> None:
        self._ended, self.computed = self._now(), computed

    @property
    def seconds(self) -> float:
        """Between its beginning and its end; waits for that."""
        if self._device.type != "cuda":
            return float(self._ended - self._began)
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1e3

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


@dataclass(frozen=True)
class Blocks:
    """Blocks of one request as a destination of `load_blocks`."""

    tensors: KVTensors
    block_ids: Sequence[int]
    first: int
    free_after: Any = None  # an event on the device
    run_blocks: int = 1  # they lie anywhere

    def read(
        self, store: BlockStore, blocks: Sequence[StoredBlock], group: int, start: int
    ) -> RunResult:
        (block,) = blocks
        at = self.block_ids[start // self.tensors.layout.block_tokens - self.first]
        value, is_there = self.tensors.place(group, at)
        try:
            num_bytes = store.read(block, group, value)
        except BlockMiss as miss:
            return RunResult(0, 0, miss.reason)
        if self.free_after is not None:
            self.free_after.synchronize()
        if not is_there:
            self.tensors.settle(group, at, value)
        return RunResult(1, num_bytes, None)


def as_bits(tensor: Tensor) -> Bits:
    """View of a tensor in this process' memory as bits."""
    kind = torch.uint32 if tensor.dtype == torch.float32 else torch.uint16
    return tensor.view(kind).numpy()


def _halves(kv: Tensor) -> Bits:
    """View [..., blocks, 2, heads, tokens, C / 2] of [..., blocks, heads, tokens, C] in this
    process' memory: see above."""
    tokens, width = kv.shape[-2:]
    return as_bits(kv.view(*kv.shape[:-2], 2, tokens, width // 2)).swapaxes(-3, -4)


def _as_one(layers: Sequence[Tensor]) -> Tensor | None:
    """View [layers, ...] of tensors that lie at even distances in one piece of memory; None of
    others."""
    first = layers[0]
    memory = {(one.untyped_storage().data_ptr(), one.stride()) for one in layers}
    steps = {after.storage_offset() - one.storage_offset() for one, after in pairwise(layers)}
    if len(memory) > 1 or len(steps) > 1 or min(steps, default=0) < 0:
        return None
    return first.as_strided((len(layers), *first.shape), (max(steps, default=0), *first.stride()))


def _fetchers(there: Tensor, layout: KVLayout) -> list[Callable[[], Bits]]:
    """What brings each block of [blocks, layers, heads, tokens, C] over, once."""
    is_there = _reached(there.device)
    shape = (layout.num_layers, layout.num_kv_heads, 2, layout.block_tokens, layout.head_dim)

    def fetcher(block: Tensor) -> Callable[[], Bits]:
        fetched: list[Bits] = []

        def fetch() -> Bits:
            if not fetched:
                if is_there is not None:
                    is_there.synchronize()
                host = block.cpu().contiguous()
                fetched.append(as_bits(host).reshape(shape).swapaxes(1, 2))
            return fetched[0]

        return fetch

    return [fetcher(block) for block in there]


def _reached(device: torch.device) -> Any:
    """An event behind all that a device has been given to do by this thread; None of a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
