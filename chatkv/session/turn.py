"""What goes into a turn and what comes out: the names in the JSON that outside scripts read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from chatkv.engine.options import SamplingOptions
from chatkv.restore.plan import Plan, Wanted

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True)
class TurnOptions:
    """How one turn is to be answered."""

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    seed: int | None = None  # None: the session's own, drawn once when it was made
    restore: Wanted = "auto"
    exact: bool = False


@dataclass(frozen=True)
class Listener:
    """Who hears of a turn while it runs. `cancelled` is asked between chunks and tokens."""

    on_text: Callable[[str], None] = lambda text: None
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    cancelled: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class TokenCounts:
    """prompt = reused + loaded + computed: where the KV of everything before the reply came from
    (the pool, the disk, prefill); generated: the sampled tokens kept."""

    prompt: int
    reused: int
    loaded: int
    computed: int
    generated: int


@dataclass(frozen=True)
class Timing:
    """Milliseconds since the turn began, except decode's rate; load_model_ms is the process's."""

    load_model_ms: float
    restore_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_tokens_per_s: float | None  # None: fewer than two tokens, no rate


@dataclass(frozen=True)
class TurnResult:
    session: str
    turn: int
    text: str
    finish_reason: FinishReason
    tokens: TokenCounts
    plan: Plan
    plan_actual_ms: float
    timing: Timing
    model: str
    notices: tuple[str, ...]  # lines for the user: misses, rewritten history, a full disk
    last_logits: Tensor | None  # [vocab_size] float32, what the last token was drawn from

    def to_json(self) -> dict[str, Any]:
        """The object that `ask --json` prints."""
        plan, timing = self.plan, self.timing
        rate = timing.decode_tokens_per_s
        return {
            "session": self.session,
            "turn": self.turn,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "tokens": {
                "prompt": self.tokens.prompt,
                "reused": self.tokens.reused,
                "loaded": self.tokens.loaded,
                "computed": self.tokens.computed,
                "generated": self.tokens.generated,
            },
            "plan": {
                "chosen": plan.chosen,
                "predicted_ms": round(plan.predicted_ms, 2),
                "actual_ms": round(self.plan_actual_ms, 2),
                "alternatives_ms": {k: round(v, 2) for k, v in plan.alternatives_ms.items()},
            },
            "timing": {
                "load_model_ms": round(timing.load_model_ms, 1),
                "restore_ms": round(timing.restore_ms, 2),
                "prefill_ms": round(timing.prefill_ms, 2),
                "ttft_ms": round(timing.ttft_ms, 2),
                "decode_tokens_per_s": None if rate is None else round(rate, 2),
            },
            "model": self.model,
            "notices": list(self.notices),
        }
