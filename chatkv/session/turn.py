"""What goes into a turn and what comes out: the names in the JSON that outside scripts read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from chatkv.engine.options import SamplingOptions, Speculate, SpeculationCounts
from chatkv.restore.plan import Plan, Wanted

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "interrupted"]


# What to do when a conversation outgrows the model's context: refuse the message, or let whole
# oldest turns leave, with the KV of the others moved up (fast, approximate) or computed again.
Overflow = Literal["refuse", "shift", "recompute"]


@dataclass(frozen=True)
class TurnOptions:
    """How one turn is to be answered."""

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    seed: int | None = None  # None: the session's own, drawn once when it was made
    restore: Wanted = "auto"
    exact: bool = False
    is_background: bool = False  # others go first
    overflow: Overflow = "refuse"
    speculate: Speculate = "auto"  # auto: not where `exact` wants no other rounding
    grammar: str | None = None  # what the answer must follow (chatkv.model.grammar), None: nothing


@dataclass(frozen=True)
class Listener:
    """Who hears of a turn while it runs. `cancelled` is asked between chunks and tokens; on_token
    gets each sampled id and the logits [vocab_size] that it was drawn from, before its text."""

    on_text: Callable[[str], None] = lambda text: None
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    cancelled: Callable[[], bool] = lambda: False
    on_token: Callable[[int, Tensor], None] = lambda token, logits: None

    def waits(self) -> None:
        """There is no room in memory until others have given some back."""
        self.on_progress("waiting for memory", 0, 1)


@dataclass(frozen=True)
class TokenCounts:
    """prompt = reused + loaded + computed + remote: where the KV of everything before the reply
    came from (the pool, the disk, prefill, a prefill worker); generated: sampled and kept."""

    prompt: int
    reused: int
    loaded: int
    computed: int
    generated: int
    remote: int = 0


@dataclass(frozen=True)
class Timing:
    """Milliseconds since the turn began, except decode's rate; load_model_ms is the process's."""

    load_model_ms: float
    restore_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_tokens_per_s: float | None  # None: fewer than two tokens, no rate


def measures_to_json(
    tokens: TokenCounts,
    plan: Plan,
    plan_actual_ms: float,
    timing: Timing,
    speculation: SpeculationCounts,
    remote: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The measured part of a turn's JSON, which is also kept with the turn."""
    return {
        "tokens": asdict(tokens),
        "plan": {
            "chosen": plan.chosen,
            "predicted_ms": round(plan.predicted_ms, 2),
            "actual_ms": round(plan_actual_ms, 2),
            "alternatives_ms": {way: round(ms, 2) for way, ms in plan.alternatives_ms.items()},
            "because": plan.because,
        },
        "timing": {
            name: None if value is None else round(value, 2)
            for name, value in asdict(timing).items()
        },
        "speculation": asdict(speculation),
        "remote": remote,
    }


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
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    remote: dict[str, Any] | None = None  # what a prefill worker did (`Fetched.to_json`)

    def to_json(self) -> dict[str, Any]:
        """The object that `ask --json` prints."""
        measures = measures_to_json(
            self.tokens, self.plan, self.plan_actual_ms, self.timing, self.speculation, self.remote
        )
        return {
            "session": self.session,
            "turn": self.turn,
            "text": self.text,
            "finish_reason": self.finish_reason,
            **measures,
            "model": self.model,
            "notices": list(self.notices),
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> TurnResult:
        """The inverse of `to_json`, less the logits."""
        plan = fields["plan"]
        return cls(
            session=fields["session"],
            turn=fields["turn"],
            text=fields["text"],
            finish_reason=fields["finish_reason"],
            tokens=TokenCounts(**fields["tokens"]),
            plan=Plan(
                plan["chosen"],
                plan["predicted_ms"],
                plan["alternatives_ms"],
                plan.get("because", "fastest"),
            ),
            plan_actual_ms=plan["actual_ms"],
            timing=Timing(**fields["timing"]),
            model=fields["model"],
            notices=tuple(fields["notices"]),
            last_logits=None,
            speculation=SpeculationCounts(**fields["speculation"]),
            remote=fields.get("remote"),
        )
