"""Up to how many rows a packed matrix is multiplied faster than one made dense on the way: measured
once for each shape, remembered for this CPU, number of threads and version of torch."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from chatkv.model.dtype import cpu_key, read_note
from chatkv.model.quantise import KernelWeight
from chatkv.model.quantised_linear import Product
from chatkv.model.timing import compare
from chatkv.paths import write_note
from chatkv_kernels.linear_quantised import Weight4

_ROWS = (1, 2, 3, 4, 8, 16, 32)
# What is remembered decides how numbers are rounded, so packed has to be clearly faster.
_WORTH = 1.1


class MeasuredRows:
    """`FewRows` of a model that computes in `dtype`; `cache` is the folder of the notes."""

    def __init__(self, cache: Path, dtype: torch.dtype) -> None:
        self._path, self._dtype = cache / "rows.json", dtype
        self._machine = cpu_key()
        self._known = read_note(self._path)

    def __call__(self, weight: KernelWeight, packed: Product, many: Product) -> int:
        if isinstance(weight, Weight4):
            num_out, num_in, kind = weight.codes.shape[1], weight.num_inputs, "int4"
        else:
            (num_out, num_in), kind = weight.codes.shape, "int8"
            if weight.group_size:
                kind = f"int8 in groups of {weight.group_size}"
        dtype = str(self._dtype).removeprefix("torch.")
        if self._dtype != torch.bfloat16:
            dtype += " through bfloat16"  # as `cpu_product` does it
        key = f"{self._machine}/{dtype}/tiles/{kind}/{num_out}x{num_in}"
        known = self._known.get(key)
        if isinstance(known, int):
            return known
        rows = self._measured(num_in, packed, many)
        # Another process may have been measuring, too: one of the results counts for both.
        self._known = {key: rows} | read_note(self._path)
        write_note(self._path, json.dumps(self._known, indent=1))
        return int(self._known[key])

    @torch.inference_mode()
    def _measured(self, num_inputs: int, packed: Product, many: Product) -> int:
        most = 0
        for rows in _ROWS:
            x = torch.randn(rows, num_inputs, dtype=self._dtype)
            few_s, many_s = compare([lambda: packed(x), lambda: many(x)]).seconds  # noqa: B023
            if _WORTH * few_s > many_s:
                break
            most = rows
        return most
