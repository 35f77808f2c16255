"""The documents point to what is there: links between them, decisions named in code, and the index of decisions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
DECISIONS = sorted(path.name for path in ROOT.glob("docs/decisions/[0-9]*.md"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_link_leads_to_a_file(document: Path) -> None:
    for name in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / name).exists(), name


def test_the_index_names_each_decision_once() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text()
    assert sorted(re.findall(r"\]\((\d{3}-[^)]*)\)", index)) == DECISIONS


def test_no_two_decisions_have_one_number() -> None:
    numbers = [name[:3] for name in DECISIONS]
    assert len(set(numbers)) == len(numbers)


def test_code_names_decisions_that_are_there() -> None:
    numbers = {name[:3] for name in DECISIONS}
    for folder in ("client", "server", "protocol", "protos", "bench", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            for number in re.findall(r"docs/decisions/(\d{3})", file.read_text()):
                assert number in numbers, f"{file} names decision {number}"


def test_the_design_can_be_read_in_a_quarter_of_an_hour() -> None:
    assert len((ROOT / "DESIGN.md").read_text().split()) <= 4000
