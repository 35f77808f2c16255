"""A shared store without a network: keys, revisions, and swaps, as etcd has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paceline_server.storage.etcd import EtcdStorage, leader_key
from paceline_server.storage.shared_keys import Item, KeysRefused, KeysUnavailable, LeaderRecord

__all__ = ["MemoryKeys", "Node", "next_leader"]


class Node:
    """What all clients share: the state of the store.

    Attributes:
        items: by key.
        revision: of the last change.
        most: the most keys that one swap may change.
    """

    def __init__(self) -> None:
        self.items: dict[bytes, Item] = {}
        self.revision = 0
        self.most = 128

    def swap(
        self,
        key: bytes,
        revision: int,
        value: bytes,
        changes: Mapping[bytes, bytes | None],
        emptied: Sequence[bytes],
        held: bytes | None = None,
    ) -> int | Item | None:
        """See `SharedKeys.swap`."""
        if len(changes) + len(emptied) + 1 > self.most:
            raise KeysRefused("too many operations in the request")
        assert not any(other.startswith(prefix) for other in changes for prefix in emptied)
        found = self.items.get(key)
        if (0 if found is None else found.revision) != revision:
            return found
        if held is not None and (found is None or found.value != held):
            return found
        self.revision += 1
        for prefix in emptied:
            for other in [each for each in self.items if each.startswith(prefix)]:
                del self.items[other]
        for other, wanted in {**changes, key: value}.items():
            if wanted is None:
                self.items.pop(other, None)
            else:
                self.items[other] = Item(other, wanted, self.revision)
        return self.revision


class MemoryKeys:
    """One client.

    Args:
        node: the store.

    Attributes:
        before, after: called before and after each swap; what they raise, the client raises.
        away: no call is answered.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        self.away = False
        self.swaps = 0

    async def get(self, key: bytes) -> Item | None:
        """See `SharedKeys.get`."""
        self._check()
        return self.node.items.get(key)

    async def read(self, prefix: bytes) -> list[Item]:
        """See `SharedKeys.read`."""
        self._check()
        return [self.node.items[key] for key in sorted(self.node.items) if key.startswith(prefix)]

    async def swap(
        self,
        key: bytes,
        revision: int,
        value: bytes,
        changes: Mapping[bytes, bytes | None] | None = None,
        emptied: Sequence[bytes] = (),
        held: bytes | None = None,
    ) -> int | Item | None:
        """See `SharedKeys.swap`."""
        self._check()
        self.before()
        found = self.node.swap(key, revision, value, changes or {}, emptied, held)
        self.swaps += 1
        self.after()
        return found

    async def close(self) -> None:
        """Nothing to let go of."""

    def _check(self) -> None:
        if self.away:
            raise KeysUnavailable("nobody answers")


def next_leader(node: Node) -> EtcdStorage:
    """The storage of a coordinator that takes over."""
    found = node.items.get(leader_key("p"))
    epoch = 1 if found is None else LeaderRecord.from_bytes(found.value).epoch + 1
    record = LeaderRecord(epoch, f"k{epoch}", "k:7400")
    revision = node.swap(leader_key("p"), 0 if found is None else found.revision, record.to_bytes(), {}, ())
    assert isinstance(revision, int)
    return EtcdStorage(MemoryKeys(node), "p", record, revision)
