"""Imports point one way: from high layers to low ones, and never round in a circle.

All imports count, also those inside functions and those for type checkers alone: a reader follows each of them.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import paceline
import paceline_server

LAYERS = (
    {"_base", "config", "credentials", "errors"},
    {"compression"},
    {"_links"},
    {"engines"},
    {"_microbatch"},
    {"_collectives"},
    {"_group"},
    {"_session"},
    {"checkpoint"},
    {"_parallel"},
    {"nn", "optim"},
    {"_elastic"},
    {"torch", "testing"},
    {"paceline"},  # what `import paceline` offers
    {"launch"},
    {"demo"},
    {"cli"},
    {"_notebook"},
    {"__main__"},
)
"""Packages and modules of paceline, low to high. Those of one layer may not import each other, but for the first."""

BOTTOM = LAYERS[0]


def files_of(package: str) -> dict[str, Path]:
    """The modules of an installed package by name, as files."""
    module = {"paceline": paceline, "paceline_server": paceline_server}[package]
    assert module.__file__ is not None
    root = Path(module.__file__).parent
    found = {}
    for file in root.rglob("*.py"):
        words = [package, *file.relative_to(root).with_suffix("").parts]
        found[".".join(words[:-1] if words[-1] == "__init__" else words)] = file
    return found


@functools.cache
def syntax_of(file: Path) -> tuple[ast.Module, list[ast.Import | ast.ImportFrom]]:
    """A file's syntax tree and all imports in it, read once for all tests."""
    tree = ast.parse(file.read_text())
    return tree, [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_of(name: str, file: Path, files: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """What a module imports of its own package: names of modules, with the line."""
    for node in syntax_of(file)[1]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name in files)
        else:
            assert node.level == 0, f"{name}, line {node.lineno}: write the whole name of what is imported"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                if module in files or node.module in files:
                    yield module if module in files else str(node.module), node.lineno


def part_of(module: str) -> str:
    """The package or module directly below the root in which a module lies; the root's own name for itself."""
    return module.split(".")[1] if "." in module else module


def test_each_part_of_the_library_has_one_layer() -> None:
    named = [part for layer in LAYERS for part in layer]
    assert sorted(named) == sorted({part_of(module) for module in files_of("paceline")})


def test_an_import_points_to_a_lower_layer() -> None:
    level = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    files, upwards = files_of("paceline"), []
    for name, file in files.items():
        mine = part_of(name)
        for imported, line in imports_of(name, file, files):
            theirs = part_of(imported)
            if theirs == mine or level[theirs] < level[mine] or (theirs in BOTTOM and mine in BOTTOM):
                continue
            upwards.append(f"{file}:{line}: {name} imports {imported}, which lies in a higher layer or beside it")
    assert not upwards, "\n".join(upwards)


def test_the_library_imports_the_coordinator_only_to_start_one() -> None:
    starts_one = {"paceline._base.embedded", "paceline.cli.coordinator", "paceline.launch._own_coordinator"}
    files = files_of("paceline")
    found = {
        name
        for name, file in files.items()
        for node in syntax_of(file)[1]
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "paceline_server"
    }
    assert found <= starts_one, found - starts_one


@pytest.mark.parametrize("package", ["paceline", "paceline_server"])
def test_imports_have_no_cycles(package: str) -> None:
    files = files_of(package)
    graph = {
        name: {imported for imported, _ in imports_of(name, file, files) if imported != name}
        for name, file in files.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_no_two_coordinator_packages_import_each_other() -> None:
    files = files_of("paceline_server")
    packages = {part_of(name) for name, file in files.items() if file.name == "__init__.py"} - {"paceline_server"}
    ties = {
        (part_of(name), part_of(imported))
        for name, file in files.items()
        for imported, _ in imports_of(name, file, files)
        if {part_of(name), part_of(imported)} <= packages and part_of(name) != part_of(imported)
    }
    assert not {tie for tie in ties if tie[::-1] in ties}


def test_the_library_imports_neither_tests_nor_benchmarks() -> None:
    root = Path(__file__).parents[3]
    outside = {file.stem for folder in ("bench", "tests") for file in (root / folder).iterdir()} | {"bench", "tests"}
    for package in ("paceline", "paceline_server"):
        for name, file in files_of(package).items():
            for node in syntax_of(file)[1]:
                words = [str(node.module)] if isinstance(node, ast.ImportFrom) else []
                words += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                assert not outside & {word.partition(".")[0] for word in words}, name


FOR_TORCH_TOO = {"DDP", "FSDP", "Store"}
"""Classes that NumPy's users and torch's both know by these names."""


def test_file_and_class_names_are_unique() -> None:
    """So that a name says which one is meant. Classes with an underscore are their file's own."""
    files = [file for file in files_of("paceline").values() if file.name != "__init__.py"]
    names = Counter(file.name for file in files)
    for file in files:
        for node in syntax_of(file)[0].body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names[node.name] += 1
    assert {name for name, count in names.items() if count > 1} <= FOR_TORCH_TOO
