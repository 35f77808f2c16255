"""Stacks as faulthandler writes them: taken apart, and folded where threads or ranks stand at one place. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

_HEAD = re.compile(
    r"(?:Current thread|Thread) 0x[0-9a-f]+(?: \[([^\]\n]{0,64})\])? ?(?:\([^)\n]{0,200}\))?:?", re.IGNORECASE
)
_FRAME = re.compile(r'File "(.{0,1000})", line (\d{1,9}|\?\?\?) in (.{1,500})')
_LIBRARY = re.compile(
    r"/(?:paceline|pacelinepb|grpc|threading\.py|asyncio|concurrent/futures|selectors\.py|queue\.py)(?:/|$)|/threading\.py$"
)

_PACELINE = re.compile(r"/(?:site-packages|dist-packages|client)/paceline/.*:(?:\d+|\?\?\?) in ")
"""In a frame as text: Paceline's own, in an installation or a checkout; a user's folder may be called paceline too."""

_LAUNCHING = re.compile(r"(?:<frozen runpy>|/runpy\.py|/paceline/cli/launcher/shim\.py):(?:\d+|\?\?\?) in ")

_MOST_THREADS, _MOST_FRAMES = 200, 200


@dataclass(frozen=True, slots=True)
class Stack:
    """One thread's frames, the innermost first: "train.py:12 in step".

    `is_main` is True for the thread in which the process began, and `is_library` if all its frames are Paceline's,
    grpc's or of the interpreter's thread machinery.
    """

    frames: tuple[str, ...]
    is_main: bool
    is_library: bool


@dataclass(frozen=True, slots=True)
class Process:
    """The stacks of one process, by its label ("rank 2 (host-b, pid 4711)"), or why there are none."""

    label: str
    rank: int | None
    stacks: tuple[Stack, ...] = ()
    trouble: str = ""


def read_stacks(text: str) -> tuple[Stack, ...]:
    """Takes a dump of all threads apart; lines that are no thread's are left out.

    faulthandler lists the newest thread first, so the last one is the main thread.
    """
    threads: list[list[tuple[str, str]]] = []
    for line in text.splitlines():
        line = line.strip()
        if _HEAD.match(line):
            if len(threads) == _MOST_THREADS:
                break
            threads.append([])
        elif threads and (frame := _FRAME.fullmatch(line)) and len(threads[-1]) < _MOST_FRAMES:
            file, number, name = frame.groups()
            threads[-1].append((file, f"{file}:{number} in {name}"))
    last = len(threads) - 1
    return tuple(
        Stack(
            tuple(frame for _, frame in thread),
            is_main=number == last,
            is_library=number != last and all(_LIBRARY.search(file) for file, _ in thread),
        )
        for number, thread in enumerate(threads)
    )


def shorten(stack: Stack) -> Stack:
    """Leaves what a user looks for: their own lines, without what started the script, and Paceline's frames as one."""
    frames = list(stack.frames)
    while len(frames) > 1 and _LAUNCHING.search(frames[-1]):
        frames.pop()
    shown: list[str] = []
    for inside, run in groupby(frames, lambda frame: _PACELINE.search(frame) is not None):
        group = list(run)
        if inside and len(group) > 1:
            newest, oldest = (frame.rpartition(" in ")[2] for frame in (group[0], group[-1]))
            group = [f"in paceline: {oldest} ... {newest} ({len(group)} frames)"]
        shown += group
    return replace(stack, frames=tuple(shown))


def fold(
    processes: Sequence[Process], *, everything: bool = False
) -> list[tuple[list[Process], list[tuple[Stack, int]], int]]:
    """Puts processes together whose threads stand at the same places, in the order in which they are to be shown.

    With `everything` Paceline's and grpc's own threads are shown too, and all frames. Returns for each group of
    processes: the processes; their stacks, the main thread's first, each with the number of threads that have it; and
    how many threads are not shown.
    """
    groups: dict[tuple[tuple[Stack, int], ...], list[Process]] = {}
    hidden: dict[tuple[tuple[Stack, int], ...], int] = {}
    for process in processes:
        if process.trouble:
            continue
        counts: dict[Stack, int] = {}
        stacks = process.stacks if everything else [shorten(each) for each in process.stacks if not each.is_library]
        for stack in sorted(stacks, key=lambda each: (not each.is_main, each.frames)):
            counts[stack] = counts.get(stack, 0) + 1
        key = tuple(counts.items())
        groups.setdefault(key, []).append(process)
        hidden[key] = max(hidden.get(key, 0), len(process.stacks) - sum(counts.values()))
    return [(members, list(key), hidden[key]) for key, members in groups.items()]


def by_trouble(processes: Sequence[Process]) -> Mapping[str, list[Process]]:
    """Puts processes together of which there are no stacks for the same reason."""
    found: dict[str, list[Process]] = {}
    for process in processes:
        if process.trouble:
            found.setdefault(process.trouble, []).append(process)
    return found
