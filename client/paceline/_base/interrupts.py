"""A Ctrl-C that Python drops is repeated.

Python raises KeyboardInterrupt wherever the main thread is, also in a finalizer or in the callback of a weak reference.
These run wherever memory is allocated, because the garbage collector does, and asyncio's tasks and grpc's calls have
them. What is raised there is printed and dropped: the script would wait on as if nobody had pressed Ctrl-C.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

_AGAIN_S = 0.001
"""Seconds until the next look whether the hook has returned, since what is raised in the hook is dropped too."""


def repeat_dropped_interrupts(loop: asyncio.AbstractEventLoop) -> None:
    """Has the thread of a loop repeat each Ctrl-C that Python drops; a hook that other code has set stays."""
    if sys.unraisablehook is sys.__unraisablehook__ or isinstance(sys.unraisablehook, _Repeater):
        sys.unraisablehook = _Repeater(loop)


class _Repeater:
    """The hook (`sys.unraisablehook`). It takes no lock: the main thread may hold any when the hook is called."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._process = os.getpid()
        self._runs = False

    def __call__(self, dropped: sys.UnraisableHookArgs) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        # A forked child has no such thread.
        if not (issubclass(dropped.exc_type, KeyboardInterrupt) and is_main and os.getpid() == self._process):
            sys.__unraisablehook__(dropped)
            return
        self._runs = True
        try:
            self._loop.call_soon_threadsafe(self._repeat)
        except RuntimeError:  # the loop is closed
            sys.__unraisablehook__(dropped)
        finally:
            self._runs = False  # Python looks for signals at calls and jumps: there is none from here to the end

    def _repeat(self) -> None:
        main = threading.main_thread().ident
        if self._runs:
            self._loop.call_later(_AGAIN_S, self._repeat)
        elif main is not None and callable(signal.getsignal(signal.SIGINT)):  # else it would end the process
            signal.pthread_kill(main, signal.SIGINT)  # it also ends a sleep
