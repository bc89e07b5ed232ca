"""What a process keeps of the shapes that it has computed is bounded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import chatkv, ctypes, torch

class Counts(ctypes.Structure):  # struct mallinfo2
    _fields_ = [(f"_{at}", ctypes.c_size_t) for at in range(7)] + [("in_use", ctypes.c_size_t)]
    _fields_ += [(f"_{at}", ctypes.c_size_t) for at in range(8, 10)]

count = ctypes.CDLL(None).mallinfo2
count.restype = Counts
query, keys = torch.ones(3, 48, 64).bfloat16(), torch.ones(3, 64, 1000).bfloat16()
for length in range(100, 500):
    if length in (300, 499):
        print(count().in_use)
    torch.bmm(query, keys[..., :length])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc counts what is allocated")
def test_products_of_many_shapes_take_no_more_than_those_of_some() -> None:
    """Attention to a prompt's pieces has another shape with every length of its history."""
    # Not what the tests themselves were started with: what chatkv sets.
    names = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    env = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", _PROGRAM]
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    some, many = (int(line) for line in found.stdout.split())
    assert many - some < 16 << 20  # 50 MiB, were all of them kept
