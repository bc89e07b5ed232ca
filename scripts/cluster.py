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

from collections.abc import Callable, Iterable, Sequence

from cluster_parts import Cluster, Ran, Request
from cluster_workers import DecodeWorker, Events, PrefillWorker
from traces import TraceConversation


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
    until: Callable[[], bool] = lambda: False,
) -> Ran:
    """Serve `requests`, and what `following` lets come behind each, to the end of all or `until`
    that holds."""
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
    events.run(until)
    ran.ended_s = events.now_s
    return ran
