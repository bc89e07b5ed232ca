"""Writing a safetensors file one tensor at a time, so that a large model never lies in memory.

The format (github.com/huggingface/safetensors): a u64 LE header length, the header as JSON padded
with spaces, then the tensors' bytes without gaps, row-major, little endian.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

_DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
}
# Tensors are mapped straight from the page cache; data that begins on a page keeps every tensor
# whose size is a multiple of 64 bytes aligned for vector loads (the library's own writer: 8).
_DATA_ALIGNMENT = 4096


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written: its name and shape now, its values when their turn comes; `dtype`
    None where it is the file's."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]
    dtype: torch.dtype | None = None


def write_safetensors(
    path: Path,
    sources: Sequence[TensorSource],
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write all `sources` to `path`, as `dtype` where they name none, and sync them to the disk.

    `progress` is called with (bytes done, bytes in all) after each tensor.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for source in sources:
        stored = source.dtype or dtype
        start, end = end, end + prod(source.shape) * stored.itemsize
        header[source.name] = {
            "dtype": _DTYPE_NAMES[stored],
            "shape": list(source.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _DATA_ALIGNMENT)

    done = 0
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for source in sources:
            tensor = source.load().to(source.dtype or dtype).contiguous()
            assert tuple(tensor.shape) == source.shape, source.name
            done += out.write(tensor.view(torch.uint8).numpy().data)
            if progress:
                progress(done, end)
        out.flush()
        os.fsync(out.fileno())
