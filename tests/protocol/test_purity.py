"""The protocol has no socket, clock, thread or file: it imports nothing that has one."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline_protocol

_ALLOWED = {
    "__future__",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "itertools",
    "paceline_protocol",
    "pacelinepb",
    "pacelinepb.v1.errors_pb2",
    "re",
    "secrets",  # compare_digest: tokens are compared in constant time
    "signal",  # the names of signals
    "typing",
}


def test_nothing_is_imported_that_acts() -> None:
    assert paceline_protocol.__file__ is not None
    for path in sorted(Path(paceline_protocol.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported = {node.module or ""}
            else:
                continue
            foreign = {name for name in imported - _ALLOWED if not name.startswith("paceline_protocol.")}
            assert not foreign, f"{path.name} imports {foreign}"


def test_every_event_and_effect_is_in_the_glossary() -> None:
    words = set((paceline_protocol.__doc__ or "").replace(",", " ").split())
    from paceline_protocol import _events

    made = {name for name, kind in vars(_events).items() if getattr(kind, "__module__", "") == _events.__name__}
    assert {name for name in made if not name.startswith("_")} - {"Event", "Effect"} <= words
