"""Reload or re-prefill: the decision of one turn, from token counts and a cost model alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

from chatkv.errors import PersistenceError, UsageError
from chatkv.restore.cost import CostModel

Method = Literal["none", "reload", "re-prefill", "both"]
Wanted = Literal["auto", "reload", "re-prefill", "both"]

# Recomputed history may round differently. Nobody notices 20 ms, and few would trade for 5 %.
EXACT_IS_WORTH_MS = 20.0
EXACT_IS_WORTH_SHARE = 0.05


@dataclass(frozen=True)
class Situation:
    """Where the KV of a turn's tokens is. 0 <= in_pool <= stored' <= total, where stored' counts
    the leading tokens that are in the pool or on disk; the last token is always computed."""

    total: int
    in_pool: int
    available: int
    history: int  # tokens that an earlier turn has computed already

    @property
    def loadable(self) -> int:
        return max(0, min(self.available, self.total - 1) - self.in_pool)


@dataclass(frozen=True)
class Plan:
    """The chosen method, and what every possible one was expected to take until the first logits
    (restore and prefill of the new prompt), in milliseconds."""

    chosen: Method
    predicted_ms: float
    alternatives_ms: dict[str, float] = field(default_factory=dict)


def choose(
    situation: Situation, cost: CostModel, wanted: Wanted = "auto", exact: bool = False
) -> Plan:
    """The fastest plan, or the wanted one where that is possible.

    `exact` allows only what gives the bits of a conversation that never stopped: KV in the pool or
    loaded from disk. Raises PersistenceError where history would have to be computed again.
    """
    if wanted == "both":
        raise UsageError("restoring from both ends is not built yet: take --restore auto")
    total, in_pool = situation.total, situation.in_pool
    loaded = in_pool + situation.loadable
    recompute_s = cost.prefill_s(in_pool, total)
    reload_s = cost.load_s(situation.loadable) + cost.prefill_s(loaded, total)
    options: dict[str, float] = {}
    if situation.loadable:
        options["reload"] = reload_s * 1e3
    if in_pool < situation.history:
        options["re-prefill"] = recompute_s * 1e3
    alternatives = dict(options)
    if exact:
        missing = situation.history - loaded
        if missing > 0 or wanted == "re-prefill":
            raise PersistenceError(
                f"--exact: the KV of {max(missing, situation.loadable)} tokens would be computed "
                "again, which may round differently; leave --exact out to allow it"
            )
        options.pop("re-prefill", None)
    if not options:
        return Plan("none", recompute_s * 1e3, alternatives)
    chosen = wanted if wanted in options else _fastest(options)
    return Plan(cast(Method, chosen), options[chosen], alternatives)


def _fastest(options: dict[str, float]) -> str:
    """The method of the least milliseconds; reload where that is hardly slower, since what it
    restores is exact to the bit."""
    best = min(options, key=lambda method: options[method])
    close_enough = max(
        options[best] * (1 + EXACT_IS_WORTH_SHARE), options[best] + EXACT_IS_WORTH_MS
    )
    return "reload" if options.get("reload", float("inf")) <= close_enough else best
