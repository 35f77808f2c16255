"""A coordinator with a state file and its workers are upgraded and downgraded one by one, and the job trains on."""

from __future__ import annotations

from pathlib import Path

import pytest
from upgrade.releases import THIS, check_undisturbed, places, replace_workers, start_workers, status, unpacked

from support.elastic.same_bits import in_microbatches
from support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

OLD = "their generation speaks version 8 of the protocol, because rank "


def test_rolling_upgrade_downgrade_and_upgrade(tmp_path: Path) -> None:
    last = unpacked(tmp_path)
    address = f"127.0.0.1:{free_port()}"
    with (
        places(tmp_path, [address], str(tmp_path / "state.db")) as (place,),
        in_microbatches(tmp_path, "mlp", coordinators=address, total=1 << 30, pace=0.04) as c,
    ):
        place.start(last)
        workers = start_workers(c, last, 2)
        place.stop()
        place.start(THIS)
        first, second = workers = replace_workers(c, workers, THIS)
        assert OLD in place.log
        assert "running" in status(last, address)
        c.wait_for_step(max(c.line()) + 2)
        place.kill()  # at a view of version 9
        assert OLD not in place.log.rpartition("generation ")[2], place.log
        place.start(last)
        assert "running" in status(THIS, address)
        third, *_ = replace_workers(c, [first], last)
        place.kill()  # at a view that the last release has formed, of which one member speaks no newer version
        place.start(THIS)
        replace_workers(c, [second, third], THIS)
        assert OLD in place.log
        check_undisturbed(c, tmp_path, "mlp", [place])


_DIES_AFTER_ONE_PUSH = """
import asyncio, os
from paceline_protocol.coordinator import Send
from paceline_protocol.messages import ViewFormed
from paceline_server.dispatcher import Dispatcher

honest = Dispatcher._perform

def perform(self, job, effect):
    formed = effect.message if isinstance(effect, Send) and isinstance(effect.message, ViewFormed) else None
    if formed is None or formed.base is None or formed.rank == 0:
        honest(self, job, effect)
    if formed is not None and formed.base is not None:
        assert formed.version == 9
        asyncio.get_running_loop().call_later(0.1, os._exit, 9)

Dispatcher._perform = perform
"""


def test_training_survives_a_view_announced_by_both_releases(tmp_path: Path) -> None:
    """One member hears of it from a coordinator of this release, the other from one that tells no version."""
    last = unpacked(tmp_path)
    address = f"127.0.0.1:{free_port()}"
    with (
        places(tmp_path, [address], str(tmp_path / "state.db")) as (place,),
        in_microbatches(tmp_path, "mlp", coordinators=address, total=1 << 30, pace=0.04) as c,
    ):
        place.start(THIS, _DIES_AFTER_ONE_PUSH)
        c.start(2)
        assert place.wait() == 9, place.log
        place.start(last)
        for trainer in c.trainers:
            c.wait_for_step(5, [trainer])
        check_undisturbed(c, tmp_path, "mlp", [place])
