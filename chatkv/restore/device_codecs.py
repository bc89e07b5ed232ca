"""The store's codecs that a device reads and writes itself, to the byte: `packed`, `int8`, `fp8`
and `int4`, for KV of 16 bits. `lossless` is a Huffman code, which is the CPU's to read and write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from chatkv.engine.pool import BLOCK_TOKENS, Pool
from chatkv.model.rope import inverse_frequencies
from chatkv_kernels import quantised
from chatkv_kernels.packed import CODEC_ID as PACKED
from chatkv_kernels.packed import FORMAT_VERSION, pack_packed, unpack_packed
from chatkv_kernels.quantised import HEAD, SINK_TOKENS, Grid, Turn, payload_sizes
from chatkv_store.codec import by_name
from chatkv_store.codec_quantised import rotations
from chatkv_store.payloads import Bytes

Pack = Callable[[Tensor, Tensor, Tensor, Turn], tuple[Tensor, Tensor]]
Unpack = Callable[[Tensor, Tensor, Tensor, Tensor, Turn], None]

QUANTISED: dict[int, tuple[Grid, Pack, Unpack]] = {
    grid.codec_id: (grid, pack, unpack)
    for grid, pack, unpack in (
        (quantised.INT8, quantised.pack_int8, quantised.unpack_int8),
        (quantised.FP8, quantised.pack_fp8, quantised.unpack_fp8),
        (quantised.INT4, quantised.pack_int4, quantised.unpack_int4),
    )
}


class DeviceCodecs:
    """Those of pools like this one. Tensors lie on its device; several threads may ask."""

    def __init__(self, pool: Pool) -> None:
        config, self._device = pool.config, pool.device
        self._frequencies = inverse_frequencies(config)[0].numpy().astype("<f4")
        self._shape = (2, config.num_kv_heads, BLOCK_TOKENS, config.head_dim)
        self._dtype = {torch.bfloat16: 0, torch.float16: 1}.get(pool.dtype)
        fits = self._dtype is not None and config.head_dim % 8 == 0
        self._known = {PACKED, *QUANTISED} if fits else set()
        # The last one is in use; what is on its way may still read those before it.
        self._turns: list[Turn] = []
        self._lock = threading.Lock()

    def knows(self, codec: int | str) -> bool:
        """Whether full blocks of a codec, by its number or name, are the device's to code."""
        return (codec if isinstance(codec, int) else by_name(codec).id) in self._known

    def pack(self, codec: str, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """The payloads of values [n, layers, 2, num_kv_heads, tokens, head_dim] of one block that
        begins at position `start`, one behind the other, and where each begins, [n + 1]."""
        number = by_name(codec).id
        table = torch.arange(len(values), dtype=torch.int32, device=values.device)
        if number == PACKED:
            return pack_packed(values, table)
        starts, turn = torch.full_like(table, start), self._turn(start + BLOCK_TOKENS)
        return QUANTISED[number][1](values, table, starts, turn)

    def unpack(
        self, codec: int, payloads: Tensor, offsets: Tensor, into: Tensor, table: Tensor, stop: int
    ) -> None:
        """Put payloads, bytes that begin at `offsets`, into blocks of `into`, a view of some layers
        of the pool. stop: no position is as far as that."""
        if codec == PACKED:
            unpack_packed(payloads, offsets, into, table)
        else:
            QUANTISED[codec][2](payloads, offsets, into, table, self._turn(stop))

    def are_sound(
        self, codec: int, payloads: Sequence[Bytes], num_layers: int, starts: Sequence[int]
    ) -> bool:
        """Whether quantised payloads are what full blocks of so many layers, from these positions
        on, must have: a kernel goes where their heads say. With `packed` ones it never leaves the
        payload."""
        return codec == PACKED or all(
            any(
                payload.size == size and payload[: len(head)].tobytes() == head
                for head, size in fit
            )
            for payload, start in zip(payloads, starts, strict=True)
            for fit in [self._fitting(codec, num_layers, start)]
        )

    def _fitting(self, codec: int, num_layers: int, start: int) -> list[tuple[bytes, int]]:
        """How a payload may begin, and how long it is then: quantised, or whole altogether."""
        found = []
        for num_whole in (max(0, SINK_TOKENS - start), BLOCK_TOKENS):
            counts = (num_whole, BLOCK_TOKENS - num_whole, len(self._frequencies), 0)
            head = HEAD.pack(FORMAT_VERSION, codec, 2, self._dtype, start, *counts)
            size = _size(num_whole, (num_layers, *self._shape), QUANTISED[codec][0])
            found.append((head + self._frequencies.tobytes(), size))
        return found

    def _turn(self, stop: int) -> Turn:
        """The rotations of the positions below `stop`, as the store computes them."""
        with self._lock:
            if not self._turns or len(self._turns[-1].cos) < stop:
                tables = rotations(0, 1 << max(stop - 1, 4095).bit_length(), self._frequencies)
                arrays = (self._frequencies, *tables)
                self._turns.append(Turn(*(torch.from_numpy(a).to(self._device) for a in arrays)))
                if self._device.type == "cuda":  # others may need it on another stream
                    torch.cuda.current_stream(self._device).synchronize()
            return self._turns[-1]


@lru_cache
def _size(num_whole: int, shape: tuple[int, ...], grid: Grid) -> int:
    return int(payload_sizes(torch.tensor(num_whole), torch.Size(shape), True, grid))
