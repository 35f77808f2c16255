"""grpc.aio stays up when its last object is freed, whatever the loop is doing then.

Left to itself, it closes the socket that its reader on the loop reads from, in the thread that frees the object.
"""

from __future__ import annotations

import subprocess
import sys

CODE = """
import asyncio
import socket
import threading
from asyncio.selector_events import BaseSelectorEventLoop

reading, freed = threading.Event(), threading.Event()
add_reader = BaseSelectorEventLoop.add_reader

def add_gated_reader(loop, fd, callback, *args):
    def gated():
        if held:
            reading.set()
            freed.wait(10.0)
        callback(*args)
    add_reader(loop, fd, gated)

BaseSelectorEventLoop.add_reader = add_gated_reader
held = False

from paceline._base.rpc import aio
from paceline._base.waits import loop_thread

nobody = socket.create_server(("127.0.0.1", 0))  # takes the call and never answers: only `end` ends it

async def channel():
    return aio.insecure_channel(f"127.0.0.1:{nobody.getsockname()[1]}")

async def end(call):
    global held
    held = True
    call.cancel()

async def call(channel):
    return channel.unary_unary("/a.B/C")(b"")

thread = loop_thread()
last = thread.run(channel())
calling = thread.run(call(last))
thread.start(end(calling))
assert reading.wait(10.0), "the loop is told that the call has ended"
del last, calling
freed.set()
thread.run(asyncio.sleep(0))
thread.run(asyncio.sleep(0))
print("alive")
"""


def test_the_loop_survives_when_another_thread_frees_the_last_channel() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")
