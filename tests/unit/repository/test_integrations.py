"""Plug-ins use public names only, as one that somebody else writes has to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "integrations").glob("*/paceline_*/**/*.py"))
PRIVATE = ("paceline.cli", "paceline_server", "paceline_protocol", "pacelinepb")


def named_by(module: str) -> set[str]:
    """`__all__` of a module of paceline, without an import of it."""
    path = ROOT.joinpath("client", *module.split("."))
    for node in ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def is_module(name: str) -> bool:
    path = ROOT.joinpath("client", *name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imported(code: str) -> Iterator[tuple[str, str]]:
    """All imports, wherever they stand: (module, name); the name is empty for a module as a whole."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write the whole name of what is imported"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_whole = node.module is not None and node.module.startswith("paceline") and is_module(whole)
                yield (whole, "") if is_whole else (str(node.module), alias.name)


def not_public(code: str, own: str) -> list[str]:
    """The imports that a file of the package `own` may not have."""
    wrong = []
    for module, name in imported(code):
        first = module.partition(".")[0]
        if first == own or not first.startswith("paceline"):
            continue
        is_hidden = any(word.startswith("_") for word in module.split("."))
        if is_hidden or f"{module}.".startswith(tuple(f"{each}." for each in PRIVATE)):
            wrong.append(module)
        elif name and name not in named_by(module):
            wrong.append(f"{name} of {module}")
    return wrong


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT / "integrations")))
def test_a_plug_in_imports_public_names_only(file: Path) -> None:
    own = next(part for part in file.relative_to(ROOT / "integrations").parts if part.startswith("paceline_"))
    assert not_public(file.read_text(), own) == []


@pytest.mark.parametrize(
    "code",
    [
        "from paceline._base.waits import loop_thread",
        "from paceline import _base",
        "import paceline._session.view",
        "from paceline.cli.admin import drain",
        "from paceline import cli",
        "import paceline_server",
        "from pacelinepb import v1",
        "from paceline import no_such_name",
        "def f():\n    from paceline.launch import Launcher",
    ],
)
def test_imports_of_private_names_are_found(code: str) -> None:
    assert not_public(code, "paceline_mine")


@pytest.mark.parametrize(
    "code",
    [
        "from paceline import Config, launch",
        "import paceline.launch",
        "from paceline.launch import Host",
        "from paceline_mine._part import x",
        "import os",
    ],
)
def test_imports_of_public_names_are_allowed(code: str) -> None:
    assert not_public(code, "paceline_mine") == []
