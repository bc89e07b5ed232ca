"""The schema that the server gives of itself: nothing that it allows, or that is near it, is
answered with an error of the server's own, and answers are as it describes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks, not_a_server_error

from served import served

LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
load_all_checks()
AS_DESCRIBED = [
    not_a_server_error,
    *CHECKS.get_by_names(
        ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]
    ),
]


@pytest.fixture(scope="module")
def url(tiny_checkpoint: Callable[..., Path], own_home: Path) -> Iterator[str]:
    with served(str(tiny_checkpoint("llama3", max_position_embeddings=256))) as url:
        yield url


def short(body: Any) -> None:
    """Answers of a few tokens: what is asked is of interest, and not what is said."""
    if not isinstance(body, dict):
        return
    for name in LIMITS:
        if isinstance(body.get(name), int) and body[name] > 2:
            body[name] = 2
    if not any(name in body for name in LIMITS):
        body |= {"max_tokens": 2, "max_output_tokens": 2}
    if isinstance(body.get("n"), int):
        body["n"] = min(body["n"], 2)
    options = body.setdefault("options", {})
    if isinstance(options, dict):
        options["num_predict"] = 2


def hold(url: str, mode: GenerationMode, num_examples: int) -> int:
    """Ask all that can be asked, in so many ways each; how often that was."""
    num_asked = 0
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # no way to ask it wrongly

        @settings(
            max_examples=num_examples,
            derandomize=True,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def holds(case: schemathesis.Case) -> None:
            nonlocal num_asked
            if case.path.startswith(("/v1/", "/api/")):
                short(case.body)
            num_asked += 1
            case.call_and_validate(base_url=url, checks=AS_DESCRIBED, timeout=60)

        holds()
    return num_asked


@pytest.mark.slow
def test_what_the_schema_allows(url: str) -> None:
    assert hold(url, GenerationMode.POSITIVE, 2) > 30


def test_what_it_does_not_allow(url: str) -> None:
    assert hold(url, GenerationMode.NEGATIVE, 2) > 15


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_at_length(url: str, mode: GenerationMode) -> None:
    assert hold(url, mode, 40) > 300
