"""A simulated cluster: workers that prefill, workers that decode, and links between them.

Nothing is computed: what a step takes, a prompt and a byte on the way, measured rates say. A worker
that decodes computes one token of every answer in a step, and beside them as much of its own
prompts as `engine/budget.py` would. A worker that prefills takes one prompt after the other, in
chunks, and sends KV layer by layer as it is computed; when all of it has come, the answer joins the
steps of its worker, whose first one computes the last token of the prompt.

A conversation stays with the worker that decodes it, which has the KV of what was said; so only
what is new goes over the link. What a prefill worker has of a conversation is its own earlier
prompts, or with a store that all can read, everything.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from traces import TraceConversation

from chatkv.engine.budget import CHUNK_TOKENS, LEAST_TOKENS, StepBudget
from chatkv.restore.cost import CostModel

MAX_STALL = StepBudget().max_stall

# Where prompts are computed: always apart, or there where the first token is expected sooner.
Send = Literal["always", "when it pays"]


@dataclass(frozen=True)
class Rates:
    """What one worker takes. `step_s`: of a step that decodes so many answers, in seconds."""

    cost: CostModel
    step_s: Mapping[int, float]

    def decode_s(self, num_answers: int) -> float:
        """A step of num_answers: between two that were measured on the line through them, beyond
        all as if each further answer took what the last ones did, below all as the fewest."""
        known = sorted(self.step_s)
        if num_answers <= known[0]:
            return self.step_s[known[0]]
        if len(known) == 1:
            return self.step_s[known[0]] * num_answers / known[0]
        after = next((at for at, one in enumerate(known) if one >= num_answers), len(known) - 1)
        low, high = known[after - 1], known[after]
        slope = (self.step_s[high] - self.step_s[low]) / (high - low)
        return self.step_s[high] + slope * (num_answers - high)

    def chunk_s(self, start: int, stop: int) -> float:
        """More of a prompt, beside other work: what begins a prompt is not in it."""
        return self.cost.prefill_s(start, stop) - (self.cost.prefill_fixed_s if stop > start else 0)


@dataclass(frozen=True)
class Link:
    """From a prefill worker to the others: one transfer after the other."""

    bytes_per_s: float
    delay_s: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """How many workers of each kind; without prefill workers each does both."""

    num_prefill: int
    num_decode: int
    rates: Rates
    link: Link
    kv_bytes_per_token: float
    send: Send = "always"
    is_store_shared: bool = False
    pieces: int = 30  # in which a chunk's KV leaves: one for each layer

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def name(self) -> str:
        if not self.num_prefill:
            return f"{self.num_decode} together"
        return f"{self.num_prefill}:{self.num_decode} apart"


@dataclass(eq=False)
class Request:
    """One turn, and when its tokens came. The reply's first is computed with the prompt's last."""

    conversation: int
    arrived_s: float
    history: int  # tokens of the log in front of it: their KV is where the answer is made
    prompt_end: int
    reply_tokens: int
    began_s: float = math.inf  # when somebody began to compute its prompt
    kv_s: float = math.inf  # when all KV of its prompt was where the answer is made
    first_s: float = math.inf
    last_s: float = math.inf
    was_sent: bool = False
    computed: int = 0  # tokens of its prompt, so far

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Per token behind the first; 0 where there is none."""
        return (self.last_s - self.first_s) / max(1, self.reply_tokens - 1)


@dataclass
class Ran:
    """What a simulation did. `gaps`: (seconds between two tokens of an answer, how often)."""

    requests: list[Request] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    sent_bytes: float = 0.0
    ended_s: float = 0.0
    prefill_busy_s: float = 0.0  # of all prefill workers together
    decode_busy_s: float = 0.0


class Events:
    """The simulated clock: what happens when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num = 0

    def at(self, when_s: float, happens: Callable[[], None]) -> None:
        self._num += 1  # of what is due at one time, what was put first is first
        heapq.heappush(self._due, (when_s, self._num, happens))

    def run(self) -> None:
        while self._due:
            self.now_s, _, happens = heapq.heappop(self._due)
            happens()


class DecodeWorker:
    """Steps over all of its answers; beside them, its own prompts, the oldest first."""

    def __init__(self, events: Events, rates: Rates, ran: Ran, on_end: Callable[[Request], None]):
        self._events, self._rates, self._ran, self._on_end = events, rates, ran, on_end
        self._left: dict[Request, int] = {}  # tokens that an answer still has to make
        self._prompts: deque[Request] = deque()
        self._joining: list[Request] = []
        # Those that are running: since when, seconds of each, and how many.
        self._steps: tuple[float, float, int] | None = None
        self._number = 0  # of the run of steps, so that one cut short is known

    @property
    def num_open(self) -> int:
        return len(self._left) + len(self._prompts) + len(self._joining)

    def prefill(self, request: Request) -> None:
        """Compute its prompt here, and answer."""
        self._prompts.append(request)
        self._cut()

    def answer(self, request: Request) -> None:
        """Its KV is here but for the last token."""
        self._joining.append(request)
        self._cut()

    def expected_s(self, request: Request) -> float:
        """Until its first token, were its prompt computed here now."""
        prompts = [*self._prompts, request]
        alone_s = sum(
            self._rates.chunk_s(one.history + one.computed, one.prompt_end) for one in prompts
        )
        return alone_s * (MAX_STALL / (MAX_STALL - 1) if self._left else 1)

    def _cut(self) -> None:
        """Somebody came: the step that runs is the last one of its kind."""
        if self._steps is None:
            self._begin()
            return
        since, each_s, num = self._steps
        done = max(1, math.ceil((self._events.now_s - since) / each_s - 1e-9))
        if done < num:
            self._run(since, each_s, done)

    def _begin(self) -> None:
        """The next steps, all alike."""
        for request in self._joining:
            self._left[request] = request.reply_tokens
        self._joining.clear()
        self._steps = None
        plain_s = self._rates.decode_s(len(self._left)) if self._left else 0.0
        if self._prompts:
            self._run(self._events.now_s, plain_s + self._take(plain_s), 1)
        elif self._left:
            self._run(self._events.now_s, plain_s, min(self._left.values()))

    def _take(self, plain_s: float) -> float:
        """Take a piece of the oldest prompt into the step; how much longer that makes it."""
        request = self._prompts[0]
        start = request.history + request.computed
        request.began_s = min(request.began_s, self._events.now_s)
        num = CHUNK_TOKENS
        if self._left:
            token_s = self._rates.chunk_s(start, start + 1)
            num = max(LEAST_TOKENS, min(num, int(plain_s * (MAX_STALL - 1) / token_s)))
        num = min(num, request.prompt_end - start)
        fixed_s = 0.0 if self._left or request.computed else self._rates.cost.prefill_fixed_s
        request.computed += num
        return fixed_s + self._rates.chunk_s(start, start + num)

    def _run(self, since_s: float, each_s: float, num: int) -> None:
        self._steps = since_s, each_s, num
        self._number += 1
        mine = self._number
        end_s = max(self._events.now_s, since_s + num * each_s)
        self._events.at(end_s, lambda: self._end() if self._number == mine else None)

    def _end(self) -> None:
        assert self._steps is not None
        _, each_s, num = self._steps
        now_s = self._events.now_s
        self._ran.decode_busy_s += num * each_s
        num_gaps = 0
        for request in list(self._left):
            is_first = request.first_s == math.inf
            if is_first:
                request.first_s = now_s - (num - 1) * each_s
            num_gaps += num - is_first
            self._give(request, self._left[request] - num)
        if num_gaps:
            self._ran.gaps.append((each_s, num_gaps))
        if self._prompts and self._prompts[0].computed == self._new_tokens(self._prompts[0]):
            request = self._prompts.popleft()
            request.kv_s = request.first_s = now_s
            self._give(request, request.reply_tokens - 1)
        self._begin()

    def _give(self, request: Request, left: int) -> None:
        self._left[request] = left
        if not left:
            del self._left[request]
            request.last_s = self._events.now_s
            self._on_end(request)

    @staticmethod
    def _new_tokens(request: Request) -> int:
        return request.prompt_end - request.history


class PrefillWorker:
    """One prompt after the other, in chunks; KV leaves as it is computed."""

    def __init__(self, events: Events, cluster: Cluster, ran: Ran):
        self._events, self._cluster, self._ran = events, cluster, ran
        self._free_s = 0.0  # when all that is asked for is computed
        self._link_free_s = 0.0
        self._kept: dict[int, int] = {}  # conversation -> tokens whose KV it has

    def prefill(self, request: Request, then: Callable[[Request], None]) -> None:
        """Compute its KV up to its last token, and send it; `then` when all has come."""
        times = self._times(request, self._events.now_s)
        request.was_sent = True
        request.began_s, self._free_s, self._link_free_s, request.kv_s = times
        self._kept[request.conversation] = request.prompt_end - 1
        num_tokens = request.prompt_end - 1 - request.history
        self._ran.sent_bytes += num_tokens * self._cluster.kv_bytes_per_token
        self._ran.prefill_busy_s += self._free_s - request.began_s
        self._events.at(request.kv_s, lambda: then(request))

    def expected_s(self, request: Request) -> float:
        """Until its KV would be where its answer is made, were it asked for now."""
        return self._times(request, self._events.now_s)[-1] - self._events.now_s

    def _times(self, request: Request, now_s: float) -> tuple[float, float, float, float]:
        """When computing begins and ends, when the link is free again, and when all has come."""
        rates, link = self._cluster.rates, self._cluster.link
        stop = request.prompt_end - 1
        start = self._start(request)
        began_s = at_s = max(now_s + link.delay_s, self._free_s)
        link_s = self._link_free_s
        if start < stop:
            at_s += rates.cost.prefill_fixed_s
        if request.history > start:  # nothing of this is sent, all else waits for it
            at_s += rates.chunk_s(start, request.history)
            start = request.history
        for first in range(start, stop, CHUNK_TOKENS):
            last = min(first + CHUNK_TOKENS, stop)
            chunk_s = rates.chunk_s(first, last)
            send_s = (last - first) * self._cluster.kv_bytes_per_token / link.bytes_per_s
            # Each layer's part may leave when it is computed, behind the one before it: what holds
            # it up most is the link, the first of them or the last.
            pieces = self._cluster.pieces
            link_s = max(
                link_s + send_s, at_s + chunk_s / pieces + send_s, at_s + chunk_s + send_s / pieces
            )
            at_s += chunk_s
        come_s = max(link_s if start < stop else at_s, at_s) + link.delay_s
        return began_s, at_s, link_s, come_s

    def _start(self, request: Request) -> int:
        """The first token whose KV it has to compute."""
        if self._cluster.is_store_shared:
            return request.history
        return min(self._kept.get(request.conversation, 0), request.history)


def simulate(cluster: Cluster, trace: Sequence[TraceConversation]) -> Ran:
    """Serve every turn of `trace`; deterministic. A turn comes when its writer has read the last
    answer and thought."""

    def request(one: TraceConversation, turn: int, arrived_s: float) -> Request:
        ends = one.prompt_end(turn), one.turns[turn].reply_tokens
        return Request(one.number, arrived_s, one.history(turn), *ends)

    events_of = {one.number: one for one in trace}
    turns = dict.fromkeys(events_of, 0)

    def following(ended: Request) -> Request | None:
        one = events_of[ended.conversation]
        turns[one.number] = turn = turns[one.number] + 1
        if turn == len(one.turns):
            return None
        return request(one, turn, ended.last_s + one.turns[turn].think_s)

    return serve(cluster, [request(one, 0, one.arrival_s) for one in trace], following)


def serve(
    cluster: Cluster,
    requests: Iterable[Request],
    following: Callable[[Request], Request | None] = lambda ended: None,
) -> Ran:
    """Serve `requests`, and what `following` lets come behind each."""
    events, ran = Events(), Ran()
    owners: dict[int, DecodeWorker] = {}

    def ended(request: Request) -> None:
        if (next_one := following(request)) is not None:
            arrive(next_one)

    decoders = [DecodeWorker(events, cluster.rates, ran, ended) for _ in range(cluster.num_decode)]
    prefillers = [PrefillWorker(events, cluster, ran) for _ in range(cluster.num_prefill)]

    def arrive(request: Request) -> None:
        ran.requests.append(request)
        events.at(request.arrived_s, lambda: place(request))

    def place(request: Request) -> None:
        owner = owners.get(request.conversation)
        if owner is None:
            owner = owners[request.conversation] = min(decoders, key=lambda one: one.num_open)
        if prefillers:
            remote = min(prefillers, key=lambda one: one.expected_s(request))
            pays = remote.expected_s(request) < owner.expected_s(request)
            if cluster.send == "always" or pays:
                remote.prefill(request, owner.answer)
                return
        owner.prefill(request)

    for one in requests:
        arrive(one)
    events.run()
    ran.ended_s = events.now_s
    return ran
