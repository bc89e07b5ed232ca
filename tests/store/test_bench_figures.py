"""The form in which benchmarks report: outside scripts read it."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def common() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_common", SCRIPTS / "bench_common.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_common"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_figure_beside_its_baseline(common: ModuleType) -> None:
    figure = common.Figure("speed", 30.0, "GB/s", 10.0, "dd", goal=3)
    assert figure.to_dict() == {
        "name": "speed",
        "value": 30.0,
        "unit": "GB/s",
        "baseline": 10.0,
        "baseline_name": "dd",
        "ratio": 3.0,
        "goal": 3,
        "goal_of": "ratio",
        "goal_is": ">=",
        "meets": True,
    }


@pytest.mark.parametrize(
    ("value", "goal_of", "goal_is", "goal", "meets"),
    [
        (20.0, "ratio", ">=", 3, False),
        (20.0, "value", "<=", 60, True),
        (61.0, "value", "<=", 60, False),
        (20.0, "value", ">=", None, None),
        (None, "ratio", ">=", 3, None),
        (None, "value", "<=", 60, None),
    ],
)
def test_meeting_a_goal(
    common: ModuleType,
    value: float | None,
    goal_of: str,
    goal_is: str,
    goal: float | None,
    meets: bool | None,
) -> None:
    figure = common.Figure("f", value, "x", 10.0, "b", goal=goal, goal_of=goal_of, goal_is=goal_is)
    assert figure.meets is meets
    assert "f" in common.table(common.machine(), [figure])


@pytest.mark.parametrize(
    ("value", "bound", "meets"),
    [(31.0, 40.0, True), (25.0, 40.0, False), (25.0, 29.0, None), (31.0, 29.0, True)],
)
def test_a_goal_beyond_what_the_machine_can_do_is_not_judged(
    common: ModuleType, value: float, bound: float, meets: bool | None
) -> None:
    figure = common.Figure("f", value, "GB/s", 10.0, "b", goal=3, bound=bound)
    assert figure.meets is meets and figure.to_dict()["bound"] == bound
    assert f"f: at best {bound:g} GB/s here" in common.table(common.machine(), [figure])
    time = common.Figure("t", 60 / value, "ms", goal=2, goal_of="value", goal_is="<=")
    assert time.meets is (value >= 30)


def test_the_json_of_a_script(tmp_path: Path) -> None:
    script = SCRIPTS / "bench_common.py"
    subprocess.run(
        [sys.executable, str(script), "--quick", "--json", str(tmp_path / "out.json")], check=True
    )
    report = json.loads((tmp_path / "out.json").read_text())
    assert set(report) == {"machine", "versions", "figures"}
    assert report["machine"]["cores"] >= 1
    assert report["versions"]["python"].startswith("3.")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_measured_before_a_signal_is_kept(tmp_path: Path, number: signal.Signals) -> None:
    script = f"""
import sys, time
sys.path.insert(0, {str(SCRIPTS)!r})
from bench_common import Figure, run, say

def measure(options):
    yield Figure("first", 1.0, "s")
    say("begun")
    time.sleep(600)
    yield Figure("second", 2.0, "s")

run("a benchmark", measure)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, "--json", str(tmp_path / "out.json")],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None and process.stderr.readline() == "begun\n"
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    report = json.loads((tmp_path / "out.json").read_text())
    assert [figure["name"] for figure in report["figures"]] == ["first"]
    assert report["stopped"] is True
