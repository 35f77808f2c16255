"""The generated pages of the site (docs/scripts). tests/integration/test_site_in_browser.py looks at the built site."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer.main

from paceline.cli.app import app
from paceline.config import ENVIRONMENT

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs/scripts"))
    monkeypatch.delitem(sys.modules, "reference", raising=False)


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
