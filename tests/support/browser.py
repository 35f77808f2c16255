"""A real browser for tests: headless Chromium, driven over the DevTools protocol.

Debian's `chromium-headless-shell` (or `chromium`) is enough; docs/decisions/25 says why there is no library between.
A test waits for what the page shows (`Page.until`), never for time.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType

from support.needs import missing

__all__ = ["Browser", "Page", "browser", "program"]

_PATIENCE_S = 20.0
"""Seconds after which a test that waits for the page gives up."""

_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")

_UNTIL = """
new Promise((resolve) => {
  const check = () => { const found = (() => { try { return (%s) } catch (error) { return false } })();
                        if (found) { watch.disconnect(); resolve(found) } };
  const watch = new MutationObserver(check);
  watch.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
  check();
})
"""


def program(*names: str) -> str:
    """Returns the path of the first of some programs that is installed; skips or fails the test if none is."""
    for name in names:
        if found := shutil.which(name):
            return found
    return missing("browser", f"none of {', '.join(names)} is installed")


class Refused(Exception):
    """The browser did not carry out a command."""


class Browser:
    """One browser process; commands and events of all its pages go over one connection."""

    def __init__(self, connection: ClientWebSocketResponse) -> None:
        self._connection = connection
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reading = asyncio.create_task(self._read())

    async def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        number = next(self._numbers)
        command: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            command["sessionId"] = session
        answered = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await self._connection.send_str(json.dumps(command))
            async with asyncio.timeout(_PATIENCE_S):
                answer = await answered
        finally:
            del self._answers[number]
        if "error" in answer:
            raise Refused(method, answer["error"]["message"])
        result: dict[str, Any] = answer["result"]
        return result

    async def page(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Opens a page in a context of its own (no storage is shared) and waits until it is loaded."""
        context = (await self.send("Target.createBrowserContext"))["browserContextId"]
        target = await self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.send(f"{domain}.enable")
        await page.look(width, height, dark=dark)
        await page.go(url)
        return page

    async def close(self) -> None:
        """Ends the connection."""
        await self._connection.close()
        await self._reading

    async def _read(self) -> None:
        async for message in self._connection:
            if message.type is not WSMsgType.TEXT:
                continue
            told = json.loads(message.data)
            if "id" in told:
                answered = self._answers.get(told["id"])
                if answered is not None and not answered.done():
                    answered.set_result(told)
            elif told.get("sessionId") in self._pages:
                self._pages[told["sessionId"]].hear(told["method"], told["params"])


class Page:
    """One page.

    Attributes:
        complaints: what the browser reported: exceptions that no script caught, violations of the content policy,
            errors in the console. A lost connection is none.
        requests: the addresses that the page asked for, in order.
    """

    def __init__(self, owner: Browser, session: str) -> None:
        self._browser = owner
        self._session = session
        self._loaded = asyncio.Event()
        self.complaints: list[str] = []
        self.requests: list[str] = []

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command for this page and returns its result."""
        return await self._browser.send(method, self._session, **parameters)

    def hear(self, method: str, told: dict[str, Any]) -> None:
        """Takes an event."""
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
            self.complaints.append(json.dumps(told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error" and told["entry"]["source"] != "network":
            self.complaints.append(told["entry"]["text"])

    async def go(self, url: str) -> None:
        """Opens an address and waits until it is loaded."""
        self._loaded.clear()
        await self.send("Page.navigate", url=url)
        async with asyncio.timeout(_PATIENCE_S):
            await self._loaded.wait()

    async def run(self, script: str) -> Any:
        """Evaluates an expression and returns its value; of a promise, what it resolves to."""
        answer = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Waits until an expression is true, looking after each change of the document; returns its value."""
        try:
            while True:
                with suppress(Refused):  # the page has gone elsewhere: look there
                    return await self.run(_UNTIL % condition)
        except TimeoutError:
            shown = await self.run("document.body.innerText")
            raise AssertionError(f"not in {_PATIENCE_S} s: {condition}\n{self.complaints}\n{shown}") from None

    async def text(self, selector: str) -> str:
        """Returns the text that the first such element shows."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def click(self, selector: str) -> None:
        """Clicks with the mouse in the middle of an element, which must be there, visible, and above all others."""
        at = await self.run(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = element.getBoundingClientRect();
            const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
            return element.contains(document.elementFromPoint(x, y)) ? {{x, y}} : null;
        }})()""")
        assert at is not None, f"{selector} is not visible"
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    async def press(self, key: str) -> None:
        """Presses and releases a key: "Tab", "Enter", "Escape"."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def type(self, text: str) -> None:
        """Types into the element that has the focus."""
        await self.send("Input.insertText", text=text)

    async def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Sets the size of the window in CSS pixels, and the user's choice of light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, *, whole: bool = False) -> bytes:
        """Takes a picture, PNG: of the window, or of the whole page."""
        shot = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Starts a browser with a profile of its own; both are gone at the end."""
    path = program(*_PROGRAMS)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        root = ("--no-sandbox",) if os.geteuid() == 0 else ()  # the sandbox of a root would hold nothing
        flags = ("--headless", *root, "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
        quiet = (
            "--no-first-run",
            "--disable-background-networking",
            "--disable-extensions",
            "--force-color-profile=srgb",
        )
        process = await asyncio.create_subprocess_exec(
            *(path, *flags, *quiet, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"HOME": profile},
            start_new_session=True,  # so that its helpers end with it
        )
        assert process.stderr is not None
        draining: asyncio.Task[bytes] | None = None
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while line := await process.stderr.readline():
                    if found := re.search(rb"DevTools listening on (ws://\S+)", line):
                        break
                else:
                    raise AssertionError(f"{path} has ended before it listened")
            draining = asyncio.create_task(process.stderr.read())
            async with ClientSession() as client, client.ws_connect(found[1].decode(), max_msg_size=1 << 26) as wire:
                chromium = Browser(wire)
                try:
                    yield chromium
                finally:
                    await chromium.close()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            if draining is not None:
                await draining
