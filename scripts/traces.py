"""Made-up multi-turn conversations with the statistics of real ones: who speaks when, and how much.

What is published of ShareGPT, and what a trace is drawn to have:

- 73 % of the conversations have more than one turn (CachedAttention, arXiv 2403.19708), and one has
  5 to 6 turns on average: here one turn, or two and a geometric number more.
- A prompt has 161 tokens on average and a reply 338 (PagedAttention, arXiv 2309.06180): here
  log-normal, since most are short and a few are very long.

ShareGPT has no times. Conversations arrive as a Poisson process, as such benchmarks let them. How
long a person thinks is our own assumption: seconds to minutes mostly, and now and then hours, since
chats are left and taken up again. So are the system prompts that conversations begin with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

MULTI_TURN_SHARE = 0.73
MEAN_TURNS = 5.5
MEAN_PROMPT_TOKENS, PROMPT_SIGMA = 161, 1.1
MEAN_REPLY_TOKENS, REPLY_SIGMA = 338, 0.8

# Ids say whose token it is and at which place, so that no two texts share a token by accident.
_PLACES = 1 << 16
_FIRST_SYSTEM = 1 << 15


@dataclass(frozen=True)
class TraceTurn:
    """What one message adds to the log, and how long after the last reply it is sent."""

    prompt_tokens: int  # the first one's without the system prompt
    reply_tokens: int
    think_s: float  # 0 in the first turn


@dataclass(frozen=True)
class TraceConversation:
    """One conversation from its first message on."""

    number: int
    arrival_s: float
    system: int  # which of the shared system prompts it begins with
    system_tokens: int
    turns: tuple[TraceTurn, ...]

    @property
    def num_tokens(self) -> int:
        """Length of the log after the last turn."""
        said = sum(turn.prompt_tokens + turn.reply_tokens for turn in self.turns)
        return self.system_tokens + said

    def history(self, turn: int) -> int:
        """Length of the log in front of turn `turn`, counted from 0."""
        said = sum(one.prompt_tokens + one.reply_tokens for one in self.turns[:turn])
        return self.system_tokens + said if turn else 0

    def prompt_end(self, turn: int) -> int:
        """Length of the log when the turn's reply begins."""
        return self.history(turn + 1) - self.turns[turn].reply_tokens

    def token_ids(self, num_tokens: int) -> list[int]:
        """The log's first ids; conversations share those of their system prompt, and no others."""
        shared = min(num_tokens, self.system_tokens)
        system = (_FIRST_SYSTEM + self.system) * _PLACES
        own = self.number * _PLACES
        return [*range(system, system + shared), *range(own + shared, own + num_tokens)]


@dataclass(frozen=True)
class TraceSpec:
    """What to draw; the same spec always gives the same trace."""

    num_conversations: int
    seed: int = 0
    conversations_per_hour: float = 30.0
    max_tokens: int = 32768  # of a log: a conversation ends with the turn that still fits
    prompt_tokens: float = MEAN_PROMPT_TOKENS  # on average
    num_systems: int = 3
    system_tokens: int = 300
    think_s: float = 40.0  # median, within a sitting
    away_odds: float = 0.25  # that a message is sent after an absence instead
    away_s: float = 6 * 3600.0  # median


def generate(spec: TraceSpec) -> list[TraceConversation]:
    """The conversations of `spec`, in the order of their arrival."""
    if not 0 < spec.max_tokens <= _PLACES or not 0 < spec.num_conversations <= _FIRST_SYSTEM:
        raise ValueError(f"at most {_FIRST_SYSTEM} conversations of at most {_PLACES} tokens")
    random = Random(spec.seed)
    found = []
    now_s = 0.0
    for number in range(spec.num_conversations):
        now_s += random.expovariate(spec.conversations_per_hour / 3600)
        # The first system prompt is used most, as one assistant is.
        system = min(int(random.expovariate(1.0)), spec.num_systems - 1)
        turns = tuple(_turns(random, spec))
        found.append(TraceConversation(number, now_s, system, spec.system_tokens, turns))
    return found


def _turns(random: Random, spec: TraceSpec) -> Sequence[TraceTurn]:
    turns: list[TraceTurn] = []
    room = spec.max_tokens - spec.system_tokens
    for index in range(_num_turns(random)):
        prompt = log_normal(random, spec.prompt_tokens, PROMPT_SIGMA)
        reply = log_normal(random, MEAN_REPLY_TOKENS, REPLY_SIGMA)
        think_s = _think_s(random, spec)
        room -= prompt + reply
        if room < 0 and turns:
            break
        if room < 0:  # the very first turn: cut it, a conversation has one
            prompt, reply = max(1, spec.max_tokens - spec.system_tokens - 1), 1
        turns.append(TraceTurn(prompt, reply, think_s if index else 0.0))
    return turns


def _num_turns(random: Random) -> int:
    if random.random() >= MULTI_TURN_SHARE:
        return 1
    more = (MEAN_TURNS - (1 - MULTI_TURN_SHARE)) / MULTI_TURN_SHARE - 2
    return 2 + int(random.expovariate(math.log1p(1 / more)))  # geometric with that mean


def log_normal(random: Random, mean: float, sigma: float) -> int:
    """At least 1, `mean` on average."""
    return max(1, round(random.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


def _think_s(random: Random, spec: TraceSpec) -> float:
    is_away = random.random() < spec.away_odds
    return random.lognormvariate(math.log(spec.away_s if is_away else spec.think_s), 1.0)
