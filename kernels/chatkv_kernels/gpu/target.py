"""The GPU that a launch is shaped for: how many multiprocessors, how much shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Target:
    """arch: compute capability, 80 or 90; multiprocessors: what a grid should fill."""

    arch: int
    multiprocessors: int


A100 = Target(80, 108)
H200 = Target(90, 132)
_assumed = ContextVar("_assumed", default=H200)


def target_of(device: torch.device) -> Target:
    """The target behind `device`; an assumed one where it is no GPU (interpreter, compile_all)."""
    return _measured(device) if device.type == "cuda" else _assumed.get()


@cache
def _measured(device: torch.device) -> Target:
    properties = torch.cuda.get_device_properties(device)
    return Target(properties.major * 10 + properties.minor, properties.multi_processor_count)


@contextmanager
def assume(target: Target) -> Iterator[None]:
    """Launches within are shaped for `target`."""
    token = _assumed.set(target)
    try:
        yield
    finally:
        _assumed.reset(token)
