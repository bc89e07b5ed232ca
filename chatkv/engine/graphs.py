"""CUDA graphs: a pass of the model, recorded once and run again with one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Passes before a recording: the first one compiles kernels and lets libraries set themselves up,
# neither of which may happen within it.
WARM_UP = 2


def record_on(
    device: torch.device,
) -> Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]] | None:
    """What records passes on this device (see `runner.Record`); None where nothing can.

    What passes need while they run comes from one pool of memory, since no two run at a time.
    """
    if device.type != "cuda":
        return None
    memory = torch.cuda.graph_pool_handle()

    def record(step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads load and save KV meanwhile: what they do is not to disturb the recording.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            logits = step()
        return logits, graph.replay

    return record
