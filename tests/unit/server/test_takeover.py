"""What a coordinator does between its election and the moment at which it serves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from unit.server.test_etcd_storage import Leader

from paceline_server import dispatcher, failover
from paceline_server.dispatcher import Dispatcher
from paceline_server.errors import NotLeader
from paceline_server.failover import Candidacy, FailoverCoordinator
from paceline_server.settings import ServerSettings
from paceline_server.storage.base import FinishedStored, StateUnusable, StoredJob
from paceline_server.storage.etcd import leader_key
from paceline_server.storage.etcd_address import EtcdAddress
from paceline_server.storage.etcd_keys import EtcdKeys
from paceline_server.storage.memory import MemoryStorage
from paceline_server.storage.shared_keys import Item, KeysRefused, KeysUnavailable, LeaderRecord
from pacelinepb.v1 import etcd_pb2 as pb
from support.coordinator import run
from support.shared_keys import MemoryKeys, Node

SETTINGS = ServerSettings(listen="k:1", etcd=EtcdAddress(("nowhere:1",), "p"))


class Served:
    """What a coordinator is made of here: one that fails to start when it leads."""

    http_url = ""

    def __init__(self, _: object, *, storage: Any, epoch: int, **__: Any) -> None:
        self.storage, self.epoch = storage, epoch

    async def start(self) -> str:
        if self.epoch:
            raise StateUnusable("its file of tokens is gone")
        return "k:1"

    def drain(self) -> None:
        pass

    async def stop(self, grace: float = 1.0) -> None:
        pass


async def silence(_: object) -> None:
    await asyncio.Event().wait()


def test_a_leader_that_cannot_serve_waits_before_trying_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        keys = MemoryKeys(Node())
        coordinator = FailoverCoordinator(SETTINGS, keys=keys, make=Served, notice=silence)  # type: ignore[arg-type]
        slept: list[float] = []
        waits = asyncio.Event()
        honest = asyncio.sleep

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            waits.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(failover.asyncio, "sleep", sleep)
        await coordinator.start()
        async with asyncio.timeout(5.0):
            await waits.wait()
        assert slept == [failover.FENCE_S]
        swaps = keys.swaps
        monkeypatch.setattr(failover.asyncio, "sleep", honest)
        await asyncio.sleep(0.6)  # two ticks of a leader
        assert keys.swaps == swaps  # it does not say that it leads
        await coordinator.stop()

    run(main)


def test_a_stopping_leader_drains_before_it_resigns() -> None:
    async def main() -> None:
        keys = MemoryKeys(Node())
        happened: list[str] = []
        leads = asyncio.Event()

        class Leader(Served):
            async def start(self) -> str:
                if self.epoch:
                    leads.set()
                return "k:1"

            def drain(self) -> None:
                happened.append("drained")

        def note() -> None:
            happened.append(next(iter(keys.node.items.values())).value.decode())

        coordinator = FailoverCoordinator(SETTINGS, keys=keys, make=Leader, notice=silence)  # type: ignore[arg-type]
        await coordinator.start()
        await leads.wait()
        keys.after = note
        await coordinator.stop()
        assert next(each for each in happened if each == "drained" or '"address": ""' in each) == "drained"
        assert '"address": ""' in happened[-1]

    run(main)


def test_starting_with_thousands_of_jobs_yields_the_loop() -> None:
    async def main() -> None:
        rounds = 0

        async def count() -> None:
            nonlocal rounds
            while True:
                await asyncio.sleep(0)
                rounds += 1

        counting = asyncio.create_task(count())
        jobs = [StoredJob(f"job{n}", 1, finished=1) for n in range(10 * dispatcher._AT_ONCE)]
        started = Dispatcher(ServerSettings(), MemoryStorage({each.name: each for each in jobs}))
        await asyncio.sleep(0)
        before = rounds
        await started.start()
        assert rounds - before >= 9
        counting.cancel()
        started.drain()

    run(main)


def test_a_state_changed_by_another_leader_during_load_is_not_served() -> None:
    """The second half of what is read is of a moment at which another coordinator leads."""

    async def main() -> None:
        node = Node()
        old = Leader(node)
        await old.storage.load()
        await old.storage.write([FinishedStored("a", 1), FinishedStored("b", 1)])
        await old.storage.close()
        torn = Leader(node, 2)
        honest = torn.keys.read

        async def read(prefix: bytes) -> list[Item]:
            items = await honest(prefix)
            other = Leader(node, 3)
            await other.storage.load()
            await other.storage.write([FinishedStored("a", 2), FinishedStored("b", 2)])
            await other.storage.close()
            return items[:1] + (await honest(prefix))[1:]

        torn.keys.read = read  # type: ignore[method-assign]
        started = Dispatcher(ServerSettings(), torn.storage, epoch=2)
        with pytest.raises(NotLeader):
            await started.start()
        assert not started.jobs
        await torn.storage.close()

    run(main)


def test_an_unanswered_page_is_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        asked: list[bytes] = []

        async def call(_: object, method: str, request: pb.EtcdRange, __: object) -> pb.EtcdRangeResult:
            asked.append(request.key)
            if len(asked) == 2:
                raise KeysUnavailable("no answer")
            found = [pb.EtcdKeyValue(key=request.key + b"1", mod_revision=1)]
            return pb.EtcdRangeResult(kvs=found, more=len(asked) < 3)

        monkeypatch.setattr(EtcdKeys, "_call", call)
        items = await EtcdKeys(EtcdAddress(("nowhere:1",), "p")).read(b"p/")
        assert asked == [b"p/", b"p/1\0", b"p/1\0"]
        assert [item.key for item in items] == [b"p/1", b"p/1\x001"]

    run(main)


@pytest.mark.parametrize(("fits", "asked"), [(8, [64, 32, 16, 8, 8, 8]), (1, [64, 32, 16, 8, 4, 2, 1, 1, 1])])
def test_a_page_that_times_out_is_requested_in_smaller_pages(
    fits: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        limits: list[int] = []

        async def call(_: object, method: str, request: pb.EtcdRange, __: object) -> pb.EtcdRangeResult:
            limits.append(request.limit)
            if request.limit > fits:
                raise KeysUnavailable("Deadline Exceeded")
            return pb.EtcdRangeResult(kvs=[pb.EtcdKeyValue(key=request.key + b"1")], more=limits.count(fits) < 3)

        monkeypatch.setattr(EtcdKeys, "_call", call)
        assert len(await EtcdKeys(EtcdAddress(("nowhere:1",), "p")).read(b"p/")) == 3
        assert limits == asked

    run(main)


def test_a_new_epoch_exceeds_all_seen_even_if_the_record_is_lost() -> None:
    async def main() -> None:
        node = Node()
        candidacy = Candidacy(MemoryKeys(node), "p", "me", "k:1")
        epochs = []
        for _ in range(3):
            record, _ = await candidacy.win()
            epochs.append(record.epoch)
            node.items.clear()
        node.swap(leader_key("p"), 0, LeaderRecord(1, "other", "").to_bytes(), {}, ())
        record, _ = await candidacy.win()
        assert [*epochs, record.epoch] == [1, 2, 3, 4]

    run(main)


@pytest.mark.parametrize("silent", [False, True])
def test_a_standby_logs_once_that_etcd_refuses_writes(silent: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A full etcd answers each look and refuses each try. Once it has room again, the next trouble is said too."""
    caplog.set_level("INFO", "paceline_server.failover")

    async def main() -> None:
        keys = MemoryKeys(Node())
        if silent:  # for longer with each look
            keys.node.swap(leader_key("p"), 0, LeaderRecord(1, "other", "k:2").to_bytes(), {}, ())
        candidacy = Candidacy(keys, "p", "me", "k:1", look_s=0.001, fence_s=0.01)
        tries = []

        def refuse() -> None:
            tries.append(None)
            if len(tries) % 200:
                raise KeysRefused("etcdserver: mvcc: database space exceeded")

        keys.before = refuse
        for _ in range(2):
            await candidacy.win()
        assert len(tries) == 400
        said = [record.getMessage() for record in caplog.records]
        assert sum("space exceeded" in line for line in said) == 2, said
        assert len(said) <= 4 + silent, said

    run(main)


_LATER = Item(b"p/format", b'{"format": 2, "release": "Paceline 7"}', 1)
_SAYS = "it is of format 2, written by Paceline 7"


def test_a_standby_refuses_to_start_with_a_later_state_format() -> None:
    async def main() -> None:
        keys = MemoryKeys(Node())
        keys.node.items[_LATER.key] = _LATER
        coordinator = FailoverCoordinator(SETTINGS, keys=keys, make=Served, notice=silence)  # type: ignore[arg-type]
        with pytest.raises(StateUnusable, match=_SAYS):
            await coordinator.start()

    run(main)


def test_a_standby_does_not_take_over_while_the_format_is_too_new(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        keys = MemoryKeys(Node())
        keys.node.items[_LATER.key] = _LATER
        asked = 0
        honest = keys.get

        async def get(key: bytes) -> Item | None:
            nonlocal asked
            asked += key == _LATER.key
            if asked == 20:
                assert not keys.swaps
                keys.node.items.pop(_LATER.key)
                asked += 1
            return await honest(key)

        keys.get = get  # type: ignore[method-assign]
        await Candidacy(keys, "p", "me", "k:1", look_s=0.001).win()
        assert sum(_SAYS in record.getMessage() for record in caplog.records) == 1

    run(main)


def test_a_standby_notes_whether_it_has_reached_the_leader() -> None:
    async def main() -> None:
        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.append(asyncio.current_task())
            writer.close()
            await writer.wait_closed()

        accepted: list[Any] = []
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        node = Node()
        node.swap(leader_key("p"), 0, LeaderRecord(1, "other", address).to_bytes(), {}, ())
        candidacy = Candidacy(MemoryKeys(node), "p", "me", "k:1")
        await candidacy.look()
        noted = asyncio.Event()
        honest = candidacy.election.reached

        def reached(where: str) -> None:
            honest(where)
            noted.set()

        candidacy.election.reached = reached  # type: ignore[method-assign]
        following = asyncio.create_task(failover.follow(candidacy))
        async with asyncio.timeout(5.0):
            await noted.wait()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        server.close()
        await server.wait_closed()
        await asyncio.gather(*accepted)
        loop = asyncio.get_running_loop()
        candidacy.election.refused(loop.time() + 0.9, address)
        assert candidacy.election.decide(loop.time()).tries

    run(main)
