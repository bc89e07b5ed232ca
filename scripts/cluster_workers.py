"""The workers of a simulated cluster, on its clock. See cluster.py."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

from cluster_parts import Cluster, Ran, Rates, Request

from chatkv.engine.budget import CHUNK_TOKENS, StepBudget

MAX_STALL = StepBudget().max_stall


class Events:
    """The simulated clock: what happens when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num = 0

    def at(self, when_s: float, happens: Callable[[], None]) -> None:
        self._num += 1  # of what is due at one time, what was put first is first
        heapq.heappush(self._due, (when_s, self._num, happens))

    def run(self, is_over: Callable[[], bool]) -> None:
        while self._due and not is_over():
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
            num = max(1, min(num, int(plain_s * (MAX_STALL - 1) / token_s + 1e-9)))
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
            self._ran.gaps.append((now_s, each_s, num_gaps))
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
