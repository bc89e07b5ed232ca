"""What a process keeps of what it has computed does not grow with it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SHAPES = """
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

_THREADS = """
import ctypes, os, threading
from chatkv.process import prepare_to_compute

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
prepare_to_compute()
libc, found, all_here = ctypes.CDLL(None), set(), threading.Barrier(12)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]

def allocate():
    all_here.wait()
    found.add(libc.malloc(100_000) >> 26)  # an arena's memory is aligned to 64 MiB
    all_here.wait()

threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(found))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="about glibc's malloc")


@pytest.mark.slow
def test_products_of_many_shapes_take_no_more_than_those_of_some() -> None:
    """Attention to a prompt's pieces has another shape with every length of its history."""
    # Not what the tests themselves were started with: what chatkv sets.
    names = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    env = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", _SHAPES]
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    some, many = (int(line) for line in found.stdout.split())
    assert many - some < 16 << 20  # 50 MiB, were all of them kept


def test_many_threads_free_into_few_arenas() -> None:
    command = [sys.executable, "-c", _THREADS]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(found.stdout) <= 3  # two, one of which may reach over a border; else twelve
