"""What torch says of this machine, as one JSON object on stdout.

A program of its own, `python -m chatkv.cli.checks.torch_report`: a torch that cannot be imported,
hangs or ends its process takes nobody with it.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import Any


def report() -> dict[str, Any]:
    import torch

    from chatkv.model.linear import packs_on_cpu
    from chatkv.process import prepare_to_compute

    prepare_to_compute()
    found: dict[str, Any] = {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16": packs_on_cpu(torch.bfloat16),
        "cuda_build": torch.version.cuda,
        "triton": find_spec("triton") is not None,
        "gpu": None,
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["gpu"] = {
            "name": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "free_bytes": free,
            "total_bytes": total,
        }
    return found


if __name__ == "__main__":
    json.dump(report(), sys.stdout)
