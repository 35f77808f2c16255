"""Links know nothing of what is built on them: neither they nor what they import imports it."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline

ABOVE = {
    "cli", "collectives", "demo", "elastic", "embedded", "group", "parallel", "session", "testing", "torch",
}  # fmt: skip


def imports(name: str) -> set[str]:
    """The modules of Paceline that one of them imports, without the package's name."""
    path = Path(paceline.__file__).parent.joinpath(*name.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "paceline":
            package = node.module.removeprefix("paceline").lstrip(".")
            for alias in node.names:
                inner = f"{package}.{alias.name}".lstrip(".")
                where = Path(paceline.__file__).parent.joinpath(*inner.split("."))
                found.add(inner if where.is_dir() or where.with_suffix(".py").exists() else package)
    return found - {""}


def test_links_import_nothing_that_is_above_them() -> None:
    root = Path(paceline.__file__).parent
    names = {".".join(path.relative_to(root).with_suffix("").parts) for path in root.glob("links/**/*.py")}
    seen, waiting = set[str](), {name.removesuffix(".__init__") for name in names}
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for other in imports(name):
            assert other.split(".")[0] not in ABOVE, f"{name} imports {other}"
            if other not in seen and not other.startswith("checkpoint"):
                waiting.add(other)
