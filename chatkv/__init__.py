"""chatkv: a multi-turn chat runtime whose conversations, KV cache included, outlive the process."""

import os
import sys

__version__ = "0.1.0"

# In another engine's processes we are a guest (connectors/), and these are not ours to set.
if "vllm" not in sys.modules:
    # Read by the OpenMP runtime when torch loads it. Threads that wait for each other spin for
    # about a millisecond by default; on a machine that is also doing something else (a browser, our
    # own writer) the one that is waited for then has no core, and prefill was 10x slower. 2000
    # turns are a few microseconds, and cost an idle machine nothing that could be measured.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # Where two threads of a process compute in turn, each with its pool of workers, libgomp sees
    # more threads than CPUs and spins a twentieth of that, unless told that waiting is active; then
    # half of it. Each short operation of the engine's thread woke sleepers: a 64-token prompt took
    # 126 ms instead of 101, 512 tokens 745 instead of 645 (2 cores).
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
