"""The connector under vLLM itself: each promise with vLLM in a process of its own.

Needs CHATKV_VLLM_PYTHON, a Python that has vLLM and what this project depends on;
`scripts/test_vllm` makes one and runs this. One start of vLLM takes some 20 s.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chatkv_store.blocks import BlockStore
from chatkv_store.tables import value_key
from chatkv_store.uses import Uses
from program import PYTHONPATH

SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm_process.py"
PYTHON = os.environ.get("CHATKV_VLLM_PYTHON")
BLOCK = 128  # vLLM's on a CPU

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="needs vLLM: scripts/test_vllm, or CHATKV_VLLM_PYTHON"),
]


@dataclass
class Run:
    """What a vLLM did: a report where it lived to write one, and what it logged."""

    code: int
    log: str
    batches: list[dict[str, Any]]

    def replies(self, batch: int = 0) -> list[list[int]]:
        return list(self.batches[batch]["replies"])

    def cached(self, batch: int = 0) -> list[int]:
        return list(self.batches[batch]["cached"])

    def logprobs(self, batch: int = 0) -> list[list[float]]:
        return list(self.batches[batch]["logprobs"])


def run_vllm(model: Path, home: Path | None, *batches: Any, **more: Any) -> Run:
    """Compute `batches` in a vLLM that lives for them alone; `more`: see vllm_process.py,
    `variables` of its environment and `model_options` of vLLM's."""
    variables = more.pop("variables", {})
    options = {"max_model_len": 1024, "served_model_name": "chat"}
    options |= more.pop("model_options", {})
    task = {"home": None if home is None else str(home), "batches": batches, **more}
    task |= {"model": str(model), "max_tokens": 24, "logprobs": 0, "options": options}
    environment = {
        **os.environ,
        "PYTHONPATH": PYTHONPATH,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",  # one thread: else sums come in another order each time
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # starts in half of the time
        **variables,
    }
    done = subprocess.run(
        [str(PYTHON), str(SCRIPT), json.dumps(task)],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env=environment,
    )
    log = done.stdout + done.stderr
    if done.returncode != 0:
        return Run(done.returncode, log, [])
    return Run(0, log, json.loads(done.stdout.splitlines()[-1])["batches"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`model(seed)`: a random one with heads of a size that vLLM's kernels take."""
    import tiny

    def made(seed: int) -> Path:
        folder = tmp_path_factory.getbasetemp() / f"seed-{seed}" / "chat"
        if not folder.exists():
            folder.mkdir(parents=True)
            changes = {"head_dim": 32, "max_position_embeddings": 2048}
            tiny.make_checkpoint(folder, "llama2", seed=seed, **changes)
        return folder

    return made


PROMPT = [3 + (7 * index * index + index) % 250 for index in range(5 * BLOCK + 40)]
SHORT, LONG = [10, 11], list(range(10, 10 + BLOCK))  # what is said next: to two different ends


@pytest.fixture(scope="module")
def plain(model: Callable[[int], Path]) -> Run:
    """vLLM without the connector: a prompt, and the conversation going on from its reply, twice."""
    run = run_vllm(model(1), None, [PROMPT], {"goes_on": SHORT}, {"goes_on": LONG})
    assert run.code == 0, run.log[-4000:]
    return run


@pytest.fixture(scope="module")
def kept(
    model: Callable[[int], Path], plain: Run, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A home in which vLLM with the connector has computed the same, in processes of its own for
    deciding and computing, as it runs by itself."""
    home = tmp_path_factory.mktemp("kept")
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    run = run_vllm(model(1), home, [PROMPT], {"goes_on": LONG}, variables=variables, pause_s=2.0)
    assert run.code == 0, run.log[-4000:]
    assert (run.replies(0), run.replies(1)) == (plain.replies(0), plain.replies(2))
    assert run.cached() == [0]
    return home


@pytest.fixture
def home(kept: Path, tmp_path: Path) -> Path:
    """A copy of that home, to be changed."""
    shutil.copytree(kept, tmp_path / "home")
    return tmp_path / "home"


def going_on(plain: Run, more: list[int]) -> list[int]:
    return [*PROMPT, *plain.replies()[0], *more]


def test_after_a_restart_conversations_are_loaded_and_answer_the_same(
    model: Callable[[int], Path], plain: Run, home: Path
) -> None:
    run = run_vllm(model(1), home, [going_on(plain, SHORT)], [going_on(plain, LONG)])
    assert run.code == 0, run.log[-4000:]
    # What is left to compute is what was left where vLLM still had these blocks itself, so what
    # comes out must be the same to the bit.
    assert run.cached(0) == plain.cached(1) == [5 * BLOCK]
    assert run.logprobs(0) == plain.logprobs(1)
    # Prompt, reply and new message, but for what fills no block: the reply is in there.
    assert run.cached(1) == [6 * BLOCK]
    assert "loaded 640 tokens" in run.log and "loaded 128 tokens" in run.log
    assert (run.replies(0), run.replies(1)) == (plain.replies(1), plain.replies(2))
    with BlockStore(home / "cache" / "kv") as store:
        assert store.verify() == []
        assert {use.model for use in Uses(store).every()} == {"chat (vLLM)"}


def test_a_damaged_block_is_computed_again(
    model: Callable[[int], Path], plain: Run, home: Path
) -> None:
    with BlockStore(home / "cache" / "kv") as store:
        (use,) = Uses(store).every()
        layout = next(iter(store.headers())).layout
        found = store.match(use.namespace, PROMPT, layout)
        key = value_key(found.blocks[2].key, layout.num_values - 1)

        def flip(txn: Any) -> None:
            stored = bytearray(txn.get(key, db=store.db["values"]))
            stored[len(stored) // 2] ^= 1
            txn.put(key, bytes(stored), db=store.db["values"])

        store.env.write(flip)
    run = run_vllm(model(1), home, [going_on(plain, LONG)])
    assert run.code == 0, run.log[-4000:]
    assert run.replies() == plain.replies(2)
    assert "is damaged: its digest differs" in run.log
    with BlockStore(home / "cache" / "kv") as store:
        assert store.verify() == []
        assert store.match(use.namespace, PROMPT, layout).num_tokens >= 5 * BLOCK


def test_another_model_of_the_same_name_meets_nothing_of_it(
    model: Callable[[int], Path], plain: Run, home: Path
) -> None:
    alone = run_vllm(model(2), None, [PROMPT])
    beside = run_vllm(model(2), home, [PROMPT])
    assert beside.code == 0, beside.log[-4000:]
    assert beside.cached() == [0]
    assert beside.replies() == alone.replies() != plain.replies()


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a core for each of two workers")
def test_two_workers_keep_and_load_a_part_each(
    model: Callable[[int], Path], tmp_path: Path
) -> None:
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    parallel = {"tensor_parallel_size": 2}
    more: dict[str, Any] = {"variables": variables, "model_options": parallel, "pause_s": 3.0}
    cold, again = (run_vllm(model(1), tmp_path / "home", [PROMPT], **more) for _ in range(2))
    assert (cold.code, again.code) == (0, 0), cold.log[-4000:] + again.log[-4000:]
    assert (cold.cached(), again.cached()) == ([0], [5 * BLOCK])
    assert again.replies() == cold.replies()
    with BlockStore(tmp_path / "home" / "cache" / "kv") as store:
        assert store.verify() == []
        models = {use.model for use in Uses(store).every()}
        assert models == {"chat (vLLM, part 1 of 2)", "chat (vLLM, part 2 of 2)"}


@pytest.mark.parametrize("place", ["blocks.values:2", "blocks.headers:3"])
def test_kill_9_while_it_saves(
    model: Callable[[int], Path], plain: Run, tmp_path: Path, place: str
) -> None:
    home, variables = tmp_path / "home", {"CHATKV_FAILPOINT": place}
    killed = run_vllm(model(1), home, [PROMPT], variables=variables, pause_s=10.0)
    assert killed.code == -signal.SIGKILL, killed.log[-4000:]
    with BlockStore(home / "cache" / "kv") as store:
        assert store.verify() == []
    run = run_vllm(model(1), home, [PROMPT])
    assert run.code == 0, run.log[-4000:]
    assert run.replies() == plain.replies()


def test_the_real_model_goes_on_after_a_restart(smollm2_gguf: Path, tmp_path: Path) -> None:
    """SmolLM2, as a checkpoint of its own numbers: what transformers says, vLLM says, cold and from
    the store."""
    import torch
    from tokenizers import Tokenizer

    import tiny
    from checkpoints import checkpoint_of

    folder = checkpoint_of(smollm2_gguf, tmp_path / "smollm2", "float32")
    text = "The sea is salt because rivers carry minerals into it, and only water leaves. " * 20
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[: 2 * BLOCK + 30]
    reference = tiny.load_reference(folder)
    with torch.inference_mode():
        told = reference.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
    expected = told[0, len(ids) :].tolist()
    more = {"model_options": {"dtype": "float32"}, "pause_s": 3.0}
    for cached in (0, 2 * BLOCK):
        run = run_vllm(folder, tmp_path / "home", [ids], **more)
        assert run.code == 0, run.log[-4000:]
        assert (run.cached(), run.replies()) == ([cached], [expected])
