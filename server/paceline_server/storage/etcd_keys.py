"""An etcd cluster as the store that coordinators share: two calls of etcd's API, with every node to choose from."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from paceline_server._grpc import aio, grpc
from paceline_server.blocking_calls import start_apart
from paceline_server.storage.etcd_address import EtcdAddress, TlsFiles
from paceline_server.storage.shared_keys import Item, KeysRefused, KeysUnavailable
from pacelinepb.v1 import etcd_pb2 as pb

_CALL_S = 0.4
"""Seconds for a call: a node that is frozen or cut off must leave time for another one before the leader gives up."""

_PAGE = 64
"""Keys in the first answer. Most are small, but a view of thousands of members takes hundreds of kilobytes, and a value
of a job's store up to 1 MiB."""

_PAGE_TRIES = 7
"""Each asks for half as many keys as the one before; the last one asks for a single key."""

_PAGE_PAUSE_S = 0.05

_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 300),  # despite its name, the time that one try to connect may take
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]

_REFUSALS = frozenset(
    (
        grpc.StatusCode.INVALID_ARGUMENT,  # too many operations, or too many bytes
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # etcd's quota is used up
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    )
)

_TOO_BUSY = "too many requests"
"""etcd says RESOURCE_EXHAUSTED for a full disk and for this, which passes."""


class EtcdKeys:
    """A client of one cluster, used on one event loop.

    The files of TLS are read again after each call without an answer. If one has changed, all connections are made
    anew, because the old certificate may have expired.
    """

    def __init__(self, address: EtcdAddress) -> None:
        self._address = address
        self._channels: list[aio.Channel] = []
        self._chosen = 0
        self._files: TlsFiles | None = None  # what the channels were made with
        self._reading: Future[TlsFiles | None] | None = None

    async def get(self, key: bytes) -> Item | None:
        """See `SharedKeys.get`."""
        found: pb.EtcdRangeResult = await self._call("Range", pb.EtcdRange(key=key), pb.EtcdRangeResult)
        return _item(found.kvs[0]) if found.kvs else None

    async def read(self, prefix: bytes) -> list[Item]:
        """See `SharedKeys.read`."""
        items: list[Item] = []
        request = pb.EtcdRange(key=prefix, range_end=_end_of(prefix), limit=_PAGE)
        while True:
            found = await self._page(request)
            items += map(_item, found.kvs)
            if not found.more:
                return items
            request.key = items[-1].key + b"\0"

    async def _page(self, request: pb.EtcdRange) -> pb.EtcdRangeResult:
        """Reads a page, and asks again if no answer comes: a read of many pages must not begin anew.

        Large values may take longer than a call may take. So each further try asks for half as many keys, and
        `request` keeps the smaller limit for the pages that follow.
        """
        tries = 0
        while True:
            try:
                found: pb.EtcdRangeResult = await self._call("Range", request, pb.EtcdRangeResult)
            except KeysUnavailable:
                tries += 1
                if tries == _PAGE_TRIES:
                    raise
                request.limit = max(1, request.limit // 2)
                await asyncio.sleep(_PAGE_PAUSE_S)
            else:
                return found

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
        request = pb.EtcdTxn()
        guard = request.compare.add(target=pb.ETCD_COMPARE_TARGET_MOD, key=key)
        guard.mod_revision = revision
        if held is not None:
            request.compare.add(target=pb.ETCD_COMPARE_TARGET_VALUE, key=key, value=held)
        request.success.add().request_put.CopyFrom(pb.EtcdPut(key=key, value=value))
        for prefix in emptied:
            gone = pb.EtcdDeleteRange(key=prefix, range_end=_end_of(prefix))
            request.success.add().request_delete_range.CopyFrom(gone)
        for other, wanted in (changes or {}).items():
            if wanted is None:
                request.success.add().request_delete_range.CopyFrom(pb.EtcdDeleteRange(key=other))
            else:
                request.success.add().request_put.CopyFrom(pb.EtcdPut(key=other, value=wanted))
        request.failure.add().request_range.CopyFrom(pb.EtcdRange(key=key))
        done: pb.EtcdTxnResult = await self._call("Txn", request, pb.EtcdTxnResult)
        if done.succeeded:
            return done.header.revision
        found = done.responses[0].response_range.kvs
        return _item(found[0]) if found else None

    async def close(self) -> None:
        """Ends all connections."""
        channels, self._channels = self._channels, []
        await asyncio.gather(*(channel.close(None) for channel in channels))

    async def _call(self, method: str, request: Any, answer: Any) -> Any:
        """Makes one call, once, at the node that answered last; the next call goes to another one if this fails."""
        if not self._channels:
            self._connect(self._address.read_files())
        elif self._reading is not None and self._reading.done():
            await self._renew(self._reading)
        channel: Any = self._channels[self._chosen]
        call = channel.unary_unary(
            f"/etcdserverpb.KV/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return await call(request, timeout=_CALL_S)
        except aio.AioRpcError as error:
            text = f"etcd at {self._address.endpoints[self._chosen]}: {error.details() or error.code().name}"
            if error.code() in _REFUSALS and _TOO_BUSY not in text:
                raise KeysRefused(text) from None
            self._chosen = (self._chosen + 1) % len(self._address.endpoints)
            if self._files is not None and self._reading is None:
                self._reading = start_apart(self._address.read_files, "paceline-etcd-certificates")
            raise KeysUnavailable(text) from None

    def _connect(self, files: TlsFiles | None) -> None:
        self._files = files
        secured = None if files is None else grpc.ssl_channel_credentials(*files)
        self._channels = [
            aio.insecure_channel(each, _OPTIONS) if secured is None else aio.secure_channel(each, secured, _OPTIONS)
            for each in self._address.endpoints
        ]

    async def _renew(self, reading: Future[TlsFiles | None]) -> None:
        """Makes the channels anew if a file has changed; calls that use the old ones end first."""
        self._reading = None
        if isinstance(reading.exception(), OSError | ValueError):  # it is being replaced: the next failure looks again
            return
        if (files := reading.result()) != self._files:
            old = self._channels
            self._connect(files)
            await asyncio.gather(*(channel.close(2 * _CALL_S) for channel in old))


def _item(found: pb.EtcdKeyValue) -> Item:
    return Item(found.key, found.value, found.mod_revision)


def _end_of(prefix: bytes) -> bytes:
    """Returns the first key behind all that begin with the prefix, which does not end with 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
