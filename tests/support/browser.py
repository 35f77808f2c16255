"""A real browser for tests: headless Chromium, driven by playwright.

Debian's `chromium-headless-shell` (or `chromium`) is enough: playwright downloads no browser of its own.
A test waits for what the page shows (`Page.until`), never for time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from typing import Any

from support.needs import missing

with suppress(ImportError):  # only `make test-browser` installs it
    from playwright import async_api as playwright

__all__ = ["Browser", "Page", "browser", "program"]

_PATIENCE_S = 20.0
"""Seconds after which a test that waits for the page gives up."""

_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def program(*names: str) -> str:
    """Returns the path of the first of some programs that is installed; skips or fails the test if none is."""
    for name in names:
        if found := shutil.which(name):
            return found
    return missing("browser", f"none of {', '.join(names)} is installed")


class Browser:
    """One browser process."""

    def __init__(self, chromium: playwright.Browser) -> None:
        self._chromium = chromium

    async def page(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Opens a page in a context of its own (no storage is shared) and waits until it is loaded."""
        page = Page(await self._chromium.new_page())
        await page.look(width, height, dark=dark)
        await page.go(url)
        return page


class Page:
    """One page.

    Attributes:
        complaints: what the browser reported: exceptions that no script caught, violations of the content policy,
            errors in the console. A lost connection is none.
        requests: the addresses that the page asked for, in order.
    """

    def __init__(self, page: playwright.Page) -> None:
        self._page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(_PATIENCE_S * 1000)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._hear)

    def _hear(self, message: playwright.ConsoleMessage) -> None:
        if message.type in ("error", "assert") and not message.text.startswith("Failed to load resource"):
            self.complaints.append(message.text)

    async def go(self, url: str) -> None:
        """Opens an address and waits until it is loaded."""
        await self._page.goto(url)

    async def run(self, script: str) -> Any:
        """Evaluates an expression and returns its value; of a promise, what it resolves to."""
        return await self._page.evaluate(script)

    async def run_first(self, script: str) -> None:
        """Has a script run in each document that is opened from now on, before the document's own."""
        await self._page.add_init_script(script)

    async def until(self, condition: str) -> Any:
        """Waits until an expression is true; returns its value."""
        checked = f"() => {{ try {{ return ({condition}) }} catch (error) {{ return false }} }}"
        try:
            found = await self._page.wait_for_function(checked)
        except playwright.TimeoutError as error:
            shown = await self.run("document.body.innerText")
            raise AssertionError(f"{error}: {condition}\n{self.complaints}\n{shown}") from None
        return await found.json_value()

    async def text(self, selector: str) -> str:
        """Returns the text that the first such element shows."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def click(self, selector: str) -> None:
        """Clicks with the mouse in the middle of an element, once it is there, visible, and above all others."""
        await self._page.locator(selector).first.click()

    async def point(self, selector: str, across: float) -> None:
        """Moves the mouse over an element: to its left edge with 0, to its right edge with 1."""
        there = self._page.locator(selector).first
        await there.scroll_into_view_if_needed()
        box = await there.bounding_box()
        assert box is not None
        await there.hover(position={"x": across * box["width"], "y": box["height"] / 2})

    async def press(self, key: str) -> None:
        """Presses and releases a key: "Tab", "Enter", "Escape"."""
        await self._page.keyboard.press(key)

    async def type(self, text: str) -> None:
        """Types into the element that has the focus."""
        await self._page.keyboard.insert_text(text)

    async def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Sets the size of the window in CSS pixels, and the user's choice of light or dark."""
        await self._page.set_viewport_size({"width": width, "height": height})
        await self._page.emulate_media(color_scheme="dark" if dark else "light")

    async def picture(self, *, whole: bool = False) -> bytes:
        """Takes a picture, PNG: of the window, or of the whole page."""
        return await self._page.screenshot(full_page=whole)


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Starts a browser with a profile of its own; both are gone at the end."""
    path = program(*_PROGRAMS)
    if find_spec("playwright") is None:
        missing("browser", "playwright is not installed: make test-browser")
    async with playwright.async_playwright() as driver, await driver.chromium.launch(executable_path=path) as chromium:
        yield Browser(chromium)
