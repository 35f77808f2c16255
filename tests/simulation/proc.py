"""What processes see of each other: `/proc`, as each of them finds it, so that the real `is_gone` decides.

Hosts have a boot id; containers on a host have pid namespaces, in which numbers are used again. A process that was
killed stays a zombie until its parent reaps it.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING

from simulation.threads import current

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.world import World

__all__ = ["Proc", "who_asks"]

_FIRST_PID = 1000


def who_asks() -> Process:
    """The process whose loop or thread runs."""
    try:
        return asyncio.get_running_loop().process  # type: ignore[attr-defined, no-any-return]
    except RuntimeError:
        return current().process


class Proc:
    """The functions and files that `identity` reads, of the process that asks."""

    def __init__(self, world: World) -> None:
        self._world = world

    def getpid(self) -> int:
        """`os.getpid`."""
        return who_asks().pid

    def geteuid(self) -> int:
        """`os.geteuid`: that of all."""
        return 0

    def kill(self, pid: int, signal: int) -> None:
        """`os.kill` with signal 0: raises ProcessLookupError if there is no such process."""
        assert signal == 0
        if self._find(pid) is None:
            raise ProcessLookupError(pid)

    def gethostname(self) -> str:
        """`socket.gethostname`."""
        return who_asks().host

    def stat(self, name: str) -> SimpleNamespace:
        """`os.stat` of a namespace."""
        here = who_asks()
        if name == "/proc/self/ns/pid":
            return SimpleNamespace(st_ino=here.namespace)
        assert name == "/proc/self/ns/net"
        if not here.space:  # it shares memory with nobody
            raise FileNotFoundError(name)
        return SimpleNamespace(st_ino=here.space)

    def open(self, name: str) -> _File:
        """`pathlib.Path`."""
        return _File(self, name)

    def read(self, name: str) -> str:
        """The content of a file.

        Raises:
            FileNotFoundError: there is no such process in this pid namespace.
        """
        if name == "/proc/sys/kernel/random/boot_id":
            return f"{who_asks().boot}\n"
        pid = int(name.removeprefix("/proc/").removesuffix("/stat"))
        found = self._find(pid)
        if found is None:
            raise FileNotFoundError(name)
        return f"{pid} (python (train) 7) {'S' if found.alive else 'Z'}{' 1' * 18} {found.ticks} 0 0"

    def _find(self, pid: int) -> Process | None:
        """The process with that number in the pid namespace of the one that asks."""
        here = who_asks()
        for each in self._world.members:
            if (each.boot, each.namespace, each.pid) == (here.boot, here.namespace, pid) and each.has_entry:
                return each
        return None

    def free_pid(self, boot: str, namespace: int) -> int:
        """The lowest number that no process of a namespace has now: one that has ended may have had it."""
        there = [each for each in self._world.members if (each.boot, each.namespace) == (boot, namespace)]
        taken = {each.pid for each in there if each.has_entry}
        return next(pid for pid in range(_FIRST_PID, _FIRST_PID + 1000) if pid not in taken)


class _File:
    """A path under `/proc`."""

    def __init__(self, proc: Proc, name: str) -> None:
        self._proc = proc
        self._name = name

    def read_text(self, encoding: str = "", errors: str = "") -> str:
        return self._proc.read(self._name)
