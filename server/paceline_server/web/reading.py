"""A process that reads members' answers for the page, so that whatever they have sent cannot hold up the coordinator.

It gets the answers on its standard input, and is killed when its time is over or its output gets too long. Its own
module bounds its memory (`pacelinepb.debug.apart`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pacelinepb
from paceline_server.errors import NoRoom, NotFound
from paceline_server.web.web_limits import WebLimits
from pacelinepb.debug.apart import MUCH_MEMORY, NOTHING

_log = logging.getLogger(__name__)

_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from pacelinepb.debug.apart import main; main()"

_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
"""Variables that the process inherits: those that an interpreter may need to start. No token is among them."""


class Reader:
    """Has answers read, one question at a time. `instead` is the command that does the same elsewhere."""

    def __init__(self, instead: str, limits: WebLimits) -> None:
        self._instead = instead
        self._limits = limits
        self._one = asyncio.Lock()

    async def read(self, request: Iterable[bytes]) -> bytearray:
        """Returns the JSON that the process makes of a request; raises NotFound or NoRoom if it makes none."""
        async with self._one:
            process = await self._start()
            feeding = asyncio.create_task(_feed(process, request))
            try:
                async with asyncio.timeout(self._limits.read_s):
                    output = await self._output(process)
                    status = await process.wait()
            except TimeoutError:
                raise self._failed(f"took more than {self._limits.read_s:g} s to read") from None
            finally:
                await _end(process, feeding)
        if status == NOTHING:
            raise NotFound(output.decode(errors="replace"))
        if status == MUCH_MEMORY:
            raise self._failed("took too much memory to read")
        if status:
            _log.error("the process that reads members' answers has ended with %d", status)
            raise self._failed(f"could not be read: the process that reads them has ended with {status}")
        return output

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-c", _CODE, _path(),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT if name in os.environ},
            )  # fmt: skip
        except (OSError, ValueError) as error:
            _log.warning("cannot start a process to read members' answers: %s", error)
            raise self._failed("cannot be read: the coordinator can start no process") from None

    async def _output(self, process: asyncio.subprocess.Process) -> bytearray:
        assert process.stdout is not None
        found = bytearray()
        while piece := await process.stdout.read(1 << 16):
            found += piece
            if len(found) > (most := self._limits.read_bytes):
                raise self._failed(f"are more than {most >> 20} MiB")
        return found

    def _failed(self, why: str) -> NoRoom:
        return NoRoom(f"the answers of the members {why}; ask one member, or use {self._instead}")


def _path() -> str:
    """Where modules are, as JSON: `-I` takes neither PYTHONPATH nor the working directory."""
    roots = [str(Path(pacelinepb.__file__).parents[1]), *filter(None, sys.path)]
    return json.dumps([os.path.abspath(each) for each in dict.fromkeys(roots)])


async def _feed(process: asyncio.subprocess.Process, request: Iterable[bytes]) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # it has ended: its status says why
        for piece in request:
            process.stdin.write(piece)
            await process.stdin.drain()
        process.stdin.close()
        await process.stdin.wait_closed()


async def _end(process: asyncio.subprocess.Process, feeding: asyncio.Task[None]) -> None:
    """Ends the process and closes its pipes."""
    assert process.stdin is not None
    assert process.stdout is not None
    feeding.cancel()
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    await asyncio.wait({feeding})
    process.stdin.close()
    while await process.stdout.read(1 << 16):  # what is left; its end closes the pipe
        pass
    await process.wait()
