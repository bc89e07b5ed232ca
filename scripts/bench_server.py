#!/usr/bin/env python3
"""The server under load, over loopback: for five minutes, 32 clients that stream, leave in the
middle of an answer, and send nonsense.

Each client holds conversations as most clients do: with all messages, each time. Afterwards every
answer that was heard to its end must be in the store, as it was heard; nothing may have failed
inside the server; it must take no more memory than before and a pool full of KV, and beside KV no
more at the end than at the beginning; and times to the first token are printed beside those of a
client that is alone. CHATKV_BENCH_SECONDS makes it shorter.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "store")]

from bench_common import Figure, Options, run, say  # noqa: E402

SEED = 8
ANSWER_TOKENS = 24
MAX_TURNS = 6  # of one conversation; then its client begins another one
WORDS = [
    "the",
    "chat",
    "goes",
    "on",
    "where",
    "it",
    "was",
    "left",
    "and",
    "the",
    "history",
    "is",
    "not",
    "read",
    "again",
]
NONSENSE: tuple[tuple[str, bytes], ...] = (
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", b'{"messages": []}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "model": "../../etc/passwd"}'),
    ("/v1/messages", b'{"messages": 5}'),
    ("/api/chat", b'{"messages": [{"role": "nobody"}]}'),
    ("/nowhere", b"{}"),
)


@dataclass(frozen=True)
class Sizes:
    num_clients: int
    seconds: float


QUICK = Sizes(8, 20.0)
FULL = Sizes(32, float(os.environ.get("CHATKV_BENCH_SECONDS", "300")))
SAMPLE_S = 2.0


@dataclass
class Heard:
    """What all clients have met."""

    ttft_s: list[float] = field(default_factory=list)
    answers: list[tuple[str, str]] = field(default_factory=list)  # session, text
    num_left: int = 0
    num_nonsense: int = 0
    failures: list[str] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)

    def beside_kv(self) -> tuple[float, float, float]:
        """Memory for all but KV, in MiB: the median of each third of the time. Blocks of the pool
        that were used once stay the process's."""
        most = accumulate((one.used_kv for one in self.memory), max)
        rest = [one.whole - used for one, used in zip(self.memory, most, strict=True)]
        third = max(len(rest) // 3, 1)
        parts = rest[:third], rest[third : 2 * third] or rest, rest[-third:]
        first, middle, last = (statistics.median(part) for part in parts)
        return first, middle, last


@dataclass(frozen=True)
class Memory:
    """In MiB. The pool is mapped at the start, and takes memory as its blocks are first used."""

    whole: float
    used_kv: float
    pool: float

    @property
    def most(self) -> float:
        """What it would be, were every block of the pool used."""
        return self.whole - self.used_kv + self.pool


@dataclass
class Server:
    url: str

    def memory_mib(self) -> Memory:
        """What the process takes, and what of that its KV."""
        from chatkv.client.link import Link
        from chatkv.paths import folders

        status = Link(folders().socket).call("GET", "/status")
        (model,) = status["models"]
        kv, per_token = model["kv_tokens"], model["kv_bytes_per_token"] / (1 << 20)
        used, pool = (kv["total"] - kv["free"]) * per_token, kv["total"] * per_token
        return Memory(own_mib(status["pid"]), used, pool)


def own_mib(pid: int) -> float:
    """Memory that is the process's alone: pages of LMDB's file are the system's to take back."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) / 1024


def measure(options: Options) -> list[Figure]:
    sizes = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory() as home:
        os.environ["CHATKV_HOME"] = home
        with serving() as server:
            alone = Heard()
            client(server, alone, random.Random(SEED), time.monotonic() + 5, is_calm=True)
            say(f"alone: {len(alone.ttft_s)} answers")
            before = server.memory_mib()
            heard = under_load(server, sizes)
            after = server.memory_mib()
            pages = metrics_of(server)
        lost = lost_answers(heard)
    return figures(sizes, alone, heard, (before, after), pages, lost)


def under_load(server: Server, sizes: Sizes) -> Heard:
    """What the clients met."""
    heard, ends = Heard(), time.monotonic() + sizes.seconds
    threads = [
        threading.Thread(target=client, args=(server, heard, random.Random(SEED + 1 + n), ends))
        for n in range(sizes.num_clients)
    ]
    for thread in threads:
        thread.start()
    said_s = time.monotonic()
    while any(thread.is_alive() for thread in threads):
        time.sleep(SAMPLE_S)
        heard.memory.append(memory := server.memory_mib())
        if time.monotonic() - said_s > 20:
            said_s = time.monotonic()
            full = memory.used_kv / memory.pool
            say(f"{len(heard.answers)} answers; {memory.whole:.0f} MiB, pool {full:.0%} full")
    return heard


def client(
    server: Server, heard: Heard, draw: random.Random, ends: float, is_calm: bool = False
) -> None:
    """One client until the end: conversations, and in between what clients should not do."""
    messages: list[dict[str, str]] = []
    while time.monotonic() < ends:
        chance = 1.0 if is_calm else draw.random()
        try:
            if chance < 0.1:
                send_nonsense(server, heard, draw)
                continue
            if len(messages) >= 2 * MAX_TURNS:
                messages = []
            said = " ".join(draw.choices(WORDS, k=draw.randint(3, 40)))
            asked = [*messages, {"role": "user", "content": said}]
            answer = stream(
                server, heard, asked, leaves_after=draw.randint(0, 5) if chance < 0.3 else None
            )
            if answer is not None:
                messages = [*asked, {"role": "assistant", "content": answer}]
        except (OSError, ValueError, http.client.HTTPException) as error:
            heard.failures.append(f"{type(error).__name__}: {error}")


def stream(
    server: Server, heard: Heard, messages: list[dict[str, str]], leaves_after: int | None
) -> str | None:
    """One streamed answer; None where the client left."""
    body = {"messages": messages, "stream": True, "max_tokens": ANSWER_TOKENS}
    connection = connected(server)
    began = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"{response.status}: {response.read()[:200]!r}")
    text, num_pieces = "", 0
    for line in response:
        if line.startswith(b"data: [DONE]"):
            break
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(f"in a stream: {event['error']}")
        piece = "".join(one["delta"].get("content") or "" for one in event["choices"])
        if piece and not text:
            heard.ttft_s.append(time.monotonic() - began)
        text += piece
        num_pieces += bool(piece)
        if leaves_after is not None and num_pieces >= leaves_after:
            heard.num_left += 1
            response.close()
            connection.close()
            return None
    heard.answers.append((response.getheader("X-Chatkv-Session") or "", text))
    connection.close()
    return text


def send_nonsense(server: Server, heard: Heard, draw: random.Random) -> None:
    """What is to be refused, and nothing more."""
    path, body = draw.choice(NONSENSE)
    connection = connected(server)
    connection.request("POST", path, body)
    response = connection.getresponse()
    response.read()
    connection.close()
    heard.num_nonsense += 1
    if not 400 <= response.status < 500:
        heard.failures.append(f"{path} was answered with {response.status}")


def connected(server: Server) -> http.client.HTTPConnection:
    place = urlsplit(server.url)
    return http.client.HTTPConnection(str(place.hostname), place.port, timeout=120)


def metrics_of(server: Server) -> dict[str, float]:
    connection = connected(server)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def lost_answers(heard: Heard) -> int:
    """Answers that were heard whole, and are not in the store as they were heard."""
    from chatkv.paths import folders
    from chatkv_store.conversations import Conversations

    with Conversations(folders().conversations) as store:
        kept: dict[str, set[str]] = {}
        for session, _ in heard.answers:
            if session not in kept:
                kept[session] = {turn.reply_text for turn in store.tree(session)}
    return sum(text not in kept[session] for session, text in heard.answers)


@contextmanager
def serving() -> Iterator[Server]:
    """`chatkv serve`, once its model answers."""
    path = os.pathsep.join(sys.path[:3])
    model = os.environ.get("CHATKV_TEST_GGUF")
    process = subprocess.Popen(
        [sys.executable, "-m", "chatkv", "serve", "--port", "0", *(["-m", model] if model else [])],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        if "serving at" not in line:
            raise SystemExit(line.strip())
        server = Server(line.split()[3].rstrip(","))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        stream(server, Heard(), [{"role": "user", "content": "Hello"}], None)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def figures(
    sizes: Sizes,
    alone: Heard,
    heard: Heard,
    memory: tuple[Memory, Memory],
    counted: dict[str, float],
    lost: int,
) -> list[Figure]:
    about = f"{sizes.num_clients} clients, {sizes.seconds:.0f} s"
    for failure in sorted(set(heard.failures))[:5]:
        say(f"failed: {failure}")
    failed = len(heard.failures) + sum(
        count for name, count in counted.items() if 'status="5' in name
    )
    tokens = {
        source: counted.get(f'chatkv_tokens_total{{source="{source}"}}', 0.0)
        for source in ("reused", "loaded", "computed")
    }
    prompt = sum(tokens.values()) or 1.0
    single = statistics.median(alone.ttft_s) * 1e3
    first, middle, last = heard.beside_kv()
    return [
        Figure(
            "answers lost", float(lost), "", goal=0.0, goal_of="value", goal_is="<=", note=about
        ),
        Figure("requests that failed", float(failed), "", goal=0.0, goal_of="value", goal_is="<="),
        Figure("answers heard whole", float(len(heard.answers)), ""),
        Figure("answers left in the middle", float(heard.num_left), ""),
        Figure("nonsense refused", float(heard.num_nonsense), ""),
        Figure("answers per second", len(heard.answers) / sizes.seconds, "1/s"),
        Figure(
            "memory at the end",
            memory[1].whole,
            "MiB",
            memory[0].most,
            "before, were the pool full",
            goal=1.05,
            goal_is="<=",
        ),
        Figure(
            "memory beside KV, last third",
            last,
            "MiB",
            first,
            "first third",
            goal=1.05,
            goal_is="<=",
            note=f"second third {middle:.0f} MiB",
        ),
        Figure("TTFT, median", quantile(heard.ttft_s, 0.5), "ms", single, "one client alone"),
        Figure("TTFT, p99", quantile(heard.ttft_s, 0.99), "ms", single, "one client alone"),
        Figure("prompt tokens not computed", 100 * (1 - tokens["computed"] / prompt), "%"),
    ]


def quantile(values_s: list[float], share: float) -> float:
    """In milliseconds."""
    ordered = sorted(values_s)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1e3


if __name__ == "__main__":
    run("the server under load", measure)
