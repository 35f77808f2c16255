"""The diagrams and the generated pages of the site (docs/scripts)."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import typer.main

from paceline.cli.app import app
from paceline.config import ENVIRONMENT

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs/scripts"))
    for name in ("reference", "sequence"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_sequence_diagram_shows_participants_messages_and_notes() -> None:
    from sequence import as_svg

    lines = ["sequenceDiagram", "participant A as rank 0", "participant C as coordinator", "A->>C: report: <lost>"]
    text = as_svg("\n".join([*lines, "Note over A,C: step 40", "A--xA: SIGKILL", "C-->>A: verdict"]))
    ElementTree.fromstring(text)
    for part in ("rank 0", "coordinator", "report: &lt;lost&gt;", "step 40", "SIGKILL", "verdict"):
        assert f">{part}</text>" in text
    with pytest.raises(ValueError, match="loop"):
        as_svg("participant A as a\nloop every second")


def test_a_state_diagram_shows_states_and_transition_labels() -> None:
    from sequence import as_svg

    text = as_svg("stateDiagram-v2\n[*] --> Ready: joins\nReady --> Stepping: a step begins\nReady --> [*]: leaves")
    heads = [node.text for node in ElementTree.fromstring(text).iter() if node.get("class") == "name"]
    assert heads == ["outside", "Ready", "Stepping"]
    for label in ("joins", "a step begins", "leaves"):
        assert f">{label}</text>" in text


def test_each_diagram_of_the_documents_can_be_drawn() -> None:
    from sequence import as_svg

    pages = [ROOT / "DESIGN.md", *ROOT.glob("docs/**/*.md")]
    drawn = [as_svg(text) for page in pages for text in re.findall(r"(?ms)^```mermaid\n(.*?)^```$", page.read_text())]
    assert len(drawn) >= 3, "a death, a join, and the phases of a member"


def test_the_page_of_commands_has_those_of_plugins_too_and_all_options() -> None:
    from reference import command_line

    page, top = command_line(), typer.main.get_command(app)
    sections = {name: text for name, _, text in (part.partition("`\n") for part in page.split("\n## `paceline "))}
    assert "run-rank" in sections
    for name, command in top.commands.items():  # type: ignore[attr-defined]  # it is a group
        for option in (each for each in command.params if each.opts[0].startswith("-")):
            assert all(each in sections[name] for each in option.opts), (name, option.opts)


def test_the_page_of_settings_has_each_variable() -> None:
    from reference import settings

    assert all(f"| `{name}` |" in settings() for name in ENVIRONMENT)
