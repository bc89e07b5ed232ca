"""`chatkv desktop`: a window with the page, and the entry in the desktop's menu."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from chatkv.cli.desktop import entry
from chatkv.cli.main import run
from chatkv.client import engine
from chatkv.paths import folders
from program import command, environment
from served import ask, served


def browser(folder: Path, name: str, code: str = 'echo "$@" >"$0.said"') -> Path:
    """A program on the PATH that stands for a browser, and notes how it was called."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{code}\n")
    program.chmod(0o755)
    return program


def test_a_running_server_is_shown_in_an_app_window(
    own_home: Path,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    programs = tmp_path / "bin"
    browser(programs, "chromium", "exit 3")  # cannot start here
    good = browser(programs, "microsoft-edge")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr("chatkv.cli.desktop.APP_BROWSERS", ("chromium", "gone", "microsoft-edge"))
    with served(model) as url:
        monkeypatch.setenv("DISPLAY", ":99")
        assert run(["desktop"]) == 0
        assert capfd.readouterr().out == f"{url}\n"
        assert good.with_name("microsoft-edge.said").read_text().split()[0] == f"--app={url}"

        monkeypatch.setattr("chatkv.cli.desktop.APP_BROWSERS", ("chromium",))
        opened: list[str] = []
        monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or len(opened) == 1)
        assert run(["desktop"]) == 0 and opened == [url]
        assert run(["desktop"]) == 1
        assert "no browser was found" in capfd.readouterr().err

        monkeypatch.delenv("DISPLAY")
        monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
        assert run(["desktop"]) == 1
        said = capfd.readouterr().err
        assert said == f"chatkv: there is no display to open a window on; the page is at {url}\n"


@pytest.mark.slow
def test_a_server_is_started_where_none_runs(home: Path, model: str) -> None:
    given = environment(CHATKV_ENGINE="")
    given.pop("DISPLAY", None)
    given.pop("WAYLAND_DISPLAY", None)
    wanted = command("desktop", "--port", "0", "--model", model)
    try:
        done = subprocess.run(
            wanted, check=False, env=given, capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 1 and "no display" in done.stderr
        url = done.stdout.strip()
        assert b"<!doctype html>" in ask(url, "/", Accept="text/html").body
        again = subprocess.run(
            wanted, check=False, env=given, capture_output=True, text=True, timeout=90
        )
        assert again.stdout.strip() == url
    finally:
        engine.stop(folders(), force=True)
    bad = command("desktop", "--model", "/no/such/model")
    failed = subprocess.run(bad, check=False, env=given, capture_output=True, text=True, timeout=90)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "/no/such/model" in failed.stderr and failed.stderr.count("\n") == 1


def test_the_menu_gets_an_entry_and_loses_it(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = home.parent / "user" / ".local" / "share"
    shown = data / "applications" / "chatkv.desktop"
    assert run(["desktop", "--install"]) == 0
    text = shown.read_text()
    lines = dict(line.split("=", 1) for line in text.splitlines()[1:])
    words = shlex.split(lines["Exec"])
    assert words[:2] == ["env", f"CHATKV_HOME={home}"]
    assert words[-3:] == ["-m", "chatkv", "desktop"] and os.access(words[2], os.X_OK)
    assert Path(lines["Icon"]).read_text().startswith("<svg")
    assert run(["desktop", "--uninstall"]) == 0
    assert [path for path in data.rglob("*") if path.is_file()] == []
    assert run(["desktop", "--uninstall"]) == 0
    assert "does not have it" in capfd.readouterr().err
    assert run(["desktop", "--install", "--uninstall"]) == 2
    elsewhere = home.parent / "elsewhere"
    monkeypatch.setenv("XDG_DATA_HOME", str(elsewhere))
    assert run(["desktop", "--install"]) == 0
    assert (elsewhere / "applications" / "chatkv.desktop").exists()
    elsewhere.joinpath("file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(elsewhere / "file"))
    assert run(["desktop", "--install"]) == 1
    assert "Traceback" not in capfd.readouterr().err


def test_strange_paths_are_quoted() -> None:
    words = ['/home/a b/it\'s "100%" $HOME\\`x`/python', "-m", "chatkv"]
    (line,) = [line for line in entry(words).splitlines() if line.startswith("Exec=")]
    # Twice escaped: as a string of the file, and as an argument.
    once = line.removeprefix("Exec=").replace("\\\\", "\\").replace("%%", "%")
    quoted = re.findall(r'"((?:[^"\\]|\\.)*)"', once)
    assert [re.sub(r"\\(.)", r"\1", word) for word in quoted] == words
