"""The protocol has no socket, clock, thread or file: it imports nothing that has one."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import paceline_protocol
from paceline_protocol import messages
from paceline_protocol.coordinator import Effect, Event

_ALLOWED = {
    "__future__",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "itertools",
    "paceline_protocol",
    "pacelinepb",
    "math",
    "pacelinepb.v1",
    "pacelinepb.v1.errors_pb2",
    "re",
    "secrets",  # compare_digest: tokens are compared in constant time
    "signal",  # the names of signals
    "typing",
}


def test_the_protocol_imports_only_allowed_modules() -> None:
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


def test_every_event_effect_and_message_is_in_the_glossary() -> None:
    words = set((paceline_protocol.__doc__ or "").replace(",", " ").split())
    for kinds in (Event, Effect, messages.Message):
        assert {kind.__name__ for kind in get_args(kinds)} <= words
