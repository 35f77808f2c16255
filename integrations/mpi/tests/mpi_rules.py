"""Checks the rules of engines over MPI: `mpirun -n 3 python mpi_rules.py FOLDER`.

Rank 0 runs the check, and its own engine is the first of each world. The engines of the other ranks are in their
processes: rank 0 calls them over sockets, with one connection for each call, so that a call that blocks holds up no
other. The result of each rule goes into FOLDER/results, as a line of JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from paceline.engines import DataEngine, EngineFailed, EngineTimeout, Peer, Ticket
from paceline.engines._engine_check import ENGINE_RULES, check_engine
from paceline_mpi import MpiEngine, load_mpi
from paceline_mpi._mpi_engine import Array

_ERRORS = {error.__name__: error for error in (EngineFailed, EngineTimeout)}

_names = itertools.count()


class _Far(DataEngine):
    """An engine in another process."""

    name, traits = MpiEngine.name, MpiEngine.traits

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = next(_names)
        self._call("make")

    def open(self, rank: int, peers: Sequence[Peer], patience: float) -> None:
        self._call("open", rank, len(peers))

    def contact(self, deadline: float) -> bytes:
        told: str = self._call("contact", deadline)[0]
        return told.encode()

    def connect(self, contacts: Sequence[bytes]) -> None:
        self._call("connect", [contact.decode() for contact in contacts])

    def await_ready(self, deadline: float) -> None:
        self._call("await_ready", deadline)

    def all_reduce(self, x: Array) -> Ticket:
        number = next(_names)
        self._call("all_reduce", number, x.dtype.name, given=x.tobytes())
        return _FarTicket(self, number, x)

    def abort(self) -> None:
        self._call("abort")

    def drained(self, deadline: float) -> bool:
        return bool(self._call("drained", deadline)[0])

    def close(self, deadline: float) -> None:
        self._call("close", deadline)

    def _call(self, name: str, *arguments: Any, given: bytes = b"") -> tuple[Any, bytes]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._path))
            with connection.makefile("rwb") as stream:
                stream.write(json.dumps([self._number, name, arguments]).encode() + b"\n" + given)
                stream.flush()
                connection.shutdown(socket.SHUT_WR)
                error, text, value = json.loads(stream.readline())
                if error:
                    raise _ERRORS.get(error, AssertionError)(text)
                return value, stream.read()


class _FarTicket(Ticket):
    def __init__(self, engine: _Far, number: int, x: Array) -> None:
        self._engine, self._number, self._x = engine, number, x

    def done(self) -> bool:
        return bool(self._engine._call("done", self._number)[0])

    def wait(self, deadline: float) -> None:
        _, sums = self._engine._call("wait", self._number, deadline)
        self._x[:] = np.frombuffer(sums, self._x.dtype)


class _Rank:
    """The engines of this process, which rank 0 calls."""

    def __init__(self) -> None:
        self.engines: dict[int, MpiEngine] = {}
        self.sums: dict[int, tuple[Ticket, Array]] = {}
        self.over = threading.Event()

    def answer(self, number: int, name: str, arguments: Sequence[Any], given: bytes) -> tuple[Any, bytes]:
        if name == "make":
            self.engines[number] = MpiEngine()
            return None, b""
        engine = self.engines[number]
        match name, *arguments:
            case "open", rank, size:
                engine.open(rank, [Peer(each, str(each), "localhost", "127.0.0.1:1") for each in range(size)], 10.0)
            case "contact", deadline:
                return engine.contact(deadline).decode(), b""
            case "connect", contacts:
                engine.connect([contact.encode() for contact in contacts])
            case "all_reduce", ticket, dtype:
                x = np.frombuffer(bytearray(given), dtype)
                self.sums[ticket] = engine.all_reduce(x), x
            case "done", ticket:
                return self.sums[ticket][0].done(), b""
            case "wait", ticket, deadline:
                self.sums[ticket][0].wait(deadline)
                return None, self.sums[ticket][1].tobytes()
            case _:
                return getattr(engine, name)(*arguments), b""
        return None, b""


def _serve(path: Path, rank: _Rank) -> socketserver.ThreadingUnixStreamServer:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            line = self.rfile.readline()
            if not line:
                rank.over.set()
                return
            number, name, arguments = json.loads(line)
            error, value, sums = ("", ""), None, b""
            try:
                value, sums = rank.answer(number, name, arguments, self.rfile.read())
            except Exception as reason:  # noqa: BLE001  raised at rank 0
                error = type(reason).__name__, str(reason)
            self.wfile.write(json.dumps([*error, value]).encode() + b"\n" + sums)

    server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main(folder: Path) -> None:
    """Runs the check in rank 0, and serves it in the others."""
    world = load_mpi().COMM_WORLD
    me, size = world.Get_rank(), world.Get_size()
    paths = [folder / f"rank{rank}" for rank in range(size)]
    rank = _Rank()
    if me:
        _serve(paths[me], rank)
    world.Barrier()
    if me:
        rank.over.wait()
        os._exit(0)  # aborted engines leave requests behind, for which MPI_Finalize would wait

    @contextmanager
    def make(count: int) -> Iterator[Sequence[DataEngine]]:
        engines: list[DataEngine] = [MpiEngine(), *(_Far(path) for path in paths[1:count])]
        try:
            yield engines
        finally:
            for engine in engines:
                engine.abort()
            for engine in engines:
                engine.close(time.monotonic() + 1)

    with (folder / "results").open("w", buffering=1) as results:
        for rule in ENGINE_RULES:
            try:
                check_engine(make, [rule])
                results.write(json.dumps([rule.__name__, ""]) + "\n")
            except BaseException as error:  # noqa: BLE001  the test shows it
                results.write(json.dumps([rule.__name__, str(error) or repr(error)]) + "\n")
    for path in paths[1:]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
