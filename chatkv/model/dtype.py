"""Which dtype this machine decodes faster in: measured once, remembered."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from chatkv.model.linear import Linear, packs_on_cpu
from chatkv.model.prepared import Dtype
from chatkv.paths import write_note

# The shape of a small model's MLP; large enough not to stay in a core's own cache.
_OUT, _IN, _MATRICES = 3072, 1024, 8
_WORTH = 1.25


def choose_dtype(cache: Path, device: torch.device) -> Dtype:
    """On a GPU "bfloat16"; on a CPU that or "float32", by a short measurement (about 0.2 s) that
    `cache` remembers for this CPU, number of threads and version of torch."""
    if device.type != "cpu":
        return "bfloat16"
    if not packs_on_cpu(torch.bfloat16):
        return "float32"
    key = cpu_key()
    path = cache / "dtype.json"
    known = read_note(path)
    if known.get(key) not in ("bfloat16", "float32"):
        # KV in bfloat16 takes half the room, so float32 has to be clearly faster.
        is_slow = _decode_s(torch.bfloat16) > _WORTH * _decode_s(torch.float32)
        known[key] = "float32" if is_slow else "bfloat16"
        write_note(path, json.dumps(known, indent=1))
    return "bfloat16" if known[key] == "bfloat16" else "float32"


def cpu_key() -> str:
    """What measurements on a CPU are remembered for."""
    return f"{_cpu_name()}/{torch.get_num_threads()} threads/torch {torch.__version__}"


def _decode_s(dtype: torch.dtype) -> float:
    """Seconds for one token through a few matrices, the best of several."""
    generator = torch.Generator().manual_seed(0)
    linears = [
        Linear(torch.randn(_OUT, _IN, generator=generator).to(dtype)) for _ in range(_MATRICES)
    ]
    x = torch.randn(1, _IN, generator=generator).to(dtype)
    best = float("inf")
    for _ in range(12):
        began = time.perf_counter()
        for linear in linears:
            linear(x)
        best = min(best, time.perf_counter() - began)
    return best


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                line.split(":")[1].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return "cpu"


def read_note(path: Path) -> dict[str, Any]:
    """What was remembered; nothing where that is damaged or not there."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
