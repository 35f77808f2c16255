"""The site of the documents in a real browser, read from files: search, navigation, diagrams, the length of pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.browser import Browser, browser
from support.coordinator import run
from support.needs import missing

pytestmark = [pytest.mark.needs(what="browser"), pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
WIDE, NARROW = 1280, 390
SCREENS = 40
"""The longest page of the API is shorter; `Group` needs 31 screens."""

CUT_OFF = """
[...document.querySelectorAll("div.mermaid")].map((diagram) => {
  const svg = diagram.shadowRoot.querySelector("svg"), edge = svg.getBoundingClientRect();
  const page = diagram.closest("article").getBoundingClientRect();
  return [svg, ...svg.querySelectorAll("text, foreignObject")].filter((part) => {
    const box = part.getBoundingClientRect();
    return box.left < Math.max(edge.left, page.left) - 1 || box.right > Math.min(edge.right, page.right) + 1
        || box.top < edge.top - 1 || box.bottom > edge.bottom + 1;
  }).map((part) => part.textContent);
})
"""
"""For each diagram its texts that lie beyond its edge, or the page's."""

OPENED = """
const attach = Element.prototype.attachShadow;
Element.prototype.attachShadow = function () { return attach.call(this, {mode: "open"}) };
"""
"""The theme hides its diagrams from scripts; this lets the test see them."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("mkdocs") is None:
        missing("browser", "mkdocs is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


async def found(chromium: Browser, site: Path, words: str) -> list[str]:
    """Returns the pages that the search finds, best first."""
    page = await chromium.page(f"{(site / 'index.html').as_uri()}?q={words}")
    await page.until("document.querySelector('.md-search-result__item a') !== null")
    addresses: list[str] = await page.run(
        "[...document.querySelectorAll('.md-search-result__item > a')].map((link) => link.pathname)"
    )
    return [address.removeprefix(f"{site}/") for address in addresses]


def test_the_search_finds_users_pages_before_decisions(site: Path) -> None:
    first = {
        "checkpoint": "tutorials/checkpoints.html",
        "fsdp": "tutorials/fsdp.html",  # a word in brackets, too
        "kubernetes": "how-to/kubernetes.html",
        "slurm": "how-to/slurm.html",
        "torchrun": "tutorials/from-torchrun.html",
        "TrainState": "reference/api/paceline/train-state.html",
    }

    async def main() -> None:
        async with browser() as chromium:
            for words, wanted in first.items():
                assert (await found(chromium, site, words))[0] == wanted
            for words in ("coordinator", "engine", "generation", "microbatch", "repair", "token"):
                pages = await found(chromium, site, words)
                late = [page.startswith(("decisions/", "development/")) for page in pages]
                assert late == sorted(late), pages

    run(main)


def test_a_page_has_tabs_and_links_to_the_previous_and_next_page(site: Path) -> None:
    async def main() -> None:
        async with browser() as chromium:
            page = await chromium.page((site / "tutorials/elastic.html").as_uri(), width=WIDE)
            tabs = "[...document.querySelectorAll('.md-tabs__link')].filter((tab) => tab.checkVisibility())"
            names = await page.run(f"{tabs}.map((tab) => tab.innerText)")
            assert names == ["Home", "Tutorials", "How to", "Reference", "Design"]
            ends = await page.run("[...document.querySelectorAll('.md-footer__link')].map((link) => link.pathname)")
            assert [Path(end).name for end in ends] == ["coming-from.html", "elastic-torch.html"]

    run(main)


def test_lists_and_blocks_are_no_part_of_a_paragraph(site: Path) -> None:
    """On GitHub a list or a fence needs no empty line before it; docs/scripts/site.py adds one."""
    for file in site.rglob("*.html"):
        for paragraph in re.findall("<p>(.*?)</p>", file.read_text(), re.DOTALL):
            assert not re.search(r'^(?:[-*]|\d+\.) |<div class="highlight">', paragraph, re.MULTILINE), file


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_each_diagram_is_drawn_and_none_is_cut_off(site: Path, width: int) -> None:
    count = (ROOT / "DESIGN.md").read_text().count("```mermaid\n")
    assert count >= 3, "a death, a join, and the phases of a member"

    async def main() -> None:
        async with browser() as chromium:
            page = await chromium.page("about:blank", width=width)
            await page.run_first(OPENED)
            await page.go((site / "design.html").as_uri())
            await page.until(f"document.querySelectorAll('div.mermaid').length === {count}")
            assert await page.run(CUT_OFF) == [[]] * count
            assert not page.complaints
            away = [request for request in page.requests if not request.startswith(("file:", "data:", "about:"))]
            assert not away, away

    run(main)


def test_no_page_of_the_api_is_too_long_or_wider_than_a_narrow_window(site: Path) -> None:
    files = sorted(site.glob("reference/api/**/*.html"))

    async def main() -> None:
        async with browser() as chromium:
            page = await chromium.page("about:blank")
            for file in files:
                await page.look(WIDE)
                await page.go(file.as_uri())
                assert await page.run("document.querySelector('article').offsetHeight / 900") < SCREENS, file
                await page.look(NARROW)
                assert await page.run("document.documentElement.scrollWidth") <= NARROW, file

    run(main)
