"""What it would cost to have a prompt's KV computed by a prefill worker.

    t_remote(s → e) = queue + overhead + max(P, T) + min(P, T) / pieces
    P = scale * t_prefill(s → e) at the worker's own rates,   T = bytes / bandwidth

KV travels while what follows it is computed, piece by piece, so the longer of the two counts whole
and of the other only what is left when it ends. A piece is a value on the wire, and a chunk of
tokens through a shared store, where T is to encode and to commit KV there and to load it here. Each
of the two ways has a `RemoteCost` of its own. Rates and queue are the worker's own word, fresh;
`scale`, `overhead` and bandwidth follow what each fetch took. None of it outlives the process: the
worker knows its rates, and a link is measured in an instant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from chatkv.apart.transport import Rates
from chatkv.engine.budget import CHUNK_TOKENS
from chatkv.restore.cost import prefill_s

_WEIGHT = 0.3  # how far one observation moves what is believed
_MOST = 4.0  # and by how many times at most it is off
# Until it was tried, putting KV into the store and loading it is taken for so many times a load.
_STORE_IS_LOADS = 3.0
# What is never tried is never corrected: see `CostModel.after_no_load`.
_UNTRIED = 0.95


@dataclass(frozen=True)
class Way:
    """Fetching KV as it is predicted, in seconds."""

    queue_s: float
    overhead_s: float
    prefill_s: float
    transfer_s: float
    num_pieces: int
    through_store: bool = False

    @property
    def seconds(self) -> float:
        long, short = sorted((self.prefill_s, self.transfer_s), reverse=True)
        return self.queue_s + self.overhead_s + long + short / self.num_pieces


def untried_store(load_s_per_byte: float) -> RemoteCost:
    """What a way through the store is taken for before the first."""
    return RemoteCost(bytes_per_s=1 / (_STORE_IS_LOADS * max(load_s_per_byte, 1e-12)))


@dataclass(frozen=True)
class RemoteCost:
    """See above; `error` is the running mean of |actual / predicted - 1|."""

    bytes_per_s: float = 1e9
    overhead_s: float = 0.002
    scale: float = 1.0
    error: float | None = None

    def way(
        self,
        rates: Rates,
        queue_s: float,
        start: int,
        stop: int,
        num_bytes: int,
        num_values: int,
        through_store: bool = False,
    ) -> Way:
        """Tokens [start, stop), whose KV is so many bytes in so many values of each block."""
        num_chunks = max(1, -(-(stop - start) // CHUNK_TOKENS))
        return Way(
            queue_s,
            self.overhead_s,
            self.scale * prefill_s(rates, start, stop),
            num_bytes / self.bytes_per_s,
            num_chunks if through_store else num_chunks * num_values,
            through_store,
        )

    def after(
        self, way: Way, seconds: float, queue_s: float, prefill_s: float, bytes_per_s: float | None
    ) -> RemoteCost:
        """Corrected by one fetch: what it took in all, waiting and computing there, and the rate
        at which its bytes came, where that could be told."""
        scale = _damped(prefill_s, way.prefill_s) if prefill_s and way.prefill_s else 1.0
        rate = self.bytes_per_s
        if bytes_per_s is not None:  # the first one tells more than what was believed before
            rate = bytes_per_s if self.error is None else rate * _damped(bytes_per_s, rate)
        transfer_s = way.transfer_s * self.bytes_per_s / rate
        told = replace(way, queue_s=queue_s, overhead_s=0, prefill_s=prefill_s)
        beyond_s = max(0.0, seconds - replace(told, transfer_s=transfer_s).seconds)
        error = min(abs(seconds / max(way.seconds, 1e-9) - 1), _MOST)
        return RemoteCost(
            rate,
            self.overhead_s + _WEIGHT * (min(beyond_s, 1.0) - self.overhead_s),
            self.scale * scale,
            error if self.error is None else self.error + _WEIGHT * (error - self.error),
        )

    def after_none(self) -> RemoteCost:
        """Nothing was fetched, because that seemed slower."""
        return replace(
            self,
            bytes_per_s=self.bytes_per_s / _UNTRIED,
            overhead_s=self.overhead_s * _UNTRIED,
            scale=self.scale * _UNTRIED,
        )


def _damped(actual: float, predicted: float) -> float:
    ratio = min(max(actual / max(predicted, 1e-9), 1 / _MOST), _MOST)
    return float(ratio**_WEIGHT)
