"""Answers as OpenAI's chat completions and completions write them, streamed and whole."""

from __future__ import annotations

import os
import time
from itertools import accumulate
from typing import Any

from chatkv.server.answer import dumps
from chatkv.server.http import Problem
from chatkv.server.wire import Event

DONE = b"data: [DONE]\n\n"
ALIVE = b": keepalive\n\n"


def error_body(problem: Problem) -> dict[str, Any]:
    """OpenAI's form of an error."""
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    said = {"message": problem.message, "type": kind, "param": None, "code": problem.code}
    return {"error": said}


def usage_of(result: dict[str, Any]) -> dict[str, Any]:
    prompt, generated = result["prompt_tokens"], result["generated_tokens"]
    reasoning_tokens = sum(choice["reasoning_tokens"] for choice in result["choices"])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {
            "cached_tokens": result["cached_tokens"],
            "cache_write_tokens": result["timings"]["prompt_n"],
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def finish_of(choice: dict[str, Any]) -> str:
    if choice["calls"]:
        return "tool_calls"
    return "length" if choice["finish_reason"] == "length" else "stop"


def sse(value: dict[str, Any]) -> bytes:
    return f"data: {dumps(value)}\n\n".encode()


class ChatWriter:
    """chat.completion objects and their chunks."""

    media_type, alive = "text/event-stream", ALIVE

    def __init__(self, with_usage: bool, with_progress: bool) -> None:
        self._with_usage, self._with_progress = with_usage, with_progress
        self._same = {"id": f"chatcmpl-{os.urandom(12).hex()}", "created": int(time.time())}
        self._model = ""
        self._begun: set[int] = set()
        self._began = time.monotonic()
        self._num_cached: int | None = None

    def write(self, event: Event) -> bytes:
        match event.event:
            case "session":
                self._model = event.data["model"]
                return self._begin(0)
            case "progress":
                return self._progress(event)
            case "text":
                index = event.data["choice"]
                out = self._begin(index)
                delta = self._delta(event)
                choice = {"index": index, "delta": delta, "finish_reason": None}
                if "logprobs" in event.data:
                    choice["logprobs"] = {"content": event.data["logprobs"]}
                return out + self._chunk([choice])
            case "result":
                return self._end(event.data)
        return b""

    def error(self, problem: Problem) -> bytes:
        return sse(error_body(problem))

    def whole(self, result: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for choice in result["choices"]:
            message: dict[str, Any] = {"role": "assistant", "content": choice["content"]}
            if choice["reasoning"]:
                message["reasoning_content"] = choice["reasoning"]
            if choice["calls"]:
                message["tool_calls"] = list(choice["calls"])
                message["content"] = choice["content"] or None
            found: dict[str, Any] = {"index": choice["index"], "message": message}
            found["finish_reason"] = finish_of(choice)
            logprobs = choice["logprobs"]
            found["logprobs"] = None if logprobs is None else {"content": logprobs}
            choices.append(found)
        return {
            **self._same,
            "object": "chat.completion",
            "model": result["model"],
            "choices": choices,
            "usage": usage_of(result),
            "timings": result["timings"],
        }

    def _begin(self, index: int) -> bytes:
        """Every choice begins with its role."""
        if index in self._begun:
            return b""
        self._begun.add(index)
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "finish_reason": None}])

    def _progress(self, event: Event) -> bytes:
        if event.stage != "prefill":
            return b""
        if self._num_cached is None:
            self._num_cached = event.done
        if not self._with_progress:
            return f": prefill {event.done}/{event.total}\n\n".encode()
        done = {
            "total": event.total,
            "cache": self._num_cached,
            "processed": event.done,
            "time_ms": round((time.monotonic() - self._began) * 1e3),
        }
        return self._chunk([], prompt_progress=done)

    def _delta(self, event: Event) -> dict[str, Any]:
        if event.data["kind"] == "call":
            return {"tool_calls": [{"index": event.data["number"], **event.data["call"]}]}
        name = "reasoning_content" if event.data["kind"] == "reasoning" else "content"
        return {name: event.text}

    def _end(self, result: dict[str, Any]) -> bytes:
        self._model = result["model"]
        out = b""
        for choice in result["choices"]:
            out += self._begin(choice["index"])
            last = {"index": choice["index"], "delta": {}, "finish_reason": finish_of(choice)}
            is_last = choice is result["choices"][-1]
            out += self._chunk([last], **({"timings": result["timings"]} if is_last else {}))
        if self._with_usage:
            out += self._chunk([], usage=usage_of(result), timings=result["timings"])
        return out + DONE

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        same = {**self._same, "object": "chat.completion.chunk", "model": self._model}
        return sse({**same, "choices": choices, **more})


class CompletionWriter:
    """text_completion objects, streamed and whole."""

    media_type, alive = "text/event-stream", ALIVE

    def __init__(self, with_usage: bool) -> None:
        self._with_usage = with_usage
        created = int(time.time())
        self._same = {"id": f"cmpl-{os.urandom(12).hex()}", "object": "text_completion"}
        self._same |= {"created": created}  # type: ignore[dict-item]
        self._model = ""

    def write(self, event: Event) -> bytes:
        match event.event:
            case "session":
                self._model = event.data["model"]
            case "progress" if event.stage == "prefill":
                return f": prefill {event.done}/{event.total}\n\n".encode()
            case "text":
                logprobs = event.data.get("logprobs")
                return self._chunk([_text_choice(event.data["choice"], event.text, None, logprobs)])
            case "result":
                out = b""
                for choice in event.data["choices"]:
                    out += self._chunk([_text_choice(choice["index"], "", finish_of(choice))])
                if self._with_usage:
                    out += self._chunk([], usage=usage_of(event.data))
                return out + DONE
        return b""

    def error(self, problem: Problem) -> bytes:
        return sse(error_body(problem))

    def whole(self, result: dict[str, Any]) -> dict[str, Any]:
        choices = [
            _text_choice(
                one["index"], one["reasoning"] + one["content"], finish_of(one), one["logprobs"]
            )
            for one in result["choices"]
        ]
        about = {"model": result["model"], "choices": choices}
        return {**self._same, **about, "usage": usage_of(result), "timings": result["timings"]}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return sse({**self._same, "model": self._model, "choices": choices, **more})


def _text_choice(
    index: int, text: str, finish: str | None, logprobs: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    found = None if logprobs is None else _listed(logprobs)
    return {"index": index, "text": text, "logprobs": found, "finish_reason": finish}


def _listed(logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """As completions have them: one list for each field. Offsets count from the answer's, or the
    piece's, beginning."""
    ends = list(accumulate(len(one["token"]) for one in logprobs))
    tops = [{top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in logprobs]
    return {
        "tokens": [one["token"] for one in logprobs],
        "token_logprobs": [one["logprob"] for one in logprobs],
        "top_logprobs": tops,
        "text_offset": [0, *ends[:-1]] if ends else [],
    }
