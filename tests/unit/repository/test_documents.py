"""The documents point to what is there: links, commands, decisions and errors; and they stay as short as promised."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import typer.main

import paceline
from paceline.cli.app import app
from paceline.config import ENVIRONMENT
from support.blocks import FLAGS, LANGUAGES, PAGES, ROOT, blocks

DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(file for folder in ("bench", "deploy", "docs", "tests") for file in ROOT.glob(f"{folder}/**/*.md")),
]
DECISIONS = sorted(path.name for path in ROOT.glob("docs/decisions/[0-9]*.md"))
OURS = re.compile(
    r"https://(?:github\.com/paceline/paceline/(?:blob|tree)|raw\.githubusercontent\.com/paceline/paceline)/main/"
)
ELSEWHERE = (
    "https://github.com/paceline/paceline",
    "https://docs.ray.io/en/latest/train/train.html",
    "https://github.com/horovod/horovod",
    "https://github.com/meta-pytorch/torchft",
    "https://keepachangelog.com/en/1.1.0/",
    "https://ui.perfetto.dev",
)
"""Every page of others that we link to: each was opened when it was added here."""
MADE = {"docs/reference/cli.md": "Command line", "docs/reference/settings.md": "Settings"}
"""Pages that exist on the site alone (docs/scripts/site.py), with their title."""


def links(document: Path) -> list[str]:
    """Where the links of a document lead, but for those in code."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(document: Path) -> set[str]:
    """The names by which a document's headings are linked to."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_link_leads_to_an_existing_file_and_heading(document: Path) -> None:
    for link in links(document):
        address, _, anchor = link.partition("#")
        if OURS.match(address):
            target = ROOT / OURS.sub("", address)
        elif re.match(r"[a-z]+:", address):
            assert link in ELSEWHERE, f"{link}: open it, and add it to ELSEWHERE"
            continue
        else:
            target = document.parent / address if address else document
        if str(target.resolve().relative_to(ROOT)) in MADE:
            continue
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_readme_links_are_absolute() -> None:
    assert all(link.startswith("https://") for link in links(ROOT / "README.md"))


def test_readme_shows_the_page() -> None:
    assert "/docs/images/page-1-training.png)" in (ROOT / "README.md").read_text()


def test_readme_has_at_most_150_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_code_block_has_a_known_language_and_known_flags(page: Path) -> None:
    """So that nobody believes that a block is run, and it is not."""
    assert page.read_text().count("\n```") % 2 == 0
    for block in blocks(page):
        assert block.language in LANGUAGES, block.where
        assert block.flags <= FLAGS, block.where


def typed() -> list[tuple[str, str]]:
    """Commands of paceline in blocks and in the text: (where, command)."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.language in ("sh", "console"):
                lines = block.code.replace("\\\n>", " ").replace("\\\n", " ").splitlines()
                lines = [line.removeprefix("$ ") for line in lines if block.language == "sh" or line.startswith("$ ")]
                found += [(block.where, line.partition("  #")[0]) for line in lines]
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        found += [
            (str(page.relative_to(ROOT)), code) for code in re.findall(r"`([^`\n]*\bpaceline [a-z][^`\n]*)`", text)
        ]
    found = [(where, command.replace("--rdzv-backend paceline", "")) for where, command in found]  # a name to torchrun
    return [(where, command[command.index("paceline ") :]) for where, command in found if "paceline " in command]


def test_documented_commands_and_options_exist() -> None:
    top = typer.main.get_command(app)
    for where, command in typed():
        words = re.split(r"\s+", command)[1:]
        known = top
        while words and hasattr(known, "get_command") and (inner := known.get_command(None, words[0])):
            known = inner
            words.pop(0)
        options = {name for each in known.params for name in (*each.opts, *each.secondary_opts)} | {"--help", "-h"}
        script = next((n for n, word in enumerate(words) if word.endswith(".py") or word == "-m"), len(words))
        for word in words[:script]:
            name = word.partition("=")[0].rstrip(".,;:)")
            if name in ("&", "|", ">", "--"):
                break
            assert not name.startswith("-") or name in options, f"{where}: {command}"
        assert known is not top or not words or not re.fullmatch(r"[a-z]+", words[0]), f"{where}: {command}"


def test_shell_blocks_are_valid() -> None:
    for block in (block for page in PAGES for block in blocks(page) if block.language == "sh"):
        done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block.where}: {done.stderr}"


def test_each_public_error_has_a_row_in_the_error_reference() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)[^|]*\|[^|]+\|[^|]+\|$", page, re.MULTILINE)
    public = {name for name in paceline.errors.__all__ if name != "PacelineError"}
    assert public <= set(rows), f"without a line: {sorted(public - set(rows))}"


def test_the_api_reference_lists_each_public_name() -> None:
    named = {
        name
        for page in (ROOT / "docs/reference/api").rglob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    }
    named |= {f"paceline.{name}" for name, home in paceline._HOME.items() if f"{home}.{name}" in named}
    errors = {f"paceline.{name}" for name in paceline.errors.__all__}
    wanted = {f"paceline.{name}" for name in paceline.__all__ if name != "__version__"} - errors
    torch = (ROOT / "client/paceline/torch/__init__.py").read_text()  # an import would need torch
    wanted |= {f"paceline.torch.{name}" for name in re.findall(r'^    "(\w+)",$', torch, re.MULTILINE)}
    assert wanted <= named | {"paceline.errors"}, f"without a place: {sorted(wanted - named)}"


def test_documented_environment_variables_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"\bPACELINE_[A-Z_]+\b", page.read_text())}
    assert named <= set(ENVIRONMENT), sorted(named - set(ENVIRONMENT))


def test_the_decision_index_names_each_decision_once() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text()
    assert sorted(re.findall(r"\]\((\d{2,3}-[^)]*)\)", index)) == DECISIONS


def test_decision_numbers_are_unique() -> None:
    numbers = [name.partition("-")[0] for name in DECISIONS]
    assert len(set(numbers)) == len(numbers)


def test_there_are_at_most_30_two_digit_decisions() -> None:
    assert len([name for name in DECISIONS if re.match(r"\d\d-", name)]) <= 30


def test_decisions_named_in_code_exist() -> None:
    numbers = {name.partition("-")[0] for name in DECISIONS}
    for folder in ("client", "integrations", "server", "protocol", "protos", "bench", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            for number in re.findall(r"decisions?[/ ](\d+)", file.read_text()):
                assert number in numbers, f"{file} names decision {number}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/development/where-to-look.md"])
def test_files_named_in_contributor_pages_exist(page: str) -> None:
    places = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    there = [f"/{path.relative_to(ROOT)}" for place in places for path in (place, *place.rglob("*"))]
    for name in re.findall(r"`([\w./-]+(?:\.(?:py|js|md|proto|toml)|/))`", (ROOT / page).read_text()):
        found = (ROOT / name).exists() or any(path.endswith(f"/{name.rstrip('/')}") for path in there)
        assert found, f"{page} names {name}"


@pytest.mark.parametrize(("page", "words"), [("CONTRIBUTING.md", 950), ("SECURITY.md", 950)])
def test_contributing_and_security_pages_have_at_most_950_words(page: str, words: int) -> None:
    assert len((ROOT / page).read_text().split()) <= words


def test_the_design_has_at_most_4000_words() -> None:
    assert len((ROOT / "DESIGN.md").read_text().split()) <= 4000


def test_the_code_walk_of_a_death_names_at_most_32_existing_files() -> None:
    text = (ROOT / "docs/protocol.md").read_text().partition("## A death through the code")[2]
    death, _, text = text.partition("## The exit through the code")
    named = re.findall(r"[\w/]+\.py", death)
    assert 0 < len(named) == len(set(named)) <= 32
    told = re.findall(r"[\w/]+\.(?:py|js)", text.partition("## The rules")[0])
    assert told
    named += told
    folders = ("client/paceline", "server/paceline_server", "protocol/paceline_protocol", "protos/pacelinepb")
    there = [str(path) for folder in folders for path in (ROOT / folder).rglob("*.*")]
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in there)]
