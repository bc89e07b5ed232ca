"""chatkv: a multi-turn chat runtime whose conversations, KV cache included, outlive the process."""

import os
import sys

__version__ = "0.1.0"

# In another engine's processes we are a guest (connectors/), and these are not ours to set.
if "vllm" not in sys.modules:
    # Read by the OpenMP runtime when torch loads it. Threads that wait for each other spin for many
    # milliseconds by default; on a machine that is also doing something else (a browser, our own
    # writer) the one that is waited for then has no core, and prefill was 10x slower. 10000 turns
    # are some tenths of a millisecond: longer than what lies between two products of a step.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # Where the process has more of libgomp's threads than there are cores, those spin for 1000
    # turns if waiting is active, else for 100, and sleep in what is short as well: a 64-token
    # prompt took 126 ms instead of 101. `chatkv.waiting` says when they do.
    os.environ.setdefault("OMP_WAIT_POLICY", "active")
    # LLVM's runtime, which some builds of torch use, would take that to mean for ever.
    os.environ.setdefault("KMP_BLOCKTIME", "0")

    # Read by oneDNN. It keeps 1024 compiled matrix products, one for each number of rows that it
    # meets, and prompts have any: mixed traffic grew a process by hundreds of megabytes. A step
    # needs five.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    # Read by torch. It keeps the descriptions of as many products of each kind in a cache of its
    # own, a quarter of a megabyte each; attention to a prompt's pieces has another shape with every
    # length.
    os.environ.setdefault("LRU_CACHE_CAPACITY", "128")
