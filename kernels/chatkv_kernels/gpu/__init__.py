"""Triton kernels and their launches, each in the module of the reference that it agrees with.

Each module lists in SPECS what `compile_all` compiles without a device. A launch reads no value
from the device, and its grid depends on shapes and on the caller's limits alone: so all of them
can be captured in a CUDA graph and replayed over other data.
"""

import os

# A multiplication and the addition after it may become one instruction. Triton 3.10 turns this off
# where nothing is said; no kernel here depends on the rounding in between.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
