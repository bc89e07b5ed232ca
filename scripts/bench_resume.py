#!/usr/bin/env python3
"""Resuming a conversation against computing it again, and our speed against transformers.

Every resume runs in a process of its own, with the KV file dropped from the page cache where the
system permits; reload and re-prefill take turns. Prefill and decode run beside transformers (sdpa
attention, DynamicCache, same weights, dtype and threads), the two taking turns too.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "store")]

from bench_common import Figure, Options, run, say  # noqa: E402

QUESTION = "In one sentence, what was that about?"
LENGTHS = (512, 2048, 4096, 6144)
DECODE_STEPS = 8


def measure(options: Options) -> Iterator[Figure]:
    repeat = 2 if options.quick else 5
    with tempfile.TemporaryDirectory() as home:
        os.environ["CHATKV_HOME"] = home
        yield from bench_commands()
        for num_tokens in (1024,) if options.quick else (1024, 4096, 7900):
            yield from bench_resume(num_tokens, repeat)
        yield from bench_beside_transformers((512, 1024) if options.quick else LENGTHS)


# --- resume -----------------------------------------------------------------------------------


def bench_resume(num_tokens: int, repeat: int) -> list[Figure]:
    """Figures of a conversation with num_tokens tokens of history."""
    label = f"{num_tokens / 1024:.2g}k tokens"
    say(f"resuming {label} ...")
    session = turn_in_process(history=num_tokens)["session"]
    runs: dict[str, list[dict[str, Any]]] = {"reload": [], "re-prefill": [], "warm": []}
    dropped = True
    for _ in range(repeat):
        for way, results in runs.items():
            if way != "warm":
                dropped &= drop_page_cache(Path(os.environ["CHATKV_HOME"]))
            wanted = "reload" if way == "warm" else way
            results.append(turn_in_process(session=session, restore=wanted))
            assert results[-1]["plan"]["chosen"] == wanted
    ttft = {
        way: median(results, lambda run: run["timing"]["ttft_ms"]) for way, results in runs.items()
    }
    figures = [
        Figure(
            f"TTFT after a restart, {label}, page cache {cache}",
            ttft[way],
            "ms",
            ttft["re-prefill"],
            "re-prefill",
            goal=20 if num_tokens == 4096 and way == "reload" else None,
            note=None if dropped or way == "warm" else "the page cache could not be dropped: warm",
            less_is_better=True,
        )
        for way, cache in (("reload", "dropped"), ("warm", "warm"))
    ]
    if num_tokens == 4096:
        figures.append(_start_to_first_token(runs["warm"], label))
    if num_tokens > 4096:
        peak = max(run["peak_rss"] for run in runs["reload"] + runs["warm"])
        figures.append(
            Figure(
                f"peak memory of a resumed ask, {label}",
                peak / 1e9,
                "GB",
                goal=1.5,
                goal_of="value",
                goal_is="<=",
            )
        )
    return figures


def _start_to_first_token(warm: list[dict[str, Any]], label: str) -> Figure:
    parts = {
        "import torch": median(warm, lambda run: run["import_s"] * 1e3),
        "load the model": median(warm, lambda run: run["timing"]["load_model_ms"]),
        "restore": median(warm, lambda run: run["timing"]["restore_ms"]),
        "prefill": median(warm, lambda run: run["timing"]["prefill_ms"]),
    }
    return Figure(
        f"process start to first token, {label}, warm",
        median(warm, lambda run: run["first_token_s"]),
        "s",
        goal=3,
        goal_of="value",
        goal_is="<=",
        note=", ".join(f"{name} {value:.0f} ms" for name, value in parts.items()),
    )


def turn_in_process(**task: Any) -> dict[str, Any]:
    """One turn in a new process; its JSON, and what `one_turn` adds to it."""
    done = subprocess.run(
        [sys.executable, __file__, "--turn", json.dumps(task | {"spawned": time.time()})],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"a turn failed: {done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def one_turn(task: dict[str, Any]) -> None:
    """In the child: a turn that makes a history of `history` tokens, or one that resumes it."""
    import resource

    from chatkv.client import ChatRequest, open_chat
    from chatkv.paths import folders

    began = time.perf_counter()
    import torch  # noqa: F401  # timed apart: it is half of a start

    import_s = time.perf_counter() - began
    from chatkv.engine.options import SamplingOptions
    from chatkv.session.turn import Listener, TurnOptions
    from chatkv_store.conversations import Conversations

    first_token: list[float] = []
    session = task.get("session")
    if session is not None:  # each run resumes the same history, none the turns of another
        with Conversations(folders().conversations) as conversations:
            session = conversations.fork(session).id
    with open_chat(folders(), ChatRequest(resume=session, seed=1)) as chat:
        text, max_tokens = QUESTION, 8
        if "history" in task:
            text, max_tokens = text_of(chat.runtime.tokenizer, task["history"] - 44), 4
        result = chat.conversation.send(
            text,
            TurnOptions(
                SamplingOptions(temperature=0),
                max_tokens=max_tokens,
                restore=task.get("restore", "auto"),
            ),
            Listener(on_text=lambda piece: first_token.append(time.time())),
        )
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    extra = {
        "import_s": import_s,
        "first_token_s": (first_token or [time.time()])[0] - task["spawned"],
        "peak_rss": peak_rss,
    }
    print(json.dumps(result.to_json() | extra))


def text_of(tokenizer: Any, num_tokens: int) -> str:
    """English text of about num_tokens tokens, the same on every machine."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return str(tokenizer.decode(tokenizer.encode(text[: 8 * num_tokens])[:num_tokens]))


def drop_page_cache(folder: Path) -> bool:
    """Let the system forget the files in `folder`; False where it may not have."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return True
    except OSError:
        pass
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
    return True


def median(runs: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(map(value, runs))


# --- commands ---------------------------------------------------------------------------------


def bench_commands() -> list[Figure]:
    """How long the commands take that need no model."""
    program = [sys.executable, "-c", "from chatkv.cli.main import main; main()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path[:3])}
    bare = statistics.median(run_s([sys.executable, "-c", ""], environment) for _ in range(9))
    figures = []
    for words in (["--help"], ["cache", "ls"]):
        run_s([*program, *words], environment)
        figures.append(
            Figure(
                f"chatkv {' '.join(words)}",
                statistics.median(run_s([*program, *words], environment) for _ in range(9)),
                "s",
                bare,
                "python -c ''",
                goal=0.2,
                goal_of="value",
                goal_is="<=",
                less_is_better=True,
            )
        )
    return figures


def run_s(command: list[str], environment: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, env=environment, capture_output=True, check=False)
    return time.perf_counter() - began


# --- beside transformers ----------------------------------------------------------------------


def bench_beside_transformers(lengths: tuple[int, ...]) -> list[Figure]:
    """Prefill and decode tokens per second of both, in one process."""
    import torch

    from chatkv.paths import folders
    from chatkv.runtime import Runtime
    from chatkv_store.conversations import Conversations

    home = folders().make()
    figures = []
    with Conversations(home.conversations) as conversations, Runtime(home, conversations) as us:
        them = reference(us)
        generator = torch.Generator().manual_seed(0)
        vocab_size = us.prepared.config.vocab_size
        ids = torch.randint(100, vocab_size, (max(lengths),), generator=generator)
        name = f"transformers {us.prepared.dtype}, {torch.get_num_threads()} threads"
        for length in lengths:
            say(f"beside transformers, {length} tokens ...")
            ours, theirs = OurRun(us.engine, ids[:length]), TransformersRun(them, ids[:length])
            prefill = alternate(ours.prefill, theirs.prefill)
            decode = alternate(ours.decode, theirs.decode)
            ours.close()
            for kind, count, (our_s, their_s), goal in (
                (f"prefill, {length} tokens", length, prefill, 1),
                (f"decode, {length} tokens of context", DECODE_STEPS, decode, 2),
            ):
                figures.append(
                    Figure(kind, count / our_s, "tokens/s", count / their_s, name, goal=goal)
                )
    return figures


class OurRun:
    """Prefill and decode as a turn does them."""

    def __init__(self, engine: Any, ids: Any) -> None:
        from chatkv.engine.sequence import TokenSequence

        self.engine, self.ids = engine, ids.tolist()
        self.sequence = TokenSequence()

    def prefill(self) -> None:
        self.sequence.become(self.ids, num_cached=0)
        self.logits = self.engine.prefill(self.sequence)

    def decode(self) -> None:
        from chatkv.engine.options import SamplingOptions
        from chatkv.engine.sampling import Sampler

        sampler = Sampler(SamplingOptions(temperature=0), seed=0)
        # One more token than steps: the last one drawn is not computed.
        for _ in self.engine.decode(
            self.sequence, self.logits, sampler, frozenset(), DECODE_STEPS + 1
        ):
            pass
        self.sequence.become(self.ids, num_cached=len(self.ids))

    def close(self) -> None:
        self.engine.pool.release(self.sequence.run)


class TransformersRun:
    """The same work in transformers: prefill fills a DynamicCache, decode extends it."""

    def __init__(self, model: Any, ids: Any) -> None:
        self.model, self.ids, self.cache = model, ids[None], None

    def prefill(self) -> None:
        from transformers import DynamicCache

        self.cache = DynamicCache()
        self.model(self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def decode(self) -> None:
        for _ in range(DECODE_STEPS):
            self.model(self.ids[:, :1], past_key_values=self.cache, use_cache=True)
        self.cache.crop(self.ids.shape[1])  # type: ignore[attr-defined]


def alternate(
    ours: Callable[[], None], theirs: Callable[[], None], repeat: int = 5
) -> tuple[float, float]:
    """Median seconds of both, run in turns after one warm-up each."""
    import torch

    times: tuple[list[float], list[float]] = ([], [])
    with torch.inference_mode():
        for round_ in range(repeat + 1):
            for work, seconds in zip((ours, theirs), times, strict=True):
                began = time.perf_counter()
                work()
                if round_:
                    seconds.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def reference(runtime: Any) -> Any:
    """transformers' model of the same architecture with the very same weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from chatkv.model.weights import load_weights

    config = runtime.prepared.config
    theirs = AutoConfig.for_model(
        config.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        max_position_embeddings=config.max_position,
        tie_word_embeddings=config.tie_embeddings,
    )
    dtype = getattr(torch, runtime.prepared.dtype)
    model = AutoModelForCausalLM.from_config(theirs, dtype=dtype, attn_implementation="sdpa")
    model.load_state_dict(dict(load_weights(runtime.prepared)), strict=False)
    return model.eval()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        one_turn(json.loads(sys.argv[2]))
    else:
        run(__doc__.splitlines()[0], measure)
