"""Whether KV that is stored is worth loading: what loading and computing took under this vLLM.

Loading is timed as it happens, and steps that compute a part of one prompt and nothing else. Rates
are kept beside those of this project's own engine (`restore.cost`), one entry for each worker's
part of the KV, so that they are known after a restart. Until both were measured, KV is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from chatkv.restore.cost import CostFile, CostModel

# Shorter pieces of a prompt say more of what a step costs than of its tokens.
LEAST_TOKENS = 64


class Rates:
    """Of one worker's part, kept under `key`. The scheduler's process reads what the worker's has
    written."""

    def __init__(self, costs: Path, key: str, label: str = "") -> None:
        self._file, self._key, self._label = CostFile(costs), key, label

    @property
    def cost(self) -> CostModel:
        return self._file.load(self._key)

    def loaded(self, num_tokens: int, seconds: float) -> None:
        """So many tokens were loaded in so many seconds."""
        if num_tokens >= LEAST_TOKENS:
            cost = self.cost
            if cost.load_error is None:
                scale = seconds / cost.load_s(num_tokens)
                fixed_s, token_s = cost.load_fixed_s * scale, cost.load_s_per_token * scale
                cost = replace(cost, load_fixed_s=fixed_s, load_s_per_token=token_s)
            self._save(cost.after_load(num_tokens, seconds))

    def computed(self, start: int, stop: int, seconds: float) -> None:
        """A step computed these tokens of one prompt and nothing else."""
        if stop - start >= LEAST_TOKENS:
            cost = self.cost
            if cost.prefill_error is None:
                scale = seconds / cost.prefill_s(start, stop)
                cost = replace(
                    cost,
                    prefill_fixed_s=cost.prefill_fixed_s * scale,
                    prefill_s_per_token=cost.prefill_s_per_token * scale,
                    prefill_s_per_token_pair=cost.prefill_s_per_token_pair * scale,
                )
            self._save(cost.after_prefill(start, stop, seconds))

    def skipped(self) -> None:
        """KV was computed that could have been loaded: see `CostModel.after_no_load`."""
        self._save(self.cost.after_no_load())

    def _save(self, cost: CostModel) -> None:
        self._file.save(self._key, self._label, cost)


def seconds_of(parts: list[Rates], start: int, stop: int) -> tuple[float, float] | None:
    """What loading tokens [start, stop) is expected to take where all workers load their parts at
    once, and what computing them; None before both were measured."""
    costs = [part.cost for part in parts]
    if not costs or any(None in (one.load_error, one.prefill_error) for one in costs):
        return None
    load_s = max(one.load_s(stop - start) for one in costs)
    return load_s, max(one.prefill_s(start, stop) for one in costs)
