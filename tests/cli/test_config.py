"""Settings: the file below the environment below flags, wrong ones in one line, and changing it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from chatkv.cli import answer, full_screen
from chatkv.cli.look import keymap
from chatkv.cli.main import cli
from chatkv.errors import UsageError
from chatkv.session.request import ChatRequest
from chatkv.session.turn import TurnOptions
from chatkv.settings import read as settings
from chatkv.settings.table import SETTINGS
from program import Ran

Program = Callable[..., Ran]


@pytest.fixture
def file(home: Path) -> Callable[[str], Path]:
    """`file(text)` writes the settings."""

    def write(text: str) -> Path:
        path = home / "config" / "config.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def _shown(program: Program, *arguments: str) -> dict[str, tuple[object, str, str]]:
    rows = json.loads(program("config", "show", "--json", *arguments).out)
    return {row["key"]: (row["value"], row["source"], row["where"]) for row in rows}


def test_flags_above_the_environment_above_the_file(
    program: Program, file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file("top-p = 0.5\ntemperature = 0.1\nmin-p = 0\n\n[serve]\nport = 99\n")
    monkeypatch.setenv("CHATKV_TEMPERATURE", "0.2")
    monkeypatch.setenv("CHATKV_MIN_P", "0.1")
    monkeypatch.setenv("CHATKV_TOP_K", "")  # says nothing
    monkeypatch.setenv("COLUMNS", "1000")  # however long the path is
    found = _shown(program, "--min-p", "0.3")
    assert found["top-k"] == (0, "default", "")
    assert found["top-p"] == (0.5, "file", f"{path}, line 1")
    assert found["serve.port"] == (99, "file", f"{path}, line 6")
    assert found["temperature"] == (0.2, "environment", "CHATKV_TEMPERATURE")
    assert found["min-p"] == (0.3, "flag", "--min-p")
    assert f"{path}, line 6" in program("config", "show", "serve.port").out
    assert program("config", "show", "-q").out.split() == list(SETTINGS)
    assert program("config", "get", "temperature").out == "0.2\n"
    assert program("config", "path").out == f"{path}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temperatur = 1", "line 1: there is no setting temperatur: do you mean temperature"),
        ("\nmax_tokens = 1", "line 2: there is no setting max_tokens: do you mean max-tokens"),
        ("[serve]\ntheme = 'x'", "line 2: there is no setting serve.theme: do you mean theme in"),
        ("[xyz]\nqqq = 1", "there is no setting xyz: there are model, dtype"),
        ("serve = 3", "line 1: there is no setting serve: "),
        ("temperature = 'hot'", 'temperature must be a number from 0 to 100, not "hot"'),
        ("temperature = true", "temperature must be a number"),
        ("top-p = nan", "top-p must be a number above 0 and at most 1, not nan"),
        ("max-tokens = 1.5", "max-tokens must be a whole number, 1 or more, not 1.5"),
        ("dtype = 'fp4'", "dtype must be one of auto, bfloat16, float16, float32"),
        ("exact = 1", "exact must be true or false, not 1"),
        ("[cache]\nmax-size = 'big'", 'line 2: cache.max-size must be a size such as "20GiB"'),
        ("[engine]\nidle = 'never'", "engine.idle must be seconds, or a time such as"),
        ("[keys]\nsend = 3", "line 1: keys must be a table of the names of keys"),
        ("[serve]\nmodels = 'a'\nport = -1", "serve.port must be a whole number from 0 to 65535"),
        ("model = \n", "is no valid TOML: Invalid value (at line 1, column 9)"),
        ("model = 1", "model must be a folder or .gguf file"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    program: Program, file: Callable[[str], Path], text: str, said: str
) -> None:
    path = file(text)
    for command in (["ask", "hi"], ["sessions", "ls"], ["config", "show"]):
        done = program(*command)
        assert (done.code, done.out) == (2, ""), command
        assert done.err.startswith(f"chatkv: {path}") and said in done.err
        assert done.err.count("\n") == 1
    assert program("config", "path").code == 0
    assert program("--help").code == 0


def test_a_wrong_variable_is_one_line(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATKV_PORT", "http")
    done = program("cache", "du")
    assert done.code == 2
    assert done.err == ('chatkv: CHATKV_PORT must be a whole number from 0 to 65535, not "http"\n')


def test_a_file_that_cannot_be_read_is_one_line(program: Program, home: Path) -> None:
    (home / "config" / "config.toml").mkdir(parents=True)
    done = program("sessions", "ls")
    assert done.code == 2 and "cannot read" in done.err and done.err.count("\n") == 1
    (home / "config" / "config.toml").rmdir()
    (home / "config" / "config.toml").write_bytes(b"system = '\xff'")
    assert "is no UTF-8 text" in program("sessions", "ls").err


def _asked(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[ChatRequest, object]:
    """What `chatkv ask` would ask for."""
    seen: list[tuple[ChatRequest, object]] = []

    @click.command()
    @answer.chat_options
    def ask(**given: object) -> None:
        seen.append((answer.chat_request(given), given["temperature"]))

    monkeypatch.setattr(type(cli), "get_command", lambda *_: ask)
    cli.main(["ask", *arguments], prog_name="chatkv", standalone_mode=False)
    return seen[0]


def test_a_conversation_keeps_what_it_remembers(
    file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file("model = 'org/name'\nkv-codec = 'int8'\nsystem = 'Be brief.'\ntemperature = 0\n")
    new = ChatRequest(model="org/name", kv_codec="int8", system="Be brief.")
    assert _asked([], monkeypatch) == (new, 0)
    asked, _ = _asked(["-m", "other/one", "--kv-codec", "raw"], monkeypatch)
    assert (asked.model, asked.kv_codec) == ("other/one", "raw")
    assert _asked(["-c", "--temperature", "1"], monkeypatch) == (ChatRequest(resume_last=True), 1)
    assert _asked(["-r", "x"], monkeypatch)[0] == ChatRequest(resume="x")


def test_what_others_read_from_variables_is_carried_there(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        "screen-reader = true\n[cache]\nmax-size = '3GiB'\nmin-free = '1GB'\n"
        "[engine]\nidle = '2h'\nshared = false\n"
    )
    variables = {"CHATKV_KV_MIN_FREE_BYTES": "7 MiB"}
    settings.carry(settings.read(path, variables), variables)
    assert variables == {
        "CHATKV_A11Y": "1",
        "CHATKV_KV_MAX_BYTES": str(3 << 30),
        "CHATKV_KV_MIN_FREE_BYTES": str(7 << 20),
        "CHATKV_IDLE_S": "7200",
        "CHATKV_ENGINE": "off",
    }


def test_the_server_takes_its_lists(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[serve]\nmodels = ['a', 'b']\nallowed-hosts = ['x', 'y']\n")
    assert settings.defaults(settings.read(path, {})) == {
        "serve": {"models": ("a", "b"), "allowed_hosts": "x,y"}
    }


def test_defaults_are_those_of_the_parts_that_use_them() -> None:
    from chatkv.server.process import IDLE_S

    default = {key: setting.default for key, setting in SETTINGS.items()}
    options = TurnOptions()
    assert default["engine.idle"] == IDLE_S
    assert default["max-tokens"] == options.max_tokens
    assert (default["restore"], default["exact"]) == (options.restore, options.exact)
    assert default["overflow"] == options.overflow
    assert default["temperature"] == options.sampling.temperature
    for setting in SETTINGS.values():
        if setting.default not in (None, (), {}):
            assert setting.kind.parse(setting.kind.written(setting.default)) == setting.default


def test_setting_and_unsetting_keeps_comments(
    program: Program, file: Callable[[str], Path]
) -> None:
    path = file("# mine\ntemperature = 0.2  # calm\n\n[serve] # to others\nport = 80\n")
    for key, value in (
        ("temperature", "0.5"),
        ("cache.max-size", "3GiB"),
        ("serve.models", "a, b"),
        ("exact", "yes"),
        ("keys.send", "ctrl+s"),
        ("tui.theme", "nord"),
    ):
        done = program("config", "set", key, value)
        assert (done.code, done.out, done.err) == (0, "", "")
    assert program("config", "unset", "serve.port").code == 0
    text = path.read_text()
    assert text.startswith("# mine\ntemperature = 0.5  # calm\n") and "[serve] # to others" in text
    found = {key: value for key, (value, source, _) in _shown(program).items() if source == "file"}
    assert found == {
        "temperature": 0.5,
        "exact": True,
        "serve.models": ["a", "b"],
        "cache.max-size": 3 << 30,
        "keys": {"send": "ctrl+s"},
        "tui.theme": "nord",
    }
    assert os.listdir(path.parent) == ["config.toml"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["set", "temperature", "hot"], 'temperature must be a number from 0 to 100, not "hot"'),
        (["set", "nonsense", "1"], "there is no setting nonsense"),
        (["unset", "nonsense"], "there is no setting nonsense"),
        (["set", "tui.theme", "pink"], "tui.theme: there is no theme"),
        (["set", "keys.send", "ctrl+nothing"], 'keys.send: send: there is no key "ctrl+nothing"'),
        (["set", "keys.fire", "x"], "there is no key named fire"),
        (["set", "keys", "x"], "give one of them: keys.NAME"),
    ],
)
def test_nothing_wrong_gets_into_the_file(
    program: Program, file: Callable[[str], Path], arguments: list[str], said: str
) -> None:
    path = file("top-k = 7\n")
    done = program("config", *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err and done.err.count("\n") == 1
    assert path.read_text() == "top-k = 7\n" and os.listdir(path.parent) == ["config.toml"]


def test_one_key_for_two_things_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[keys]\nsend = 'ctrl+s, up'\n")
    with pytest.raises(UsageError, match=r"config.toml, line 1: up would be both send and older"):
        keymap(settings.read(path, {}))
    path.write_text("[keys]\nsend = 'ctrl+s'\nnewline = 'enter'\n")
    assert keymap(settings.read(path, {})) == {"send": "ctrl+s", "newline": "enter"}


def test_the_full_screen_chat_looks_as_it_is_set(
    file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from chatkv.tui.app import ChatApp

    path = file("[tui]\ntheme = 'nord'\n[keys]\nsend = 'ctrl+s'\nnewline = 'enter'\n")
    shown: list[ChatApp] = []

    def run(app: ChatApp) -> None:
        shown.append(app)

    monkeypatch.setattr(ChatApp, "run", run)
    new = ChatRequest(model="org/name")
    full_screen.show(ChatRequest(), new, TurnOptions, settings.read(path, {}))
    (app,) = shown
    assert app.theme == "nord"
    start = app.verbs._start
    assert (start.keymap, start.new_request) == ({"send": "ctrl+s", "newline": "enter"}, new)


def test_the_page_lists_every_setting_and_key() -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "settings_reference"
    done = subprocess.run(
        [sys.executable, str(script), "--check"],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_options_and_settings_of_commands_are_the_same() -> None:
    """Each setting's flag exists where the table says, and nowhere does a flag miss its setting."""
    for setting in SETTINGS.values():
        for path in setting.commands:
            command: click.Command = cli
            for name in path.split():
                assert isinstance(command, click.Group)
                found = command.get_command(click.Context(command), name)
                assert found is not None
                command = found
            flags = [flag for param in command.params for flag in param.opts]
            assert setting.flag in flags, f"chatkv {path} has no {setting.flag}"
