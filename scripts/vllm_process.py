"""One vLLM in a process of its own: told what to do as JSON, it prints what came of it as JSON.

    PYTHON vllm_process.py '{"model": FOLDER, "home": FOLDER or null, "batches": [[[1, 2, 3], ...]],
                             "max_tokens": 8, "options": {...}}'

PYTHON is one that has vLLM and this project on its path. Each batch is computed when the one before
it is done; {"goes_on": [4, 5]} is the prompts of the first one, each with its reply and these ids
behind it. Without "home" vLLM runs without the connector.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

CONNECTOR = {
    "kv_connector": "ChatkvConnector",
    "kv_connector_module_path": "chatkv.connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def main(task: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 30,
        "max_num_seqs": 4,
        "seed": 0,
        "disable_log_stats": False,
        **task.get("options", {}),
    }
    if task["home"] is not None:
        extra = {"home": task["home"], **task.get("extra", {})}
        options["kv_transfer_config"] = {**CONNECTOR, "kv_connector_extra_config": extra}
    llm = LLM(model=task["model"], **options)
    started_s = time.perf_counter() - began
    results: list[dict[str, Any]] = []
    for batch in task["batches"]:
        if isinstance(batch, dict):
            told = zip(task["batches"][0], results[0]["replies"], strict=True)
            batch = [[*prompt, *reply, *batch["goes_on"]] for prompt, reply in told]
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=task.get("max_tokens", 8),
            ignore_eos=True,
            logprobs=task.get("logprobs"),
        )
        at = time.perf_counter()
        prompts: Any = [{"prompt_token_ids": ids} for ids in batch]
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - at
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            llm.llm_engine.step()  # what a vLLM does by itself that has a process for its engine
        results.append(
            {
                "seconds": seconds,
                "replies": [list(one.outputs[0].token_ids) for one in outputs],
                "cached": [one.num_cached_tokens for one in outputs],
                "logprobs": [_logprobs(one.outputs[0]) for one in outputs],
            }
        )
        time.sleep(task.get("pause_s", 0.0))
    llm.llm_engine.engine_core.shutdown()
    return {"started_s": started_s, "batches": results}


def _logprobs(output: Any) -> list[float] | None:
    if output.logprobs is None:
        return None
    return [
        step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)
    ]


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    report = main(json.loads(sys.argv[1]))
    print("\n" + json.dumps(report), flush=True)
