"""The repository's own rules: what may import what, what a wheel holds, what starts quickly."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = {
    "chatkv": REPOSITORY / "chatkv",
    "chatkv_kernels": REPOSITORY / "kernels" / "chatkv_kernels",
    "chatkv_store": REPOSITORY / "store" / "chatkv_store",
}
MODULES = {
    ".".join([name, *path.relative_to(folder).with_suffix("").parts]).removesuffix(
        ".__init__"
    ): path
    for name, folder in PACKAGES.items()
    for path in sorted(folder.rglob("*.py"))
}

# What each part may import of ours, lowest first. A part may always import itself, and the parts
# of `chatkv` what stands below them all (BASE). A new part is entered here on purpose.
BASE = {
    *("chatkv", "chatkv.errors", "chatkv.paths"),
    *("chatkv.process", "chatkv.waiting", "chatkv.words"),
}
MAY_IMPORT: dict[str, set[str]] = {
    "chatkv_store": set(),
    "chatkv_kernels": set(),
    "chatkv.model": {"chatkv_kernels"},
    "chatkv.engine": {"chatkv_kernels", "chatkv.model"},
    "chatkv.apart": {"chatkv_store"},
    "chatkv.restore": {"chatkv_kernels", "chatkv_store", "chatkv.model", "chatkv.engine"}
    | {"chatkv.apart"},
    "chatkv.session": {"chatkv_store", "chatkv.model", "chatkv.engine", "chatkv.restore"},
    "chatkv.connectors": {"chatkv_store", "chatkv.model", "chatkv.restore"},
    "chatkv.runtime": {"chatkv_kernels", "chatkv_store", "chatkv.model", "chatkv.engine"}
    | {"chatkv.apart", "chatkv.restore", "chatkv.session"},
    "chatkv.server": {"chatkv_store", "chatkv.model", "chatkv.engine", "chatkv.restore"}
    | {"chatkv.apart", "chatkv.session", "chatkv.runtime"},
    "chatkv.client": {"chatkv_store", "chatkv.model", "chatkv.session", "chatkv.runtime"}
    | {"chatkv.server"},
    "chatkv.formats": {"chatkv_store"},
    "chatkv.commands": {"chatkv_store", "chatkv.formats", "chatkv.engine", "chatkv.session"}
    | {"chatkv.client"},
    "chatkv.tui": {"chatkv_store", "chatkv.engine", "chatkv.session", "chatkv.client"}
    | {"chatkv.commands"},
    "chatkv.settings": {"chatkv_store", "chatkv.engine", "chatkv.session"},
    "chatkv.cli": {"chatkv_store", "chatkv.model", "chatkv.engine", "chatkv.restore"}
    | {"chatkv.apart"}
    | {"chatkv.session", "chatkv.runtime", "chatkv.server", "chatkv.client", "chatkv.tui"}
    | {"chatkv.settings", "chatkv.formats", "chatkv.commands"},
    "chatkv.__main__": {"chatkv.cli"},
}
THIRD_PARTY = {  # where a part is held to less than the project's dependencies
    "chatkv_store": {"cryptography", "keyring", "lmdb", "numpy", "xxhash", "zstandard"},
    "chatkv_kernels": {"torch", "triton"},
}


def _part(module: str) -> str:
    """The part of MAY_IMPORT or BASE that a module of ours belongs to."""
    names = [name for name in (*MAY_IMPORT, *BASE) if f"{module}.".startswith(f"{name}.")]
    part = max(names, key=len)
    assert part != "chatkv" or module == "chatkv", (
        f"{module} belongs to no part of MAY_IMPORT: say what it may import"
    )
    return part


def _imports(module: str) -> Iterator[tuple[str, int]]:
    """Every module that `module` imports anywhere in its code, with the line."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:  # `from chatkv import model` imports chatkv.model
                submodule = f"{base}.{alias.name}"
                yield (submodule if submodule in MODULES else base), node.lineno


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    part = _part(module)
    ours = {part} | MAY_IMPORT.get(part, set())
    if part.startswith("chatkv"):
        ours |= BASE if part.split(".")[0] == "chatkv" else set()
    declared = THIRD_PARTY.get(part, _declared_dependencies())
    for name, line in _imports(module):
        top = name.split(".")[0]
        where = f"{MODULES[module].relative_to(REPOSITORY)}:{line}"
        if top in PACKAGES:
            assert _part(name) in ours, f"{where}: {part} must not import {name}"
        elif top not in sys.stdlib_module_names:
            assert top in declared, f"{where}: {part} must not import {top}"


def _declared_dependencies() -> set[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["hub"]]
    found = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}
    # Used where they are there; the module of markdown-it-py; and the host of a connector.
    return found | {"triton", "keyring", "markdown_it", "vllm", "nixl_cu12"}


def test_an_upward_import_would_be_found() -> None:
    """The rule above can fail: it sees relative imports, submodules and imports in functions."""
    assert "chatkv.model" not in MAY_IMPORT["chatkv_store"] | MAY_IMPORT["chatkv_kernels"]
    assert set(_imports("chatkv.model.config")) >= {("hashlib", 8), ("dataclasses", 10)}
    for part, allowed in MAY_IMPORT.items():
        lower = list(MAY_IMPORT)[: list(MAY_IMPORT).index(part)]
        assert allowed <= set(lower), f"{part} is listed before something that it imports"


@pytest.mark.parametrize("module", [name for name in MODULES if "._" not in name])
def test_public_modules_say_what_they_are(module: str) -> None:
    source = MODULES[module].read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source)) or not source.strip(), (
        module
    )  # or an empty __init__.py


def test_no_init_file_where_it_would_make_a_second_package() -> None:
    """A top-level package `kernels` breaks transformers; one in tests/ becomes one too."""
    found = [REPOSITORY / "kernels" / "__init__.py", REPOSITORY / "store" / "__init__.py"]
    found += (REPOSITORY / "tests").rglob("__init__.py")
    assert [path for path in found if path.exists()] == []


def _modules_after(code: str) -> set[str]:
    """Top-level names in sys.modules after a new interpreter has run `code`."""
    report = "import json, sys; print(json.dumps(list(sys.modules)), file=sys.__stdout__)"
    path = [str(folder.parent) for folder in PACKAGES.values()]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path}\n{code}\n{report}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_the_store_needs_no_torch_and_arrays_only_where_they_are_read() -> None:
    modules = {name for name in MODULES if name.startswith("chatkv_store")}
    assert _modules_after("import " + ", ".join(modules)).isdisjoint(
        {"torch", "chatkv", "chatkv_kernels"}
    )
    arrays = ("chatkv_store.codec", "chatkv_store.payloads", "chatkv_store.loader")
    inspecting = sorted(name for name in modules if not name.startswith(arrays))
    assert "numpy" not in _modules_after("import " + ", ".join(inspecting))


@pytest.mark.parametrize("arguments", [["--help"], ["cache", "ls"], ["sessions", "ls"]])
def test_light_commands_leave_torch_alone(arguments: list[str], home: Path) -> None:
    code = f"""
import sys
from chatkv.cli.main import main
sys.argv = ["chatkv", *{arguments}]
try:
    main()
except SystemExit as exit:
    assert not exit.code, exit.code
"""
    loaded = _modules_after(code)
    assert "click" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "transformers", "tokenizers", "jinja2"})


def test_version_is_in_the_changelog() -> None:
    source = (REPOSITORY / "chatkv" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert version
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert newest and newest[1] == version[1]


@pytest.mark.slow
def test_wheel_and_sdist_hold_all_three_packages(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", str(tmp_path)],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        timeout=120,
    )
    expected = {
        str(Path(*name.split(".")[:1], path.relative_to(PACKAGES[name.split(".")[0]])))
        for name, path in MODULES.items()
    } | {f"{name}/py.typed" for name in PACKAGES}
    page = REPOSITORY / "chatkv" / "server" / "static"
    expected |= {str(path.relative_to(REPOSITORY)) for path in page.rglob("*") if path.is_file()}
    expected.add("chatkv/model/smollm2-135m-instruct.mtp.safetensors")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == expected

    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {"/".join(name.split("/")[1:]) for name in archive.getnames()}
    sources = {str(path.relative_to(REPOSITORY)) for path in MODULES.values()}
    assert sources | {"pyproject.toml", "README.md", "LICENSE", "scripts/chat"} <= inside
