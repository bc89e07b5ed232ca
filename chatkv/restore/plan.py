"""Reload or re-prefill: the decision of one turn, from token counts and a cost model alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from chatkv.errors import PersistenceError
from chatkv.restore.cost import CostModel
from chatkv_store.chain import StoredBlock
from chatkv_store.layout import BLOCK_TOKENS

Method = Literal["none", "reload", "re-prefill", "both", "remote"]
Wanted = Literal["auto", "reload", "re-prefill", "both", "remote"]
# Why a plan was chosen: the fastest expected, hardly slower than that but exact to the bit, the one
# that was asked for, or what --exact leaves.
Because = Literal["fastest", "exact", "asked", "only-exact"]

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
    # Tokens [stored_from, stored_to) are on disk too, behind a gap where stored_from > available.
    stored_from: int | None = None
    stored_to: int | None = None

    @property
    def loadable(self) -> int:
        return max(0, min(self.available, self.total - 1) - self.in_pool)

    @property
    def both_range(self) -> tuple[int, int]:
        """The tokens that can be loaded from their end: [first, last), empty where none can."""
        first = self.in_pool if self.stored_from is None else max(self.in_pool, self.stored_from)
        last = self.available if self.stored_to is None else self.stored_to
        return first, min(last, self.total - 1)


def survey(
    total: int,
    history: int,
    in_pool: int,
    matched: int,
    stored: Sequence[StoredBlock | None],
) -> Situation:
    """The situation in which `stored` is on disk, block by block, and its first `matched` tokens
    are without a gap; the other counts as in Situation."""
    stretch = _last_stretch(stored)
    return Situation(
        total=total,
        in_pool=in_pool,
        available=max(in_pool, matched),
        history=history,
        stored_from=stretch[0] if stretch else None,
        stored_to=stretch[1] if stretch else None,
    )


def _last_stretch(stored: Sequence[StoredBlock | None]) -> tuple[int, int] | None:
    """The tokens [first, last) of the stored blocks that reach to the last one without a gap."""
    stretch: tuple[int, int] | None = None
    for index in reversed(range(len(stored))):
        block = stored[index]
        if block is None or (stretch and block.num_tokens < BLOCK_TOKENS):
            if stretch:
                break
            continue
        last = stretch[1] if stretch else block.start + block.num_tokens
        stretch = index * BLOCK_TOKENS, last
    return stretch


@dataclass(frozen=True)
class Plan:
    """The chosen method, and what every possible one was expected to take until the first logits
    (restore and prefill of the new prompt), in milliseconds."""

    chosen: Method
    predicted_ms: float
    alternatives_ms: dict[str, float] = field(default_factory=dict)
    because: Because = "fastest"

    @property
    def leaves_loading_untried(self) -> bool:
        """Whether KV that could be loaded is computed because that seems to be faster."""
        ways = self.alternatives_ms
        is_fastest = self.predicted_ms <= min(ways.values(), default=0.0)
        could_load = "reload" in ways or "both" in ways
        return self.chosen == "re-prefill" and could_load and is_fastest

    @property
    def leaves_remote_untried(self) -> bool:
        """Whether a prefill worker was asked for nothing because that seems to be faster."""
        return "remote" in self.alternatives_ms and self.chosen != "remote"


@dataclass(frozen=True)
class Remote:
    """A prefill worker that would compute what is neither in the pool nor on disk, all but the
    last token, in so many seconds; here that takes `slower` times what it takes alone."""

    seconds: float
    slower: float = 1.0


def choose(
    situation: Situation,
    cost: CostModel,
    wanted: Wanted = "auto",
    exact: bool = False,
    remote: Remote | None = None,
) -> Plan:
    """The fastest plan, or the wanted one where that is possible.

    `exact` allows only what gives the bits of a conversation that never stopped: KV in the pool or
    loaded from disk. Raises PersistenceError where history would have to be computed again.
    """
    total, in_pool = situation.total, situation.in_pool
    loaded = in_pool + situation.loadable
    recompute_s = cost.prefill_s(in_pool, total)
    reload_s = cost.reload_s(situation.loadable, total, loaded)
    options: dict[str, float] = {}
    if situation.loadable:
        options["reload"] = reload_s * 1e3
    if in_pool < situation.history:
        options["re-prefill"] = recompute_s * 1e3
        first, last = situation.both_range
        if last > first:
            options["both"] = cost.both_s(in_pool, first, last, total) * 1e3
    if remote is not None and not exact and wanted in ("auto", "remote"):
        options = _with_remote(options, situation, cost, remote)
    alternatives = dict(options)
    if exact:
        missing = situation.history - loaded
        if missing > 0 or wanted in ("re-prefill", "both"):
            raise PersistenceError(
                f"--exact: the KV of {max(missing, situation.loadable)} tokens would be computed "
                "again, which may round differently; leave --exact out to allow it"
            )
        options = {way: ms for way, ms in options.items() if way == "reload"}
    if not options:
        return Plan("none", recompute_s * 1e3, alternatives)
    chosen = wanted if wanted in options else _fastest(options)
    because: Because = "fastest"
    if wanted == chosen:
        because = "asked"
    elif options[chosen] > min(alternatives.values()):
        because = "only-exact" if exact else "exact"
    return Plan(cast(Method, chosen), options[chosen], alternatives, because)


def _with_remote(
    local_ms: dict[str, float], situation: Situation, cost: CostModel, remote: Remote
) -> dict[str, float]:
    """The ways with that of the prefill worker; "none" is to compute what is new here."""
    total, loaded = situation.total, situation.in_pool + situation.loadable
    here_ms = local_ms or {"none": cost.prefill_s(loaded, total) * 1e3}
    beside_ms = (remote.slower - 1) * cost.prefill_s(loaded, total) * 1e3
    waited_s = max(cost.load_s(situation.loadable), remote.seconds)
    there_ms = (waited_s + remote.slower * cost.prefill_s(total - 1, total)) * 1e3
    return {way: ms + beside_ms for way, ms in here_ms.items()} | {"remote": there_ms}


def _fastest(options: dict[str, float]) -> str:
    """The method of the least milliseconds; reload where that is hardly slower, since what it
    restores is exact to the bit."""
    best = min(options, key=lambda method: options[method])
    close_enough = max(
        options[best] * (1 + EXACT_IS_WORTH_SHARE), options[best] + EXACT_IS_WORTH_MS
    )
    exact = [way for way in ("reload", "none") if options.get(way, float("inf")) <= close_enough]
    return exact[0] if exact else best
