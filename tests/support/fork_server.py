"""Starts Python processes by forking: they begin with all that is loaded here, instead of loading it for 0.4 s each.

    python fork_server.py FD MODULE...      # the modules to load; FD is a socket to `support.python_process`

Each message is what a process is to be, with its standard streams and a pipe for its exit code. The answer is its pid,
with a pidfd. This process has no thread, opens no channel and ends when the other end of the socket is closed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import types
from typing import Any

import numpy as np

_MAX_REQUEST = 1 << 20


def main(fd: int, modules: list[str]) -> dict[str, Any]:
    """Serves; returns in a child, with what it is to be."""
    before = set(os.environ)
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # children neither copy what is loaded nor go through it when they end
    loaded = {name: value for name, value in os.environ.items() if name not in before}  # grpc's settings, by Paceline
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; children are as new processes are
    sock = socket.socket(fileno=fd)
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    children: dict[int, tuple[int, int]] = {}  # by pidfd: pid, and where its exit code goes
    while True:
        for ready, _ in poller.poll():
            if ready != fd:
                poller.unregister(ready)
                pid, status = children.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
                    os.write(status, str(code).encode())
                os.close(status)
                os.close(ready)
                continue
            data, fds, _, _ = socket.recv_fds(sock, _MAX_REQUEST, 4)
            if not data:
                os._exit(0)
            *streams, status = fds
            assert len(os.listdir("/proc/self/task")) == 1, "what was loaded has started threads: they are not forked"
            pid = os.fork()
            if not pid:
                request: dict[str, Any] = json.loads(data)
                sock.detach()
                _become(request, streams, loaded)
                return request
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, status
            poller.register(pidfd, select.POLLIN)
            socket.send_fds(sock, [str(pid).encode()], [pidfd])
            for stream in streams:
                os.close(stream)


def _become(request: dict[str, Any], streams: list[int], loaded: dict[str, str]) -> None:
    """Takes on what a new process has from its parent, and nothing of this one."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, request["files"])
    os.sched_setaffinity(0, request["cores"])
    sys.path[:0] = filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))
    os.environ.clear()
    os.environ.update({**loaded, **request["environment"]})
    os.chdir(request["directory"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    np.random.seed()


if __name__ == "__main__":
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != own]
    kind, *words = main(int(sys.argv[1]), sys.argv[2:])["command"]
    if kind == "-c":
        sys.argv = ["-c", *words[1:]]
        sys.path.insert(0, "")
        whole = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec", dont_inherit=True), vars(whole))
    elif kind == "-m":
        sys.argv = words
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *words]
        sys.path.insert(0, os.path.dirname(kind))
        runpy.run_path(kind, run_name="__main__")
