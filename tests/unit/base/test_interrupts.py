"""A Ctrl-C that arrives where Python drops exceptions still ends a wait."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paceline._base import interrupts

PRELUDE = """
import os, signal, weakref
from paceline._base.waits import Latch, loop_thread

loop_thread()

class Mortal:
    pass

class Finalized:
    def __del__(self):
        fail()

def ctrl_c(*_):
    signal.raise_signal(signal.SIGINT)

def in_a_finalizer():
    mortal = Finalized()

def in_a_callback():
    mortal = Mortal()
    mortal.watch = mortal  # a cycle, which the garbage collector frees
    global watch
    watch = weakref.ref(mortal, lambda _: fail())
    del mortal
    import gc
    gc.collect()

"""


def run(code: str) -> tuple[str, str]:
    """Runs a script; returns its output on both streams."""
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=60.0)
    return done.stdout, done.stderr


@pytest.mark.parametrize("where", ["in_a_finalizer", "in_a_callback"])
def test_ctrl_c_that_python_drops_ends_the_next_wait(where: str) -> None:
    code = f"""
fail = ctrl_c
try:
    {where}()
    print("waited:", Latch().wait(5.0))
except KeyboardInterrupt:
    print("interrupted")
"""
    assert run(code) == ("interrupted\n", "")


@pytest.mark.parametrize(
    "code",
    [
        "def fail(): raise ValueError('mine')\nin_a_finalizer()",
        # In a forked child there is no thread that could repeat it.
        "fail = ctrl_c\nif (child := os.fork()) == 0:\n    in_a_finalizer()\n    os._exit(0)\nos.waitpid(child, 0)",
    ],
    ids=["another error", "in a forked child"],
)
def test_other_dropped_errors_are_shown_as_usual(code: str) -> None:
    assert "Exception ignored in: <function Finalized.__del__" in run(code)[1]


def test_a_hook_of_other_code_stays() -> None:
    code = "import sys\nprint(sys.unraisablehook.__name__)"
    before = "import sys\ndef mine(_): pass\nsys.unraisablehook = mine\n"
    done = subprocess.run(
        [sys.executable, "-c", before + PRELUDE + code], capture_output=True, text=True, timeout=60.0, check=True
    )
    assert done.stdout == "mine\n"


def test_ctrl_c_is_not_repeated_before_the_hook_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    later: list[Callable[[], None]] = []
    loop: Any = SimpleNamespace(
        call_soon_threadsafe=lambda call: call(),  # its thread is quicker than the hook
        call_later=lambda _, call: later.append(call),
    )
    monkeypatch.setattr(signal, "pthread_kill", lambda _, number: sent.append(number))
    dropped: Any = SimpleNamespace(exc_type=KeyboardInterrupt)
    interrupts._Repeater(loop)(dropped)
    assert not sent
    (again,) = later
    again()
    assert sent == [signal.SIGINT]
