"""What a restore would cost: seconds to load KV and seconds to compute it.

    t_load(n)          = a + n * load
    t_prefill(s -> e)  = c + alpha * (e - s) + beta * (e^2 - s^2) / 2

alpha is the work per token outside attention, beta the attention of one token to another. Rates
start as a cautious guess and follow what turns really took; they are kept per machine, model,
dtype and device.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from chatkv.engine.budget import CHUNK_TOKENS as STEP_TOKENS
from chatkv.engine.budget import StepRates
from chatkv.paths import write_note
from chatkv.restore.measured import Measured, Range, left_step_s
from chatkv.restore.meeting import layered_s, shared
from chatkv_store.layout import BLOCK_TOKENS

# How far one observation moves a rate, and how far it may at most: a machine that was busy for
# one turn must not turn the next decision around.
_WEIGHT = 0.3
_LIMIT = 4.0
_UNTRIED = 0.95

# Loading that leaves the cores idle for less than this is not worth computing beside it.
OVERLAP_S = 0.015
# Layers are taken to arrive in so many parts, one after the other, and steps to need one after the
# other; what the computing of one part leaves of a step may be done before all have come.
LAYER_PARTS = 10


class PrefillRates(Protocol):
    """c, alpha and beta of the formula above, this machine's or another's."""

    @property
    def prefill_fixed_s(self) -> float: ...
    @property
    def prefill_s_per_token(self) -> float: ...
    @property
    def prefill_s_per_token_pair(self) -> float: ...


def prefill_s(rates: PrefillRates, start: int, stop: int) -> float:
    """Seconds to compute the KV of tokens [start, stop) of one sequence."""
    if stop <= start:
        return 0.0
    pairs = (stop**2 - start**2) / 2
    linear = rates.prefill_s_per_token * (stop - start)
    return rates.prefill_fixed_s + linear + rates.prefill_s_per_token_pair * pairs


@dataclass(frozen=True)
class CostModel:
    """Seconds, and seconds per token; see the formulas above."""

    load_fixed_s: float = 0.005
    load_s_per_token: float = 30e-6
    prefill_fixed_s: float = 0.01
    prefill_s_per_token: float = 500e-6
    prefill_s_per_token_pair: float = 50e-9
    load_cpu_s_per_token: float = 20e-6
    # More than load_s_per_token where the system does not have the pages in memory; None before it
    # was measured.
    cold_s_per_token: float | None = None
    # A step of n answers without prefill: fixed + n * per answer; None before it was measured.
    step_fixed_s: float | None = None
    step_s_per_answer: float | None = None
    num_observations: int = 0
    # Running means of |actual / predicted - 1|, None before the first turn.
    load_error: float | None = None
    prefill_error: float | None = None

    @property
    def steps(self) -> StepRates | None:
        """What steps of running answers take, as measured."""
        if self.step_fixed_s is None or self.step_s_per_answer is None:
            return None
        return StepRates(self.step_fixed_s, self.step_s_per_answer, self.prefill_s_per_token)

    def with_cold(self, share: float | None) -> CostModel:
        """The model of loads of which such a share has to come from the disk; None: unknown, and
        the rates are those of loads before."""
        more_s = (share or 0.0) * (self.cold_s_per_token or 0.0)
        return replace(self, load_s_per_token=self.load_s_per_token + more_s)

    def load_s(self, num_tokens: float) -> float:
        """Seconds to load the KV of num_tokens tokens into the pool."""
        return self.load_fixed_s + num_tokens * self.load_s_per_token if num_tokens else 0.0

    def prefill_s(self, start: int, stop: int) -> float:
        """Seconds to compute the KV of tokens [start, stop) of one sequence."""
        return prefill_s(self, start, stop)

    def step_s(self, ranges: Sequence[Range]) -> float:
        """Seconds of a step that computes several stretches of one sequence's tokens."""
        wanted = [one for one in ranges if one[1] > one[0]]
        together_s = (len(wanted) - 1) * self.prefill_fixed_s if wanted else 0.0
        return sum(self.prefill_s(*one) for one in wanted) - together_s

    def reload_s(self, num_tokens: int, stop: int, start: int) -> float:
        """Seconds until tokens up to `stop` are in the pool, where num_tokens of them are loaded
        and those from `start` on are computed; that begins with the layers that have come first."""
        computing_s = self.prefill_s(start, stop)
        beside_s = max(0.0, self.idle_s(num_tokens) - OVERLAP_S)
        return (
            self.load_s(num_tokens)
            + computing_s
            - min(beside_s, (1 - 1 / LAYER_PARTS) * computing_s)
        )

    def idle_s(self, num_tokens: int) -> float:
        """For how long loading num_tokens tokens leaves the cores to others."""
        return max(0.0, self.load_s(num_tokens) - num_tokens * self.load_cpu_s_per_token)

    def both_s(self, start: int, loadable_from: int, loaded_to: int, stop: int) -> float:
        """Seconds until tokens [start, stop) are in the pool when prefill computes from the first
        and [loadable_from, loaded_to) is loaded from the last, each as far as suits best.

        Either steps of prefill take the front, and one more what follows, as its layers come; or,
        of what is short, one step takes all of it, and the loader brings layers of that too
        (`last_step`). It takes load_cpu_s_per_token of the cores' time away from prefill.
        """
        # Both take blocks, so on average a quarter of one by each is in the way where they meet.
        meeting_s = BLOCK_TOKENS / 4 * (self.load_s_per_token + self.prefill_s_per_token)
        rest = loaded_to, stop

        def apart(meeting: int) -> float:
            loaded = loaded_to - meeting
            front_s = self.prefill_s(start, meeting) + loaded * self.load_cpu_s_per_token
            rest_s = self.prefill_s(*rest)
            seconds = max(front_s + rest_s, self.load_s(loaded) + rest_s / LAYER_PARTS)
            return seconds + (0.0 if meeting in (loadable_from, loaded_to) else meeting_s)

        def together(meeting: int) -> float:
            loaded = loaded_to - meeting
            beside_s = loaded * self.load_cpu_s_per_token
            step_s = self.step_s([(start, meeting), rest]) + beside_s
            if start >= loadable_from:
                front = meeting - start
                share = shared(step_s, self.load_s(loaded), front * self.load_s_per_token)
                left_s = self.step_s([rest]) + front * self.load_cpu_s_per_token + beside_s
                step_s = share * step_s + (1 - share) * left_s
            return layered_s(step_s, self.load_s(loaded), 0.0, LAYER_PARTS)

        # Convex between its ends, where the fixed costs of loading or computing fall away.
        low, high = loadable_from, loaded_to
        while high - low > 2:
            third = (high - low) // 3
            if apart(low + third) <= apart(high - third):
                high -= third
            else:
                low += third
        best_s = min(map(apart, {loadable_from, *range(low, high + 1), loaded_to}))
        first = -(-loadable_from // BLOCK_TOKENS) * BLOCK_TOKENS
        last = min(loaded_to, start + STEP_TOKENS - (stop - loaded_to))
        return min([best_s, *map(together, range(first, last + 1, BLOCK_TOKENS))])

    def after_load(
        self, num_tokens: float, seconds: float, cpu_s: float = 0.0, cold: float | None = None
    ) -> CostModel:
        """This model, corrected by one load, which took `cpu_s` of every core. cold: the share of
        it that came from the disk; from half on, it is the disk's rate that is corrected."""
        expected_s = self.with_cold(cold).load_s(num_tokens)
        cpu = _damped(cpu_s, num_tokens * self.load_cpu_s_per_token) if cpu_s else 1.0
        model = replace(
            self,
            load_cpu_s_per_token=self.load_cpu_s_per_token * cpu,
            num_observations=self.num_observations + 1,
            load_error=_error(self.load_error, seconds, expected_s),
        )
        if cold is not None and cold >= 0.5 and self.cold_s_per_token:
            warm_s = self.load_s(num_tokens)
            scale = _damped(max(0.0, seconds - warm_s), expected_s - warm_s)
            return replace(model, cold_s_per_token=self.cold_s_per_token * scale)
        scale = _damped(seconds, expected_s)
        return replace(
            model,
            load_fixed_s=self.load_fixed_s * scale,
            load_s_per_token=self.load_s_per_token * scale,
        )

    def after_prefill(self, start: int, stop: int, seconds: float) -> CostModel:
        """This model, corrected by one prefill."""
        return self._after_prefill(seconds, self.prefill_s(start, stop))

    def after_both(self, ends: Measured, cold: float | None = None) -> CostModel:
        """This model, corrected by a restore from both ends: each end by its own time."""
        model = self
        if ends.loaded:
            model = model.after_load(ends.loaded, ends.load_s, cold=cold)
        if ends.steps:
            beside_s = ends.loaded * self.load_cpu_s_per_token
            expected_s = sum(map(self.step_s, ends.steps))
            if ends.left is not None:
                index, computed, of_all = ends.left
                expected_s -= self.step_s(ends.steps[index])
                expected_s += left_step_s(self.step_s, ends.steps[index], computed / of_all)
            model = model._after_prefill(ends.prefill_s, expected_s + beside_s)
        return model

    def after_no_load(self) -> CostModel:
        """This model, after KV that is stored was computed again because that seemed faster. What
        is never tried is never corrected, so loading is believed to be a little faster each time,
        until it is tried once more."""
        return replace(
            self,
            load_fixed_s=self.load_fixed_s * _UNTRIED,
            load_s_per_token=self.load_s_per_token * _UNTRIED,
            load_cpu_s_per_token=self.load_cpu_s_per_token * _UNTRIED,
            cold_s_per_token=self.cold_s_per_token and self.cold_s_per_token * _UNTRIED,
        )

    def _after_prefill(self, seconds: float, expected_s: float) -> CostModel:
        scale = _damped(seconds, expected_s)
        return replace(
            self,
            prefill_fixed_s=self.prefill_fixed_s * scale,
            prefill_s_per_token=self.prefill_s_per_token * scale,
            prefill_s_per_token_pair=self.prefill_s_per_token_pair * scale,
            num_observations=self.num_observations + 1,
            prefill_error=_error(self.prefill_error, seconds, expected_s),
        )


def _error(before: float | None, actual: float, predicted: float) -> float:
    """The running mean of the relative error with one more observation."""
    error = min(abs(actual / max(predicted, 1e-9) - 1), _LIMIT)
    return error if before is None else before + _WEIGHT * (error - before)


def _damped(actual: float, predicted: float) -> float:
    ratio = min(max(actual / max(predicted, 1e-9), 1 / _LIMIT), _LIMIT)
    return float(ratio**_WEIGHT)


def machine_name() -> str:
    """What rates hold for: the host, its architecture and how many CPUs this process may use."""
    return f"{platform.node()}-{platform.machine()}-{len(os.sched_getaffinity(0))}cpu"


def cost_key(namespace: bytes, device: str) -> str:
    """Under which a model's rates on a device are kept."""
    return f"{machine_name()}/{namespace.hex()[:16]}/{device}"


@dataclass
class CostFile:
    """The rates of all models on this machine, one JSON file in the cache; may be deleted."""

    path: Path

    def load(self, key: str) -> CostModel:
        return self.entries().get(key, ("", CostModel()))[1]

    def save(self, key: str, label: str, model: CostModel) -> None:
        """Remember `model` under `key`; `label` is for people. A full disk is no error."""
        entries = self._read() | {key: {"label": label, **asdict(model)}}
        write_note(self.path, json.dumps(entries, indent=1))

    def entries(self) -> dict[str, tuple[str, CostModel]]:
        """Key → label and rates, of what this version can read."""
        found = {}
        for key, fields in self._read().items():
            try:
                label = str(fields.pop("label"))
                known = CostModel(**fields)
                rates = [rate for rate in asdict(known).values() if rate is not None]
                if all(math.isfinite(rate) and rate >= 0 for rate in rates):
                    found[key] = label, known
            except (TypeError, KeyError, AttributeError):  # another version's, or made by hand
                continue
        return found

    def _read(self) -> dict[str, Any]:
        try:
            entries = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}
