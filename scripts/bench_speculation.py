#!/usr/bin/env python3
"""Answers with drafts beside plain ones, in one run: how many tokens a step says, and how fast.

Three kinds of answer, each greedy and sampled: chat; quoting and editing a longer text that the
prompt holds; code. Each prompt is answered without drafts and with every source of drafts in turn,
several times; the same tokens come out each time, and the median time counts. Before that: what a
step with drafts takes, as a multiple of one without, after short and long histories.
"""

from __future__ import annotations

import inspect
import os
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "store")]

from bench_common import Figure, Options, run, say  # noqa: E402

SOURCES = ("ngram", "mtp", "auto")
REPEATS = {True: 1, False: 3}
TOKENS = {True: 44, False: 160}
# What the model has to do, and the goal for the median speed-up of a source.
GOALS = {("quoting", "ngram"): 2.0, ("chat", "mtp"): 1.5}
NEVER_SLOWER = 0.97
DRAFTS = (1, 4, 8, 15)
HISTORIES = {True: (256, 1024), False: (256, 2048, 7000)}


def prompts(quick: bool) -> dict[str, list[str]]:
    text = " ".join(topics["sequence-types"].split())[:700]
    names = "\n".join(f"- {name}" for name in list(topics)[:40])
    code = inspect.getsource(textwrap.dedent)[:900]
    kinds = {
        "chat": [
            "What is a good way to learn to swim as an adult?",
            "Write three sentences about the moon.",
            "Why do leaves turn red in autumn?",
        ],
        "quoting": [
            f'Please copy the following paragraph exactly as it is.\n\n"{text}"',
            f"Output the following list again, unchanged:\n\n{names}",
            f"Proofread this text and return the corrected version:\n\n{_STORY}",
        ],
        "code": [
            f"Fix typos in this code and return the whole file.\n\n```python\n{code}\n```",
            "Write a Python class for a stack with push, pop, peek and is_empty, with docstrings.",
        ],
    }
    return {kind: texts[: 2 if quick else None] for kind, texts in kinds.items()}


_STORY = """\
The sun is a star. It is the center of our solar system, and all planets move around it. Light from
the sun takes about eight minutes to reach the earth. Without the sun there would be no life. Plants
need its light to grow, and animals need plants to eat. People have always looked at the sun, and
many cultures made it a god. Today we know that it is a ball of hot gas, and that it will shine for
another five billion years. Then it will grow to a red giant, and swallow Mercury and Venus."""


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    seconds: float  # from the first token to the last
    counts: Any

    @property
    def tokens_per_step(self) -> float:
        return (len(self.tokens) - 1) / max(self.counts.steps, 1)


def measure(options: Options) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"CHATKV_HOME": home, "CHATKV_CALIBRATE": "0"}
        from chatkv.client import ChatRequest, open_chat
        from chatkv.paths import folders

        with open_chat(folders(), ChatRequest()) as chat:
            parts = chat.runtime.scratch_parts()
            yield from step_costs(parts.engine, options.quick)
            for kind, texts in prompts(options.quick).items():
                yield from speeds(parts, kind, texts, options.quick)


# --- a step ---------------------------------------------------------------------------------------


def step_costs(engine: Any, quick: bool) -> Iterator[Figure]:
    from chatkv.engine.piece import Piece
    from chatkv.engine.sequence import TokenSequence

    for history in HISTORIES[quick]:
        sequence = TokenSequence([(7 * n) % 30000 + 100 for n in range(history)])
        with engine.memory.use(sequence):
            engine.prefill(sequence)
            engine.pool.reserve(sequence.run, history + max(DRAFTS))

            def step(num_drafted: int, sequence: Any = sequence, history: int = history) -> float:
                draft = sequence.ids[:num_drafted]
                piece = Piece(sequence, history - 1, history, is_decode=True, draft=draft)
                began = time.perf_counter()
                engine.scheduler.run(piece)
                return time.perf_counter() - began

            times: dict[int, list[float]] = {count: [] for count in (0, *DRAFTS)}
            for _ in range(REPEATS[quick] * 6):
                for count, seen in times.items():
                    seen.append(step(count))
            engine.scheduler.leave(sequence)
        plain_s = statistics.median(times[0])
        for count in DRAFTS:
            yield Figure(
                f"step with {count} drafted, {history} tokens of history",
                statistics.median(times[count]) * 1e3,
                "ms",
                plain_s * 1e3,
                "step without",
                less_is_better=True,
            )


# --- answers --------------------------------------------------------------------------------------


def speeds(parts: Any, kind: str, texts: Sequence[str], quick: bool) -> Iterator[Figure]:
    from chatkv.engine.options import SamplingOptions

    for name, sampling in (("greedy", SamplingOptions(temperature=0)), ("0.7", SamplingOptions())):
        if quick and sampling.temperature:
            if kind != "chat":
                continue
            texts = texts[:1]
        say(f"{kind}, {name} …")
        can_predict = parts.engine.foresight is not None
        asked = SOURCES if not quick or kind == "chat" else SOURCES[:1]
        sources = [source for source in asked if can_predict or source != "mtp"]
        found: dict[str, list[list[Answer]]] = {source: [] for source in ("off", *sources)}
        for text in texts:
            for source, answers in answered(parts, text, sampling, list(found), quick).items():
                found[source].append(answers)
        plain = sum(_median_s(answers) for answers in found["off"])
        num_tokens = sum(len(answers[0].tokens) - 1 for answers in found["off"])
        for source in sources:
            drafted_s = sum(
                _median_s(answers) / (len(answers[0].tokens) - 1) * (len(plain_ones[0].tokens) - 1)
                for answers, plain_ones in zip(found[source], found["off"], strict=True)
            )
            last = [answers[-1] for answers in found[source]]
            drafted = sum(one.counts.drafted for one in last)
            accepted = sum(one.counts.accepted for one in last)
            per_step = statistics.mean(one.tokens_per_step for one in last)
            yield Figure(
                f"{kind}, {'greedy' if name == 'greedy' else 'temperature ' + name}, {source}",
                num_tokens / drafted_s,
                "tokens/s",
                num_tokens / plain,
                "without drafts",
                GOALS.get((kind, source), NEVER_SLOWER),
                note=f"{per_step:.2f} tokens a step; {accepted} of {drafted} drafted were right",
            )


def answered(
    parts: Any, text: str, sampling: Any, sources: Sequence[str], quick: bool
) -> dict[str, list[Answer]]:
    """Answers to `text` by each source in turn, several times."""
    from chatkv.engine.sequence import TokenSequence

    rendered = parts.template.render([{"role": "user", "content": text}], True)
    ids = parts.tokenizer.encode_rendered(rendered.text, rendered.content_spans)
    sequence, engine = TokenSequence(list(ids)), parts.engine
    if engine.foresight is not None:
        engine.predictor  # noqa: B018  the prompt is read once: what drafts go on from is kept then
    made: dict[str, list[Answer]] = {source: [] for source in sources}
    with engine.memory.use(sequence):
        engine.prefill(sequence)
        for _ in range(REPEATS[quick]):
            for source, answers in made.items():
                sequence.become(ids, len(ids) - 1)
                answers.append(answer(parts, sequence, sampling, source, TOKENS[quick]))
    return made


def answer(parts: Any, sequence: Any, sampling: Any, source: str, count: int) -> Answer:
    """An answer behind `sequence`, which lacks the KV of its last token; seeds are the same."""
    from chatkv.engine.sampling import Sampler
    from chatkv.engine.sources import speculation

    engine = parts.engine
    engine.draft_costs.is_fixed = False
    sampler = Sampler(sampling, 5)
    tokens, times = [], []
    spec = speculation(source, engine, sequence, sampler)  # type: ignore[arg-type]
    logits = engine.prefill(sequence)
    stops = parts.tokenizer.stop_ids
    for token, _ in engine.decode(sequence, logits, sampler, stops, count, speculation=spec):
        tokens.append(token)
        times.append(time.perf_counter())
    return Answer(tokens, times[-1] - times[0], spec.counts)


def _median_s(answers: Sequence[Answer]) -> float:
    return statistics.median(one.seconds for one in answers)


if __name__ == "__main__":
    run("drafted answers beside plain ones, SmolLM2", measure)
