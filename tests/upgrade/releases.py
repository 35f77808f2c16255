"""Coordinators and workers of the last release beside those of this tree: processes that find another package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.elastic.cluster import Cluster, Trainer
from support.elastic.same_bits import check_bits
from support.python_process import fresh

__all__ = [
    "LAST_VERSION",
    "THIS",
    "Place",
    "check_undisturbed",
    "replace_workers",
    "places",
    "start_workers",
    "status",
    "unpacked",
]

_WHEEL = Path(__file__).with_name("paceline-0.1.0-py3-none-any.whl")

LAST_VERSION = 8
"""The version of the protocol that the last release speaks, and no other."""

Release = Mapping[str, str]
"""Variables with which a Python process finds the package of a release."""

THIS: Release = {}


def unpacked(folder: Path) -> Release:
    """The last release, unpacked in a folder."""
    with zipfile.ZipFile(_WHEEL) as wheel:
        wheel.extractall(folder / "last")
    release = {"PYTHONPATH": str(folder / "last")}
    said = "import paceline, pacelinepb; print(paceline.__file__, pacelinepb.PROTOCOL_VERSION)"
    found = subprocess.check_output([sys.executable, "-c", said], env={**os.environ, **release}, text=True)
    assert found.split() == [str(folder / "last" / "paceline" / "__init__.py"), str(LAST_VERSION)]
    return release


class Place:
    """A place where coordinators listen, one after the other.

    Args:
        folder: for the log.
        address: where they listen.
        state: the value of `--state`.
    """

    def __init__(self, folder: Path, address: str, state: str) -> None:
        self.address = address
        # Workers that are started together are in one view, however slow the machine is just then.
        self._arguments = ["--listen", address, "--state", state, "--settle-time", "2"]
        self._log = folder / f"coordinator-{address.rpartition(':')[2]}.log"
        self._process: subprocess.Popen[str] | None = None
        self._from = 0

    def start(self, release: Release, plant: str = "") -> None:
        """Starts one, which runs the code `plant` before it serves, and waits until it listens."""
        self._from = len(self.logs) if self._log.exists() else 0
        code = f"import sys\n{plant}\nfrom paceline_server.__main__ import main\nsys.exit(main())"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, *self._arguments],
                env={**os.environ, **release},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        with self._process.stdout as said:
            assert "listening" in said.readline(), self.log

    def stop(self) -> None:
        """SIGTERM."""
        assert self._process is not None
        self._process.terminate()
        assert self._process.wait(20) == 0, self.log

    def wait(self) -> int:
        """Waits until it has ended by itself; returns its exit code."""
        assert self._process is not None
        return self._process.wait(60)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def log(self) -> str:
        """The log of the one that was started last."""
        return self.logs[self._from :]

    @property
    def logs(self) -> str:
        """The logs of all of them."""
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        """Waits until the last one has logged a text."""
        deadline = time.monotonic() + 60
        while text not in self.log:
            assert self._process is not None
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.005)


@contextmanager
def places(folder: Path, addresses: list[str], state: str) -> Iterator[list[Place]]:
    """Places for coordinators that share a state, for the block."""
    made = [Place(folder, address, state) for address in addresses]
    try:
        yield made
    finally:
        for place in made:
            place.kill()


def status(release: Release, address: str) -> str:
    """Returns the output of a release's `paceline status` about the jobs of a coordinator."""
    command = [sys.executable, "-m", "paceline", "status", "--coordinator", address]
    return subprocess.check_output(command, env={**os.environ, **release}, text=True)


def start_workers(c: Cluster, release: Release, count: int) -> list[Trainer]:
    """Starts workers of a release, and waits until each has applied a step."""
    c.environment.pop("PYTHONPATH", None)
    c.environment.update(release)
    if release:
        with fresh():
            started = c.start(count)
    else:
        started = c.start(count)
    for trainer in started:
        c.wait_for_step(1, [trainer])
    return started


def replace_workers(c: Cluster, old: list[Trainer], release: Release) -> list[Trainer]:
    """Replaces workers one by one by those of a release: one comes, and then one goes."""
    replaced: list[Trainer] = []
    for trainer in old:
        replaced += start_workers(c, release, 1)
        trainer.signal(signal.SIGTERM)
        c.wait_until(lambda gone=trainer: bool(gone.of("dismissed")), "it leaves")
    return replaced


def check_undisturbed(c: Cluster, folder: Path, model: str, places: Sequence[Place]) -> None:
    """Ends the workers, and checks that nobody was lost, no step was repeated, and all have the bits of one process."""
    c.wait_for_step(max(c.line()) + 2)
    for place in places:
        assert " is void" not in place.logs, place.logs
    assert not c.redone(), str(c)
    for trainer in c.trainers:
        if not trainer.of("dismissed"):  # the others are on their way out already
            trainer.signal(signal.SIGTERM)
    assert set(c.wait().values()) == {0}, str(c)
    last = check_bits(c, folder, model)
    assert sorted(c.line()) == list(range(1, last + 1)), str(c)
