"""The documents tell the truth: links lead somewhere, commands and options exist, files too."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from chatkv.cli.main import cli

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    REPOSITORY / "README.md",
    REPOSITORY / "CHANGELOG.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
DOCUMENT = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)

# Places a document may name by path; anything else in backticks is not taken for a file.
PATH_IN_BACKTICKS = re.compile(r"`((?:chatkv|store|kernels|tests|scripts|docs|\.ci)/[\w./-]*)`")


def _text(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _without_code(_text(document)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _commands(document: Path) -> list[list[str]]:
    """The words of every command in the document's sh blocks, comments and pipes taken apart."""
    commands: list[list[str]] = []
    for block in re.findall(r"^```sh\n(.*?)^```$", _text(document), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.shlex(line, posix=True, punctuation_chars="|;&")
            words.whitespace_split = True
            current: list[str] = []
            for word in words:
                if set(word) <= set("|;&"):
                    commands.append(current)
                    current = []
                else:
                    current.append(word)
            commands.append(current)
    return [command for command in commands if command]


@DOCUMENT
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(_text(document))):
        if re.match(r"\w+:", target):
            continue  # the web is not ours to test
        path, _, anchor = target.partition("#")
        file = (document.parent / path) if path else document
        assert file.exists(), f"{document.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in _anchors(file), f"{document.name}: no heading for {target}"


@DOCUMENT
def test_files_that_are_named_exist(document: Path) -> None:
    for name in PATH_IN_BACKTICKS.findall(_text(document)):
        assert (REPOSITORY / name).exists(), f"{document.name} names {name}"


def test_every_part_is_on_the_map() -> None:
    map_of_parts = _text(REPOSITORY / "docs" / "architecture.md")
    parts = [path for path in (REPOSITORY / "chatkv").iterdir() if path.name[0] not in "._"]
    for part in parts:
        if part.suffix == ".py" or any(part.glob("*.py")):
            name = f"chatkv/{part.name}" + ("/" if part.is_dir() else "")
            assert f"`{name}`" in map_of_parts, f"docs/architecture.md does not show {name}"


@cache
def _help(verbs: tuple[str, ...]) -> str | None:
    """The help of `chatkv VERBS`, None if there is no such command."""
    done = CliRunner().invoke(cli, [*verbs, "--help"])
    return done.stdout if done.exit_code == 0 else None


GROUPS = {
    "sessions",
    "cache",
    "encrypt",
    "codec",
    "config",
    "models",
}  # commands whose first argument is a verb of their own


def test_commands_and_their_options_exist() -> None:
    seen = 0
    for document in DOCUMENTS:
        for program, *arguments in _commands(document):
            if program in ("./scripts/test", "./scripts/check"):
                assert (REPOSITORY / program).exists()
            elif program == ".venv/bin/python":
                assert (REPOSITORY / arguments[0]).exists(), f"{document.name}: {arguments[0]}"
            elif program == "./scripts/chat":
                _assert_command(document, ["ask", *arguments] if arguments else ["chat"])
                seen += 1
            elif program == "chatkv":
                _assert_command(document, arguments)
                seen += 1
            else:
                assert program in ("echo", "export", "rm", "llm"), (
                    f"{document.name}: what is {program}?"
                )
    assert seen >= 8


def _assert_command(document: Path, arguments: list[str]) -> None:
    verbs = tuple(arguments[: 2 if arguments[0] in GROUPS else 1])
    text = _help(verbs)
    assert text is not None, f"{document.name}: chatkv has no command {' '.join(verbs)}"
    for option in arguments[len(verbs) :]:
        if option.startswith("-"):
            assert re.search(rf"(^|[\s,]){re.escape(option)}\b", text), f"{verbs} has no {option}"


def test_readme_has_marked_commands_for_every_run() -> None:
    """`.ci/run` runs the blocks below this mark as they are written."""
    blocks = re.findall(r"^<!-- ci -->\n```sh\n", _text(REPOSITORY / "README.md"), re.MULTILINE)
    assert len(blocks) >= 3


def test_the_reference_is_what_the_commands_say() -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "cli_reference"), "--check"],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_kinds_of_files_are_those_that_are_told_of() -> None:
    from chatkv.cli.sessions_transfer import export, import_

    text = _text(REPOSITORY / "docs" / "formats.md")
    kinds = {
        row[1]: (row[2].strip(), row[3].strip())
        for row in re.finditer(r"^\| `(\w+)` \| ([^|]*)\| (yes) \|", text, re.MULTILINE)
    }
    written = next(param for param in export.params if param.name == "kind").type
    read = next(param for param in import_.params if param.name == "kind").type
    assert [kind for kind, (is_written, _) in kinds.items() if is_written == "yes"] == list(
        written.choices
    )
    assert ["auto", *kinds] == list(read.choices)


def test_every_field_of_our_json_is_told_of(tmp_path: Path) -> None:
    from chatkv_store.conversations import Conversations

    with Conversations(tmp_path / "conversations.sqlite3") as store:
        session = store.create_session()
        with store.lease(session.id):
            store.begin_turn(session.id, user_text="Hi", prompt_ids=[1])
        values = store.export_text(session.id, branches=True)
    fields = values.keys() | values["turns"][0].keys()
    text = _text(REPOSITORY / "docs" / "formats.md").partition("## JSON")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == fields
