"""Worker processes that use `session.store` from several threads at once, and the history of what they saw."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from support.histories import FOREVER, UNKNOWN, Call
from support.processes import Worker

__all__ = ["CALL_TIMEOUT_S", "StoreClients", "store_clients"]

CALL_TIMEOUT_S = 1.0
"""After this a call of a client fails, and nobody knows whether it happened."""

_THREADS = 2
_SOME = 25
"""Calls of one thread between two signs of life."""

_PATIENCE_S = 40.0

_THINK_S = 0.004
"""The longest pause of a thread between two calls: so they neither all wait nor fill the history for nothing."""

_CODE = (
    f"""
import random

THREADS, SOME, THINK_S = {_THREADS}, {_SOME}, {_THINK_S}
"""
    + """
name = os.environ["CLIENT"]
told = threading.Lock()

def say(event, **facts):
    with told:
        emit(event, **facts)

def number(found):
    return found if found is None else int(found)

def text(found):
    return found if found is None else found.decode()

def choose(rng, me, count, store, seen):
    "One call: its key, kind, arguments, and what makes it and reads its result."
    key = rng.choice(("register", "comes and goes", "counter"))
    new = f"{me}.{count}"
    if key == "counter":
        if rng.random() < 0.6:
            return key, "add", [1], lambda: store.add(key, 1)
        return key, "get", [], lambda: number(store.compare_set(key, b"never", b"")[1])
    kinds = ("get", "get", "set", "set", "compare_set") + (("delete",) if key == "comes and goes" else ())
    kind = rng.choice(kinds)
    if kind == "set":
        return key, kind, [new], lambda: store.set(key, new.encode())
    if kind == "delete":
        return key, kind, [], lambda: store.delete(key)
    if kind == "compare_set":
        expected = seen.get(key)
        before = None if expected is None else expected.encode()

        def swap():
            swapped, value = store.compare_set(key, before, new.encode())
            return [swapped, text(value)]

        return key, kind, [expected, new], swap
    if key == "register":
        return key, kind, [], lambda: text(store.get(key))
    return key, kind, [], lambda: text(store.compare_set(key, b"never", b"")[1])  # `get` waits for a missing key

def client(me, store, stop, calls):
    rng, seen, count = random.Random(me), {}, 0
    while not stop.is_set():
        count += 1
        time.sleep(rng.random() * THINK_S)
        key, kind, arguments, make = choose(rng, me, count, store, seen)
        began = time.monotonic()
        try:
            result = make()
        except paceline.PacelineError as error:
            calls.append((me, kind, key, arguments, None, began, None))
            say("unknown", client=me, why=f"{type(error).__name__}: {error}")
            continue
        calls.append((me, kind, key, arguments, result, began, time.monotonic()))
        if kind == "get":
            seen[key] = result
        if count % SOME == 0:
            say("some", client=me)

with paceline.join() as session:
    stop, calls = threading.Event(), [[] for _ in range(THREADS)]
    threads = [
        threading.Thread(target=client, args=(f"{name}{n}", session.store, stop, calls[n])) for n in range(THREADS)
    ]
    emit("joined")
    wait_for_go()
    began = time.monotonic()
    session.store.set("register", b"first")
    calls[0].append((name, "set", "register", ["first"], None, began, time.monotonic()))
    for thread in threads:
        thread.start()
    wait_for_go()
    stop.set()
    for thread in threads:
        thread.join()
    emit("calls", calls=[call for each in calls for call in each])
    wait_for_go()
"""
)


class StoreClients:
    """The processes, and their history once they have stopped.

    Args:
        workers: have joined.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        for worker in workers:
            worker.go()

    def go_on(self) -> None:
        """Waits until each thread has made more calls whose results it knows."""
        self._until("some")

    def fail(self) -> None:
        """Waits until each thread has made a call whose result it does not know."""
        self._until("unknown")

    def _until(self, wanted: str) -> None:
        since = time.monotonic()
        for worker in self.workers:
            heard: Counter[str] = Counter()
            while len(heard) < _THREADS or min(heard.values()) < 2:  # the calls of the first may be of before
                event = worker.expect_any(_PATIENCE_S, wanted)
                if event["event"] == wanted and event["at"] > since:
                    heard[event["client"]] += 1

    def stop(self) -> list[Call]:
        """Stops all clients; returns what they called."""
        history = []
        for worker in self.workers:
            worker.go()
        for worker in self.workers:
            while (event := worker.expect_any(_PATIENCE_S, "calls"))["event"] != "calls":
                pass
            for client, kind, key, arguments, result, began, ended in event["calls"]:
                found = UNKNOWN if ended is None else tuple(result) if kind == "compare_set" else result
                history.append(Call(client, kind, key, tuple(arguments), found, began, ended or FOREVER))
        return history


@contextmanager
def store_clients(coordinators: Sequence[str]) -> Iterator[StoreClients]:
    """Clients that call the store for as long as the block lasts, or until they are stopped.

    Args:
        coordinators: for each process the address at which it reaches the coordinator.
    """
    started: list[Worker] = []
    try:
        for n, address in enumerate(coordinators):
            variables = {
                "CLIENT": "abcdef"[n],
                "PACELINE_COORDINATOR": address,
                "PACELINE_MIN_WORKERS": str(len(coordinators)),
                "PACELINE_MAX_WORKERS": str(len(coordinators)),
                "PACELINE_CALL_TIMEOUT": str(CALL_TIMEOUT_S),
                "PACELINE_FLIGHT_DIR": "off",
            }
            started.append(Worker(_CODE, variables))
        for worker in started:
            worker.expect("joined", _PATIENCE_S)
        yield StoreClients(started)
    finally:
        with suppress(BrokenPipeError):
            for worker in started:
                worker.close()
