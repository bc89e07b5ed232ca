"""Where the model computes: on a GPU where there is one, else on the CPU."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Literal, get_args

import torch

from chatkv.errors import UsageError

Device = Literal["auto", "cpu", "cuda"]


def choose_device(wanted: str | None = None) -> torch.device:
    """The device for "auto", "cpu" or "cuda"; None: what CHATKV_DEVICE says, else "auto".

    Raises UsageError where it is not to be had.
    """
    wanted = wanted or os.environ.get("CHATKV_DEVICE") or "auto"
    if wanted not in get_args(Device):
        raise UsageError(f"device {wanted!r} is unknown: give auto, cpu or cuda")
    if wanted == "cpu":
        return torch.device("cpu")
    lacks = _lacks()
    if wanted == "cuda" and lacks is not None:
        raise UsageError(f"--device cuda: {lacks}; leave it out to compute on the CPU")
    return torch.device("cpu" if lacks else "cuda")


def _lacks() -> str | None:
    """Why nothing can compute on a GPU here; None: it can."""
    if not torch.cuda.is_available():
        return "torch finds no GPU here"
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    major, minor = torch.cuda.get_device_capability()
    return (
        None if major >= 8 else f"this GPU is of compute capability {major}.{minor}, 8.0 is needed"
    )
