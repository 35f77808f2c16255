"""What the rest believes of etcd, with real nodes: swaps, pages, refusals, and the storage on them."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from paceline_server.errors import NotLeader
from paceline_server.storage.base import KeySet, StoreCleared, StoredJob, ViewFormed
from paceline_server.storage.etcd import EtcdStorage, leader_key
from paceline_server.storage.etcd_address import EtcdAddress
from paceline_server.storage.etcd_keys import EtcdKeys
from paceline_server.storage.shared_keys import Item, KeysRefused, KeysUnavailable, LeaderRecord
from support.certificates import make_folder, renew
from support.coordinator import run
from support.etcd import Cluster, cluster, needs_etcd
from support.views import view

pytestmark = [pytest.mark.needs(what="etcd"), needs_etcd]


def keys_of(etcd: Cluster) -> EtcdKeys:
    return EtcdKeys(EtcdAddress.parse(etcd.url("p")))


async def leader(keys: EtcdKeys, epoch: int, why: list[str]) -> EtcdStorage:
    found = await keys.get(leader_key("p"))
    record = LeaderRecord(epoch, f"k{epoch}", f"k{epoch}:7400")
    revision = await keys.swap(leader_key("p"), 0 if found is None else found.revision, record.to_bytes())
    assert isinstance(revision, int)
    return EtcdStorage(keys, "p", record, revision, why.append)


def test_swaps_and_paged_reads(tmp_path: Path) -> None:
    async def main(etcd: Cluster) -> None:
        keys = keys_of(etcd)
        assert await keys.get(b"a") is None
        first = await keys.swap(b"a", 0, b"1", {b"p/%03d" % n: b"x" for n in range(120)})
        assert isinstance(first, int)
        assert await keys.swap(b"a", 0, b"2") == Item(b"a", b"1", first)
        assert await keys.swap(b"missing", first, b"2") is None
        assert [item.key for item in await keys.read(b"p/")] == [b"p/%03d" % n for n in range(120)]
        assert await keys.swap(b"a", first, b"2", held=b"0") == Item(b"a", b"1", first)
        second = await keys.swap(b"a", first, b"2", {b"p/000": None}, [b"p/1"], b"1")
        assert await keys.get(b"a") == Item(b"a", b"2", second)  # type: ignore[arg-type]
        assert len(await keys.read(b"p/")) == 99
        with pytest.raises(KeysRefused):
            await keys.swap(b"a", second, b"x" * (2 << 20))  # type: ignore[arg-type]
        with pytest.raises(KeysRefused):
            await keys.swap(b"a", second, b"3", {b"q/%d" % n: b"" for n in range(200)})  # type: ignore[arg-type]
        await keys.close()

    with cluster(tmp_path) as etcd:
        run(lambda: main(etcd))


def test_a_write_of_a_deposed_leader_is_refused_and_not_stored(tmp_path: Path) -> None:
    async def main(etcd: Cluster) -> None:
        keys, why = keys_of(etcd), list[str]()
        old = await leader(keys, 1, why)
        assert await old.load() == []
        await old.write([ViewFormed("a", view(1, 1000), b"secret"), KeySet("a", "k/1", b"v" * (1 << 20))])
        new = await leader(keys, 2, [])
        with pytest.raises(NotLeader):
            await old.write([ViewFormed("a", view(2))])
        assert why == ["k2:7400 leads in epoch 2"]
        stored = StoredJob("a", 1, view(1, 1000), keys={"k/1": b"v" * (1 << 20)}, door_secret=b"secret")
        assert await new.load() == [stored]
        await new.write([StoreCleared("a")])
        await old.close()
        await new.close()
        assert [each.keys for each in await (await leader(keys, 3, [])).load()] == [{}]
        await keys.close()

    with cluster(tmp_path) as etcd:
        run(lambda: main(etcd))


def test_a_leader_keeps_writing_when_a_node_dies_or_freezes(tmp_path: Path) -> None:
    async def main(etcd: Cluster) -> None:
        keys, why = keys_of(etcd), list[str]()
        storage = await leader(keys, 1, why)
        await storage.load()
        follower = next(n for n in range(3) if n != etcd.leader())
        etcd.kill(follower)
        await storage.write([KeySet("a", "k", b"1")])
        etcd.start(follower)
        etcd.wait()
        etcd.signal(follower, signal.SIGSTOP)
        try:
            await storage.write([KeySet("a", "k", b"2")])
        finally:
            etcd.signal(follower, signal.SIGCONT)
        assert not why
        await storage.close()
        assert [job.keys for job in await (await leader(keys, 2, [])).load()] == [{"k": b"2"}]
        await keys.close()

    with cluster(tmp_path, 3) as etcd:
        run(lambda: main(etcd))


def test_etcd_requires_a_client_certificate(tmp_path: Path) -> None:
    async def main(etcd: Cluster) -> None:
        keys = keys_of(etcd)
        assert isinstance(await keys.swap(b"a", 0, b"1"), int)
        await keys.close()
        without = EtcdKeys(EtcdAddress(tuple(etcd.endpoints), "p"))
        with pytest.raises(KeysUnavailable):
            await without.get(b"a")
        await without.close()

    with cluster(tmp_path, tls=make_folder(tmp_path / "tls")) as etcd:
        run(lambda: main(etcd))


def test_a_renewed_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tls")

    async def main(etcd: Cluster) -> None:
        renew(folder, "member", days=-1)
        keys = keys_of(etcd)
        for _ in range(3):
            with pytest.raises(KeysUnavailable):
                await keys.get(b"a")
        renew(folder, "member", days=1)
        assert await answered(keys) is None
        await keys.close()

    async def answered(keys: EtcdKeys) -> Item | None:
        """What etcd says, once a connection with the new certificate is there."""
        async with asyncio.timeout(20):
            while True:
                try:
                    return await keys.get(b"a")
                except KeysUnavailable:
                    await asyncio.sleep(0.02)

    with cluster(tmp_path, tls=folder) as etcd:
        run(lambda: main(etcd))
