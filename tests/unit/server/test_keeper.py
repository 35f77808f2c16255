"""The keeper tells a job what became of its writes: a view is announced only once it is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from unit.server.test_storage import view

from paceline_protocol.coordinator import Event, FinishStored, StoreFailed, StoreFinished, StoreView, ViewStored
from paceline_server.keeper import Keeper
from paceline_server.storage.base import Change, FinishedStored, NumbersUsed, ViewFormed
from support.coordinator import run

JOB: Any = SimpleNamespace(membership=SimpleNamespace(state=SimpleNamespace(name="job")), door_secret=b"secret")


class Disk:
    """A storage whose writes end when the test says so."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.writes: list[asyncio.Future[None]] = []
        self.applied: list[Event] = []
        self.keeper = Keeper(self, lambda job, event: self.applied.append(event))  # type: ignore[arg-type]

    def write(self, changes: Sequence[Change]) -> asyncio.Future[None]:
        self.changes += changes
        self.writes.append(asyncio.get_running_loop().create_future())
        return self.writes[-1]

    async def end(self, error: Exception | None = None) -> None:
        """The oldest write ends."""
        write = self.writes.pop(0)
        if error is None:
            write.set_result(None)
        else:
            write.set_exception(error)
        await asyncio.sleep(0)  # callbacks of a future run in the loop's next round


def test_a_view_is_announced_only_once_it_is_stored() -> None:
    async def main() -> None:
        disk = Disk()
        disk.keeper.keep(JOB, StoreView(view(3)))
        assert disk.changes == [ViewFormed("job", view(3), b"secret")]
        assert disk.applied == []
        await disk.end()
        assert disk.applied == [ViewStored(3)]

    run(main)


def test_a_view_whose_write_failed_is_not_announced(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        disk = Disk()
        disk.keeper.keep(JOB, StoreView(view(3)))
        await disk.end(OSError("no space left"))
        assert disk.applied == [StoreFailed(3, "no space left")]

    run(main)
    assert "no space left" in caplog.text


def test_a_failed_write_sets_trouble_until_a_write_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    """Only views that were stored count as commits, and the log has one line for many failures."""

    async def main() -> None:
        disk, took = Disk(), list[float]()
        disk.keeper.took = took.append
        disk.keeper.check()
        assert disk.changes == [], "without trouble nothing is written to ask"
        await disk.end()
        for _ in range(5):
            disk.keeper.keep(JOB, StoreView(view(3)))
            await disk.end(OSError("no space left"))
        assert (disk.keeper.trouble, disk.keeper.failures, took) == ("no space left", 5, [])
        disk.keeper.check()
        assert disk.changes[-1] == NumbersUsed("", 0)
        await disk.end()
        assert (disk.keeper.trouble, disk.keeper.failures) == ("", 5)
        disk.keeper.keep(JOB, StoreView(view(4)))
        await disk.end()
        assert len(took) == 1

    run(main)
    assert caplog.text.count("no space left") == 1


def test_a_job_finishes_once_stored_or_when_the_write_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        disk = Disk()
        for error in (None, OSError("no space left")):
            disk.applied.clear()
            disk.keeper.keep(JOB, StoreFinished(9))
            assert disk.changes[-1] == FinishedStored("job", 9)
            assert disk.applied == []
            await disk.end(error)
            assert disk.applied == [FinishStored(9)]
        disk.applied.clear()
        disk.keeper.keep(JOB, StoreFinished(None))
        await disk.end()
        assert disk.applied == [], "a line that is to go on"

    run(main)
    assert "no space left" in caplog.text


def test_writes_that_end_after_close_apply_no_events() -> None:
    async def main() -> None:
        disk = Disk()
        disk.keeper.keep(JOB, StoreView(view(3)))
        disk.keeper.keep(JOB, StoreFinished(9))
        disk.keeper.close()
        await disk.end()
        await disk.end()
        assert disk.applied == []

    run(main)
