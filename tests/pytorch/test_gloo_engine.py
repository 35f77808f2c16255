"""The engine "gloo": it keeps the contract of engines, and says why it cannot open."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from unit.engines.fake_engine import engines_of

from paceline._base.arrays import Array
from paceline._links.base import Peer
from paceline.engines import DataEngine, EngineFailed
from paceline.engines._engine_check import ENGINE_RULES, MakeEngines, check_engine, open_engines

if TYPE_CHECKING:
    import torch.distributed as dist
else:
    dist = pytest.importorskip("torch.distributed")

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest]


def make() -> DataEngine:
    from paceline.torch._gloo_engine import GlooEngine

    return GlooEngine()


@pytest.mark.parametrize("rule", ENGINE_RULES, ids=lambda rule: rule.__name__)
def test_gloo_keeps_the_rules(rule: Callable[[MakeEngines], None]) -> None:
    check_engine(partial(engines_of, make), [rule])


def test_an_unusable_address_is_named_in_engine_failed() -> None:
    with engines_of(make, 1) as (engine,):
        engine.open(0, [Peer(0, "0", "far", "192.0.2.1:7400"), Peer(1, "1", "near", "127.0.0.1:7400")], 10.0)
        with pytest.raises(EngineFailed, match=r"Gloo could not connect at 192\.0\.2\.1"):
            engine.contact(monotonic() + 10)


@pytest.mark.parametrize("contact", [b"", b"[]", b'{"keys": {"0/1": "zz"}, "listeners": []}', b'{"keys": 3}'])
def test_an_unreadable_contact_raises_engine_failed(contact: bytes) -> None:
    with engines_of(make, 1) as (engine,):
        engine.open(0, [Peer(rank, str(rank), "localhost", "127.0.0.1:1") for rank in range(2)], 10.0)
        engine.connect([engine.contact(monotonic() + 10), contact])
        with pytest.raises(EngineFailed, match="a contact cannot be read"):
            engine.await_ready(monotonic() + 10)


def test_without_all_sockets_the_engine_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.torch import _gloo_engine

    monkeypatch.setattr(_gloo_engine._GlooStore, "sockets", lambda store: iter(()))
    with engines_of(make, 2) as engines, pytest.raises(EngineFailed, match="found 0 of the 1 sockets"):
        open_engines(engines)


def test_closed_and_aborted_engines_leak_no_file_descriptors() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    def cycle(end: Callable[[DataEngine], Any]) -> None:
        with engines_of(make, 3) as engines:
            open_engines(engines)
            for engine in engines:
                end(engine)

    cycle(lambda engine: engine.abort())  # whatever is loaded once
    before = count()
    for end in (lambda engine: engine.abort(), lambda engine: engine.close(monotonic() + 10)):
        cycle(end)
    assert count() <= before


def test_aborted_sums_end_at_once_with_few_exceptions() -> None:
    late, count, patience = 0, 30, 0.5
    x = [np.ones(16, np.float32) for _ in range(2)]
    for number in range(count):
        with engines_of(make, 2) as engines:
            open_engines(engines, patience)
            training = [threading.Thread(target=sum_on, args=(engine, x[rank])) for rank, engine in enumerate(engines)]
            for thread in training:
                thread.start()
            threading.Event().wait(0.01 + number * 1e-4)  # somewhere in a sum
            began = monotonic()
            for engine in engines:
                engine.abort()
            assert all([engine.drained(began + 10) for engine in engines])
            late += monotonic() - began > 0.8 * patience
            for thread in training:
                thread.join()
    assert late <= 4, f"Gloo lost the errors of {late} of {count} aborted sums"


def sum_on(engine: DataEngine, x: Array) -> None:
    with suppress(EngineFailed):
        while True:
            engine.all_reduce(x).wait(monotonic() + 10)


def test_engines_do_not_release_file_locks_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "database"
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        with engines_of(make, 2) as engines:
            open_engines(engines)
        other = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        done = subprocess.run([sys.executable, "-c", other, str(path)], capture_output=True, text=True, check=False)
    assert "BlockingIOError" in done.stderr, "closing a duplicate has ended this process's lock"


def test_the_default_group_stays_uninitialized() -> None:
    with engines_of(make, 2) as engines:
        open_engines(engines)
        assert not dist.is_initialized()
