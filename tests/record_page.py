"""Records the page while `paceline demo` kills a worker: `python tests/record_page.py` writes docs/images/page-*.png.

The pictures are of the real page of a real run. Chromium takes them; nothing is drawn afterwards.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from support.browser import Page, browser
from support.command import command

IMAGES = Path(__file__).parents[1] / "docs" / "images"

WIDTH, HEIGHT = 1280, 960

MOST_BYTES = 200_000
"""Of one picture."""

_TRAINING = (
    "[...document.querySelectorAll('#workers tbody tr')].filter((row) => /training/.test(row.textContent)).length"
)

_STEP = (
    "Math.max(0, ...[...document.querySelectorAll('#workers td.step')].map((cell) => Number(cell.textContent) || 0))"
)


async def _take(page: Page, name: str, when: str) -> None:
    """Waits until a condition holds on the page, and takes a picture."""
    await page.until(when)
    picture = await page.picture()
    assert len(picture) <= MOST_BYTES, f"{name}: {len(picture)} bytes"
    (IMAGES / f"page-{name}.png").write_bytes(picture)


async def _record(url: str) -> None:
    async with browser() as chromium:
        page = await chromium.page(url, width=WIDTH, height=HEIGHT)
        await _take(page, "1-training", f"{_TRAINING} === 4 && {_STEP} > 500")
        await _take(page, "2-killed", f"!document.querySelector('#gone').hidden && {_TRAINING} === 3")
        await _take(page, "3-newcomer", f"{_TRAINING} === 4 && !document.querySelector('#gone').hidden")
        await page.look(WIDTH, HEIGHT, dark=True)
        await _take(page, "4-dark", f"{_TRAINING} === 4")


def main() -> None:
    """Runs the demo, watches it, and writes the pictures."""
    IMAGES.mkdir(exist_ok=True)
    with command("demo", "--http", "--workers", "4", "--kill-at-step", "1000") as demo:
        demo.wait_for("http://")
        found = re.search(r"http://\S+", demo.stdout + demo.stderr)
        assert found is not None
        asyncio.run(_record(found[0]))
        assert demo.wait(120) == 0, str(demo)


if __name__ == "__main__":
    main()
