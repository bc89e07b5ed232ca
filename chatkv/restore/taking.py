"""KV on its way out of a pool, as the block store takes it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatkv.restore.ring import Way, wait
from chatkv_store.layout import KVLayout

Bits = npt.NDArray[np.unsignedinteger[Any]]


class Taken(NamedTuple):
    """KV of some tokens of one block as it was when it was taken, for a `NewBlock`: its values, and
    their payloads where whoever holds them encodes them itself. To be asked by one thread."""

    value: Callable[[int], Bits]
    encoded: Callable[[int], bytes] | None = None


class Copy:
    """A block [num_layers, 2, num_kv_heads, tokens, head_dim] on the device, of which some tokens
    are wanted, until it has been fetched."""

    def __init__(
        self, kv: Tensor, tokens: slice, start: int, codec: str, layout: KVLayout, way: Way
    ) -> None:
        self._kv, self._tokens, self._start, self._codec = kv, tokens, start, codec
        self._layout, self._way = layout, way
        self._bits: Bits | None = None
        self._payloads: list[bytes] = []
        self._is_there = None
        if kv.is_cuda:
            self._is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_there.record(torch.cuda.current_stream(kv.device))

    def value(self, group: int) -> Bits:
        if self._bits is None:
            self._bits = self._fetched()[..., self._tokens, :]
        return of_group(self._bits, self._layout, group)

    def encoded(self, group: int) -> bytes:
        if not self._payloads:
            self._payloads = self._encoded()
        return self._payloads[group]

    def _fetched(self) -> Bits:
        way, kv = self._way, self._kv
        with way.ring.slab() as slab, torch.cuda.stream(way.out):
            self._after_its_step()
            host = slab[: kv.nbytes].view(kv.dtype).view(kv.shape)
            host.copy_(kv, non_blocking=True)
            wait(way.out)
            return as_bits(host).copy()

    def _encoded(self) -> list[bytes]:
        """All values, in their order: those of as many layers each in one go, then the last one
        where it has fewer."""
        way, per_value = self._way, self._layout.layers_per_value
        kv, num_layers = self._kv, len(self._kv)
        num_whole = num_layers // per_value
        parts = [kv[: num_whole * per_value].view(num_whole, per_value, *kv.shape[1:])]
        if num_layers % per_value:
            parts.append(kv[None, num_whole * per_value :])
        found: list[bytes] = []
        with way.ring.slab() as slab, torch.cuda.stream(way.out):
            self._after_its_step()
            for values in parts:
                payloads, offsets = way.codecs.pack(self._codec, values, self._start)
                ends = offsets.tolist()
                host = slab[: ends[-1]]
                if len(host) == ends[-1]:
                    host.copy_(payloads[: ends[-1]], non_blocking=True)
                    wait(way.out)
                else:  # more than the KV itself: it is noise
                    host = payloads[: ends[-1]].cpu()
                whole = host.numpy()
                found += [whole[at:end].tobytes() for at, end in pairwise(ends)]
        return found

    def _after_its_step(self) -> None:
        if self._is_there is not None:
            torch.cuda.current_stream(self._kv.device).wait_event(self._is_there)


def as_bits(kv: Tensor) -> Bits:
    """View of KV in this process' memory as bits."""
    kind = torch.uint32 if kv.dtype == torch.float32 else torch.uint16
    return kv.view(kind).numpy()


def of_group(bits: Bits, layout: KVLayout, group: int) -> Bits:
    layers = layout.value_layers(group)
    return bits[layers.start : layers.stop]
