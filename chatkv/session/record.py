"""What is measured of a turn while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chatkv.engine.options import SpeculationCounts
from chatkv.restore.plan import Plan
from chatkv.session.turn import FinishReason, Timing, TokenCounts, measures_to_json

if TYPE_CHECKING:
    from torch import Tensor

    from chatkv.restore.restored import Restored


def _now() -> float:
    return time.perf_counter()


@dataclass
class TurnRecord:
    """Filled in phase by phase; a turn that is cut off leaves the later phases empty."""

    load_model_ms: float
    finish: FinishReason = "interrupted"
    restored: Restored | None = None
    last_logits: Tensor | None = None
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    was_preempted: bool = False  # its times are those of others too
    template: str | None = None  # where the chat template would write the history differently
    _began: float = field(default_factory=_now)
    _restored_at: float | None = None
    _prefilled_at: float | None = None
    _num_cached: int = 0
    _token_times: list[float] = field(default_factory=list)

    def restore_done(self, restored: Restored) -> None:
        self.restored, self._restored_at = restored, _now()

    def chunk_done(self, num_cached: int) -> None:
        """A prefill chunk is computed: num_cached tokens now have their KV."""
        self._prefilled_at = _now()
        self._num_cached = num_cached

    def token_done(self) -> None:
        self._token_times.append(_now())

    @property
    def num_computed(self) -> int:
        """Tokens whose KV prefill has computed. Right once the load has ended: one by layers may
        say what it brought only after prefill on it is done."""
        if self.restored is None:
            return 0
        return max(0, self._num_cached - self.restored.num_ready)

    @property
    def plan(self) -> Plan:
        return self.restored.plan if self.restored else Plan("none", 0.0)

    @property
    def plan_actual_ms(self) -> float:
        """From the turn's beginning to its first logits."""
        return self._since_began_ms(self._prefilled_at)

    @property
    def prefill_s(self) -> float:
        if self._prefilled_at is None or self._restored_at is None:
            return 0.0
        return self._prefilled_at - self._restored_at - self._waited_s

    @property
    def _waited_s(self) -> float:
        return self.restored.waited_s if self.restored is not None else 0.0

    def tokens(self, num_generated: int) -> TokenCounts:
        reused = self.restored.reused if self.restored else 0
        loaded = self.restored.num_loaded if self.restored else 0
        remote = self.restored.num_fetched if self.restored else 0
        return TokenCounts(
            prompt=reused + loaded + remote + self.num_computed,
            reused=reused,
            loaded=loaded,
            computed=self.num_computed,
            generated=num_generated,
            remote=remote,
        )

    @property
    def remote(self) -> dict[str, Any] | None:
        """What was fetched from a prefill worker, None where nothing was asked for."""
        fetched = self.restored.fetched if self.restored else None
        return fetched.to_json() if fetched is not None else None

    def timing(self) -> Timing:
        times = self._token_times
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
        return Timing(
            load_model_ms=self.load_model_ms,
            restore_ms=self._since_began_ms(self._restored_at) + self._waited_s * 1e3,
            prefill_ms=self.prefill_s * 1e3,
            ttft_ms=self._since_began_ms(times[0] if times else self._prefilled_at),
            decode_tokens_per_s=rate,
        )

    def to_json(self, num_generated: int, decode: Callable[..., str]) -> dict[str, Any]:
        """What is kept with the turn, for `chatkv why`; `decode` tells the text of tokens."""
        measures = measures_to_json(
            self.tokens(num_generated),
            self.plan,
            self.plan_actual_ms,
            self.timing(),
            self.speculation,
            self.remote,
        )
        notices = self.restored.all_notices if self.restored else ()
        num_bytes = self.restored.num_bytes if self.restored else 0
        return measures | {
            "regret_ms": self._regret_ms,
            "loaded_bytes": num_bytes,
            "cold": self.restored.cold if self.restored else None,
            "template": self.template,
            "departure": self._departure(decode),
            "recomputed": self._recomputed,
            "recomputed_layers": self._recomputed_layers,
            "notices": list(notices),
        }

    @property
    def _recomputed(self) -> list[tuple[int, int]]:
        """Tokens of the history that had been computed before, [first, behind the last)."""
        return self.restored.recomputed(self._num_cached) if self.restored is not None else []

    @property
    def _recomputed_layers(self) -> dict[str, Any] | None:
        """Of which of these only the first layers were, and how many of them."""
        return self.restored.recomputed_layers if self.restored is not None else None

    @property
    def _regret_ms(self) -> float | None:
        """How much longer the turn took than the best plan was expected to; negative: less."""
        ways = self.plan.alternatives_ms
        if not ways or self._prefilled_at is None:
            return None
        return round(self.plan_actual_ms - min(ways.values()), 2)

    def _departure(self, decode: Callable[..., str]) -> dict[str, Any] | None:
        """The first token that differs from what was kept, with its text, beside that."""
        departure = self.restored.departure if self.restored else None
        if departure is None:
            return None
        return {
            "position": departure.position,
            "where": departure.where,
            "token": {"id": departure.token, "text": decode([departure.token], skip_special=False)},
            "other": {"id": departure.other, "text": decode([departure.other], skip_special=False)},
        }

    def _since_began_ms(self, moment: float | None) -> float:
        return 0.0 if moment is None else (moment - self._began) * 1e3
