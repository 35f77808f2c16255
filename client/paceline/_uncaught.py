"""How an error of Paceline that ends a process is shown: who failed and how, then the user's line, then the rest.

    paceline: rank 2 (host-b, pid 4711) was killed by SIGKILL
      File "train.py", line 31, in main
        group.all_reduce(loss)
      PeerLost in operation 12 of generation 3; PACELINE_TRACEBACK=1 shows the whole stack

Most of a stack below the user's line is Paceline's own and the same at every worker. The errors of a script's own code
keep Python's traceback.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType

from paceline.errors import PacelineError

__all__ = ["in_short", "install_hook", "wants_whole_stack"]

_HERE = f"{Path(__file__).parent}{os.sep}"
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
    lines = [f"paceline: {error}" if str(error) else f"paceline: {kind}", *_users_line(trace)]
    cause = error.__cause__
    if cause is not None and not isinstance(cause, PacelineError):
        lines += [f"  because of {type(cause).__name__}: {cause}".removesuffix(": "), *_users_line(cause.__traceback__)]
    lines += [f"  {note}" for note in getattr(error, "__notes__", ())]
    where = [f"operation {error.operation}"] if error.operation else []
    where += [f"generation {error.generation}"] if error.generation else []
    place = f" in {' of '.join(where)}" if where else ""
    return "\n".join([*lines, f"  {kind}{place}; PACELINE_TRACEBACK=1 shows the whole stack"])


def _users_line(trace: TracebackType | None) -> list[str]:
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
    return any(path.is_relative_to(folder) for name in names if (folder := sysconfig.get_path(name)))
