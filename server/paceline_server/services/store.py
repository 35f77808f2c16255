"""StoreService authenticates the caller, acts on the job's store, and answers a write when it is durable."""

from __future__ import annotations

import asyncio
from typing import Any

from paceline_server import wire
from paceline_server._grpc import aio, grpc
from paceline_server.dispatcher import Dispatcher
from paceline_server.errors import BadRequest, LimitMet
from paceline_server.keeper import Job
from paceline_server.storage.base import Change
from pacelinepb.v1 import store_pb2 as pb

__all__ = ["StoreHandlers"]

_Context = aio.ServicerContext[Any, Any]


class StoreHandlers:
    """Handlers of pacelinepb.v1.StoreService.

    A value can be read a moment before it is durable; the call that writes it gets its answer once it is.

    Args:
        dispatcher: the jobs.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._settings = dispatcher.settings

    def add_to(self, server: aio.Server) -> None:
        """Registers the handlers.

        This is done by hand because `PacingInterceptor` merges a request that comes as several messages: each handler
        takes one message.
        """
        service = pb.DESCRIPTOR.services_by_name["StoreService"]
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            method.name: grpc.unary_unary_rpc_method_handler(
                getattr(self, method.name),
                getattr(pb, method.input_type.name).FromString,
                getattr(pb, method.output_type.name).SerializeToString,
            )
            for method in service.methods
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))

    async def Set(self, request: pb.SetRequest, context: _Context) -> pb.SetResponse:
        """Sets a key."""
        job, key = self._caller(request.caller), self._key(request.key)
        await self._write(job, key, job.store.values.set(key, b"".join(request.value)))
        return pb.SetResponse()

    async def Get(self, request: pb.GetRequest, context: _Context) -> pb.GetResponse:
        """Reads a key; waits for it if there is none yet."""
        job, key = self._caller(request.caller), self._key(request.key)
        timeout = self._timeout(request)
        value = job.store.values.get(key)
        while value is None:  # the key may be deleted again between the wake-up and here
            await job.store.until_there(request.caller.member_id, [key], timeout)
            value = job.store.values.get(key)
        return pb.GetResponse(value=value)

    async def Add(self, request: pb.AddRequest, context: _Context) -> pb.AddResponse:
        """Adds to an integer."""
        job, key = self._caller(request.caller), self._key(request.key)
        total, changes = job.store.values.add(request.caller.member_id, request.call, key, request.amount)
        await self._write(job, key, changes)
        return pb.AddResponse(value=total)

    async def CompareSet(self, request: pb.CompareSetRequest, context: _Context) -> pb.CompareSetResponse:
        """Sets a key if it holds the expected value."""
        job, key = self._caller(request.caller), self._key(request.key)
        expected = b"".join(request.expected) if request.expected else None
        if len(expected or b"") > (most := self._settings.max_value_bytes):
            raise LimitMet(f"an expected value has at most {most} bytes, as a value has")
        swapped, value, changes = job.store.values.compare_set(
            request.caller.member_id, request.call, key, expected, b"".join(request.desired)
        )
        await self._write(job, key, changes)
        return pb.CompareSetResponse(swapped=swapped, value=value)

    async def Wait(self, request: pb.WaitRequest, context: _Context) -> pb.WaitResponse:
        """Waits until all keys exist."""
        job = self._caller(request.caller)
        if len(request.keys) > self._settings.max_wait_keys:
            raise LimitMet(f"a Wait can name at most {self._settings.max_wait_keys} keys, not {len(request.keys)}")
        keys = [self._key(key) for key in request.keys]
        await job.store.until_there(request.caller.member_id, keys, self._timeout(request))
        return pb.WaitResponse()

    async def Delete(self, request: pb.DeleteRequest, context: _Context) -> pb.DeleteResponse:
        """Deletes a key."""
        job, key = self._caller(request.caller), self._key(request.key)
        changes = job.store.values.delete(key)
        await self._write(job, key, changes)
        return pb.DeleteResponse(existed=bool(changes))

    def _caller(self, caller: pb.Caller) -> Job:
        return self._dispatcher.authenticate(caller.job, caller.member_id, caller.session_token)

    def _key(self, key: str) -> str:
        return wire.check_name(key, "a key", self._settings.max_key_bytes)

    def _timeout(self, request: pb.GetRequest | pb.WaitRequest) -> float:
        if not request.HasField("timeout"):
            raise BadRequest("timeout is required; 0 answers at once")
        return wire.from_duration(request.timeout, "timeout")

    async def _write(self, job: Job, key: str, changes: list[Change]) -> None:
        if changes:
            stored = self._dispatcher.storage.write(changes)
            job.store.wake(key)
            try:
                await asyncio.shield(stored)
            finally:  # even if the caller hangs up: the value takes memory until it is on the disk
                await asyncio.wait({stored})
