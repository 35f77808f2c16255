"""How an error of Paceline that ends a process is shown: who failed and how, then the user's line, then the rest.

    paceline: rank 2 (host-b, pid 4711) was killed by SIGKILL
      File "train.py", line 31, in main
        group.all_reduce(loss)
      PeerLost in operation 12 of generation 3; PACELINE_TRACEBACK=1 shows the whole stack

Most of a stack below the user's line is Paceline's own and the same at every worker. The errors of a script's own code
keep Python's traceback.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable
from opcode import opname
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType

from paceline.errors import PacelineError

_HERE = f"{Path(__file__).parents[1]}{os.sep}"
_OURS = ("paceline_protocol", "paceline_server", "pacelinepb")
_SITES = {"site-packages", "dist-packages"}
_LIBRARIES = ("numpy", "torch")
"""Packages that call the user's code, or are called by it, on the way to Paceline: their lines say little to users."""


def install_hook() -> None:
    """Shows an uncaught error of Paceline in short, and nothing of an uncaught Ctrl-C, from now on. Idempotent.

    The process still ends by SIGINT, as shells expect. A hook that other code has set stays, and interactive sessions
    do not change. PACELINE_TRACEBACK=1 shows whole stacks.
    """
    interactive = sys.flags.interactive or hasattr(sys, "ps1")
    if sys.excepthook is sys.__excepthook__ and not wants_whole_stack() and not interactive:
        sys.excepthook = _hook


def wants_whole_stack() -> bool:
    """True if the user wants to see whole stacks."""
    return os.environ.get("PACELINE_TRACEBACK", "") not in ("", "0")


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, PacelineError):
        print(in_short(error, trace), file=sys.stderr)  # noqa: T201  # in place of the traceback
    elif not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


def in_short(error: PacelineError, trace: TracebackType | None) -> str:
    """Describes an error in a few lines: its text, the user's line, an error of other code that caused it, its type."""
    kind = type(error).__name__
    lines = [f"paceline: {error}" if str(error) else f"paceline: {kind}", *users_line(trace)]
    cause = error.__cause__
    # grpc's errors say the same as ours, in six lines.
    if cause is not None and not isinstance(cause, PacelineError) and not type(cause).__module__.startswith("grpc"):
        lines += [f"  because of {type(cause).__name__}: {cause}".removesuffix(": "), *users_line(cause.__traceback__)]
    lines += [f"  {note}" for note in getattr(error, "__notes__", ())]
    where = [f"operation {error.operation}"] if error.operation else []
    where += [f"generation {error.generation}"] if error.generation else []
    place = f" in {' of '.join(where)}" if where else ""
    return "\n".join([*lines, f"  {kind}{place}; PACELINE_TRACEBACK=1 shows the whole stack"])


def users_line(trace: TracebackType | None) -> list[str]:
    """Returns the innermost line of the user's own code, as Python shows it; empty if there is none.

    If all code is installed, as a package of the user's own may be, it is the innermost line that is neither
    Python's nor of one of the libraries around Paceline.
    """
    frames = [(frame, number) for frame, number in walk_tb(trace) if not _is_ours(frame)]
    tests: list[Callable[[FrameType], bool]] = [_is_users, _is_installed]
    for is_wanted in tests:
        for frame, number in reversed(frames):
            if is_wanted(frame):
                file, name = frame.f_code.co_filename, frame.f_code.co_name
                source = linecache.getline(file, number, frame.f_globals).strip()
                return [f'  File "{file}", line {number}, in {name}', *([f"    {source}"] if source else [])]
    return []


def users_place(frame: FrameType | None) -> str:
    """Returns the innermost line of the user's own code from a running frame outwards, such as "train.py:31"."""
    frame = _users_frame(frame)
    return "an unknown line" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def takers(frame: FrameType | None) -> frozenset[CodeType]:
    """Returns the user's own code that takes an iterator's items: generators around it, and the loop's function."""
    codes = []
    while (frame := _users_frame(frame)) is not None:
        codes.append(frame.f_code)
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            break
        frame = frame.f_back
    return frozenset(codes)


def is_let_go(frame: FrameType | None, of: frozenset[CodeType]) -> bool:
    """True if the user's own code drops an iterator, as `break` and `return` do; False if an error unwinds a frame.

    An iterator that is dropped cannot see the error. But the instruction on which the frame stands is then the one that
    raised; after `break` it is the one that drops the iterator (POP_ITER from Python 3.14 on). If a generator of the
    user's is closed itself, it stands where it yielded, so the frame around it tells.

    If a frame of the iterator's `takers` (`of`) has ended, its caller stands on the call. After an error it does not,
    because the traceback keeps the frame until the error is handled.
    """
    frame = _users_frame(frame)
    while frame is not None and _instruction(frame) == "YIELD_VALUE":
        frame = _users_frame(frame.f_back)
    if frame is None:
        return True
    drops = ("POP_TOP", "POP_ITER", "DELETE_", "RETURN_", "STORE_" if frame.f_code in of else "CALL")
    return _instruction(frame).startswith(drops)


def _instruction(frame: FrameType) -> str:
    """Returns the name of the instruction on which a frame stands; in a call it may stand on the cache behind it."""
    code, at = frame.f_code.co_code, frame.f_lasti
    while at > 0 and opname[code[at]] == "CACHE":
        at -= 2
    return opname[code[at]]


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and (_is_ours(frame) or not _is_users(frame)):
        frame = frame.f_back
    return frame


def _is_ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    file = frame.f_code.co_filename
    return file.startswith((_HERE, "<frozen")) or name.partition(".")[0] in _OURS


def _is_users(frame: FrameType) -> bool:
    """True for code that is neither installed nor Python's."""
    path = Path(frame.f_code.co_filename)
    return not (_SITES & set(path.parts)) and not _lies_in(path, "stdlib", "platstdlib", "scripts")


def _is_installed(frame: FrameType) -> bool:
    """True for an installed package, unless it is one of the libraries around Paceline."""
    name = str(frame.f_globals.get("__name__", ""))
    is_installed = bool(_SITES & set(Path(frame.f_code.co_filename).parts))
    return is_installed and name.partition(".")[0] not in _LIBRARIES


def _lies_in(path: Path, *names: str) -> bool:
    return any(path.is_relative_to(folder) for name in names if (folder := _folder(name)))


@functools.cache
def _folder(name: str) -> str | None:
    """Returns one of the interpreter's folders; sysconfig puts it together anew each time."""
    return sysconfig.get_path(name)
