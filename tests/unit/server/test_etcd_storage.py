"""The storage on a shared store: a batch is stored once, in order, and by nobody but the leader."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from paceline_server.errors import NotLeader
from paceline_server.storage.base import FinishedStored, KeySet, StateUnusable, StoreCleared, StoredJob, ViewFormed
from paceline_server.storage.etcd import EtcdStorage, leader_key
from paceline_server.storage.shared_keys import Item, KeysRefused, KeysUnavailable, LeaderRecord
from pacelinepb import RELEASE
from support.coordinator import run
from support.shared_keys import MemoryKeys, Node
from support.views import view


class Leader:
    """A storage of one epoch, and what it was told."""

    def __init__(self, node: Node, epoch: int = 1, **times: float) -> None:
        self.keys = MemoryKeys(node)
        self.why: list[str] = []
        key = leader_key("p")
        found = node.items.get(key)
        record = LeaderRecord(epoch, f"k{epoch}", f"k{epoch}:7400")
        revision = node.swap(key, 0 if found is None else found.revision, record.to_bytes(), {}, ())
        assert isinstance(revision, int)
        self.storage = EtcdStorage(self.keys, "p", record, revision, self.why.append, **times)


async def load(node: Node) -> list[StoredJob]:
    leader = Leader(node, 99)
    jobs = await leader.storage.load()
    await leader.storage.close()
    return jobs


def test_a_deposed_leader_stores_nothing_and_reports_the_reason() -> None:
    async def main() -> None:
        node = Node()
        old = Leader(node)
        await old.storage.load()
        await old.storage.write([ViewFormed("a", view(1))])
        Leader(node, 2)
        with pytest.raises(NotLeader):
            await old.storage.write([ViewFormed("a", view(2))])
        with pytest.raises(NotLeader):
            await old.storage.confirm()
        assert old.why == ["k2:7400 leads in epoch 2"]
        await old.storage.close()
        assert await load(node) == [StoredJob("a", 1, view(1))]

    run(main)


def test_a_batch_whose_answer_was_lost_is_stored_once() -> None:
    async def main() -> None:
        node = Node()
        leader = Leader(node)
        await leader.storage.load()
        lost = [True]

        def lose() -> None:
            if lost:
                lost.pop()
                raise KeysUnavailable("the answer was lost")

        leader.keys.after = lose
        await leader.storage.write([KeySet("a", "k", b"1")])
        await leader.storage.write([KeySet("a", "k", b"2")])
        assert (await load(node))[0].keys == {"k": b"2"}
        assert not leader.why
        await leader.storage.close()

    run(main)


def test_a_delayed_duplicate_of_a_batch_is_ignored() -> None:
    """The first copy of a batch arrives after the second one and the next batch."""

    async def main() -> None:
        node = Node()
        leader = Leader(node)
        await leader.storage.load()
        held: list[Any] = []
        honest = node.swap

        def hold(*of: Any) -> Any:
            if not held:
                held.append(of)
                raise KeysUnavailable("no answer")
            return honest(*of)

        node.swap = hold  # type: ignore[method-assign]
        await leader.storage.write([KeySet("a", "k", b"1")])
        await leader.storage.write([KeySet("a", "k", b"2")])
        honest(*held[0])
        assert (await load(node))[0].keys == {"k": b"2"}
        await leader.storage.close()

    run(main)


def test_a_leader_that_cannot_store_gives_up_after_the_fence_time() -> None:
    async def main() -> None:
        leader = Leader(Node(), fence_s=0.1)
        await leader.storage.load()
        leader.keys.away = True
        with pytest.raises(NotLeader):
            await leader.storage.write([FinishedStored("a", 3)])
        assert leader.why[0].startswith("nothing could be stored for 0.1 s: nobody answers")
        await leader.storage.close()

    run(main)


@pytest.mark.parametrize("error", [KeysRefused("permission denied"), ValueError("not ours"), RuntimeError("a bug")])
def test_a_leader_that_cannot_read_its_state_after_a_refusal_steps_down(error: Exception) -> None:
    async def main() -> None:
        leader = Leader(Node())
        await leader.storage.load()
        assert leader.storage.is_sure

        def refuse() -> None:
            raise KeysRefused("permission denied")

        async def read(prefix: bytes) -> Any:
            raise error

        leader.keys.before, leader.keys.read = refuse, read  # type: ignore[method-assign]
        with pytest.raises(NotLeader):
            await leader.storage.write([KeySet("a", "k", b"1")])
        assert len(leader.why) == 1
        assert str(error) in leader.why[0]
        assert not leader.storage.is_sure
        with pytest.raises(NotLeader):
            await leader.storage.confirm()
        await leader.storage.close()

    run(main)


def test_a_leader_is_sure_only_within_the_fence_time() -> None:
    async def main() -> None:
        for fence_s, is_sure in ((60.0, True), (0.0, False)):
            leader = Leader(Node(), fence_s=fence_s)
            await leader.storage.load()
            assert leader.storage.is_sure is is_sure
            await leader.storage.close()

    run(main)


def test_an_idle_leader_renews_its_record() -> None:
    async def main() -> None:
        node = Node()
        leader = Leader(node, tick_s=0.01)
        seen: list[int] = []
        twice = asyncio.Event()

        def note() -> None:
            seen.append(node.revision)
            if len(seen) == 2:
                twice.set()

        leader.keys.after = note
        await leader.storage.load()
        await twice.wait()
        assert seen == [2, 3]
        await leader.storage.close()

    run(main)


def test_a_leader_keeps_renewing_its_record_during_a_long_load() -> None:
    async def main() -> None:
        node = Node()
        leader = Leader(node, tick_s=0.01)
        stored: list[int] = []
        five = asyncio.Event()

        def note() -> None:
            stored.append(node.revision)
            if len(stored) == 5:
                five.set()

        async def read(prefix: bytes) -> list[Any]:
            await five.wait()
            return []

        leader.keys.after, leader.keys.read = note, read  # type: ignore[method-assign]
        leader.storage.begin()
        async with asyncio.timeout(5.0):
            assert await leader.storage.load() == []
        assert not leader.why
        await leader.storage.close()

    run(main)


def test_resigning_stores_pending_writes_and_clears_the_address() -> None:
    async def main() -> None:
        node = Node()
        leader = Leader(node)
        await leader.storage.load()
        written = leader.storage.write([KeySet("a", "k", b"1")])
        await leader.storage.resign()
        await written
        assert LeaderRecord.from_bytes(node.items[leader_key("p")].value).address == ""
        with pytest.raises(NotLeader):
            await leader.storage.write([KeySet("a", "k", b"2")])
        assert (await load(node))[0].keys == {"k": b"1"}

    run(main)


def test_a_restored_store_refuses_the_previous_leader() -> None:
    """The restored store has counted to the same revision, at which another leader wrote."""

    async def main() -> None:
        node = Node()
        old = Leader(node)
        await old.storage.load()
        await old.storage.write([KeySet("a", "k", b"1")])
        key = leader_key("p")
        other = LeaderRecord(1, "k2", "k2:7400", batch=1)
        node.items[key] = Item(key, other.to_bytes(), node.items[key].revision)
        with pytest.raises(NotLeader):
            await old.storage.write([KeySet("a", "k", b"2")])
        assert (await load(node))[0].keys == {"k": b"1"}
        await old.storage.close()

    run(main)


def test_only_the_oversized_write_of_a_refused_batch_fails() -> None:
    async def main() -> None:
        node = Node()
        leader = Leader(node)
        await leader.storage.load()
        honest = node.swap

        def refuse(key: bytes, revision: int, value: bytes, changes: Any, emptied: Any, held: Any = None) -> Any:
            if any(each == b"large" for each in changes.values()):
                raise KeysRefused("request is too large")
            return honest(key, revision, value, changes, emptied, held)

        node.swap = refuse  # type: ignore[method-assign]
        writes = [leader.storage.write([KeySet("a", "k", each)]) for each in (b"1", b"large")]
        writes.append(leader.storage.write([KeySet("a", "other", b"3")]))
        await writes[0]
        with pytest.raises(OSError, match="request is too large"):
            await writes[1]
        await writes[2]
        assert (await load(node))[0].keys == {"k": b"1", "other": b"3"}
        assert not leader.why
        await leader.storage.close()

    run(main)


def test_many_changes_fit_into_etcd_transactions() -> None:
    async def main() -> None:
        node = Node()
        leader = Leader(node)
        await leader.storage.load()
        writes = [leader.storage.write([KeySet("a", f"k{n}", b"x" * 9000)]) for n in range(500)]
        writes.append(leader.storage.write([StoreCleared("a")]))
        writes.append(leader.storage.write([KeySet("a", "last", b"1")]))
        await asyncio.gather(*writes)
        assert (await load(node))[0].keys == {"last": b"1"}
        await leader.storage.close()

    run(main)


def test_a_view_of_thousands_of_members_fits_into_one_request() -> None:
    async def main() -> None:
        node = Node()
        leader = Leader(node)
        await leader.storage.load()
        await leader.storage.write([ViewFormed("a", view(1, 5000))])
        assert max(len(item.value) for item in node.items.values()) < 1_000_000
        assert (await load(node))[0].view == view(1, 5000)
        await leader.storage.close()

    run(main)


def test_foreign_data_under_the_prefix_is_refused() -> None:
    async def main() -> None:
        node = Node()
        leader = Leader(node)
        node.swap(b"p/jobs/a/view", 0, b"{}", {}, ())
        with pytest.raises(StateUnusable):
            await leader.storage.load()

    run(main)
    for value in (b"", b"[]", b'{"epoch": 0}', b'{"epoch": "1", "name": "", "address": "", "batch": 0}'):
        with pytest.raises(ValueError, match="something else"):
            LeaderRecord.from_bytes(value)


def test_a_leader_stores_its_format_once_and_refuses_a_later_format() -> None:
    async def main() -> None:
        node = Node()
        leader = Leader(node)
        await leader.storage.load()
        await leader.storage.write([ViewFormed("a", view(1))])
        key = b"p/format"
        assert json.loads(node.items[key].value) == {"format": 1, "release": RELEASE}
        revision = node.items[key].revision
        await leader.storage.write([ViewFormed("a", view(2))])
        assert node.items[key].revision == revision, "the next batch does not say it again"
        await leader.storage.close()
        following = Leader(node, 2)
        await following.storage.load()
        await following.storage.confirm()
        await following.storage.close()
        assert node.items[key].revision == revision, "it is written again only if it has changed"
        text = (
            rf"format 2, written by Paceline 7, and this release \({RELEASE}\) reads formats up to 1: start the release"
        )
        node.items[key] = replace(node.items[key], value=b'{"format": 2, "release": "Paceline 7"}')
        with pytest.raises(StateUnusable, match=text):
            await load(node)

    run(main)


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"[]", b"7", b"{}", b'{"format": 1}', b'{"format": "1", "release": "x"}', b"[" * 100_000),
        *(b'{"format": true, "release": ""}', b'{"format": 1, "release": "%s"}' % (b"x" * 65)),
        *(b'{"format": 0, "release": ""}', b'{"format": 1, "release": "a\\nb"}', b'{"format": 1, "release": 5}'),
        b'{"format": %d, "release": ""}' % (1 << 70),
    ],
)
def test_a_malformed_format_record_raises_state_unusable(value: bytes) -> None:
    async def main() -> None:
        node = Node()
        node.items[b"p/format"] = Item(b"p/format", value, 0)
        with pytest.raises(StateUnusable, match=r"is no number of ours|is none of ours"):
            await load(node)

    run(main)
