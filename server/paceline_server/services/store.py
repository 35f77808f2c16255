"""StoreService authenticates the caller, acts on the job's store, and answers a write when it is durable."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from paceline_protocol.translation import check_number
from paceline_server import wire
from paceline_server._grpc import aio, grpc
from paceline_server.dispatcher import Dispatcher
from paceline_server.errors import BadRequest, LimitMet
from paceline_server.keeper import Job
from paceline_server.key_values import KeyValues
from paceline_server.storage.base import Change
from pacelinepb.v1 import store_pb2 as pb

_Context = aio.ServicerContext[Any, Any]


class StoreHandlers:
    """Handlers of pacelinepb.v1.StoreService.

    An answer tells only what is durable. The values themselves change as soon as a call arrives, so an answer that
    rests on them waits for what other calls have written before: otherwise a coordinator that is killed would take back
    what somebody has read.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._settings = dispatcher.settings

    def add_to(self, server: aio.Server) -> None:
        """Registers the handlers by hand, since `PacingInterceptor` merges the messages of a request into one."""
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
        member_id, call = self._repeatable(request)
        changes = job.store.values.set(key, b"".join(request.value), member_id, call)
        await self._write(job, key, member_id, call, changes)
        return pb.SetResponse()

    async def Get(self, request: pb.GetRequest, context: _Context) -> pb.GetResponse:
        """Reads a key; waits for it if there is none yet."""
        job, key = self._caller(request.caller), self._key(request.key)
        timeout = self._timeout(request)
        value = job.store.values.get(key)
        try:
            while value is None:  # the key may be deleted again between the wake-up and here
                await job.store.until_there(request.caller.member_id, [key], timeout)
                value = job.store.values.get(key)
        finally:  # that it is missing is an answer, too
            await self._durable(job)
        return pb.GetResponse(value=value)

    async def Add(self, request: pb.AddRequest, context: _Context) -> pb.AddResponse:
        """Adds to an integer."""
        job, key = self._caller(request.caller), self._key(request.key)
        member_id, call = self._repeatable(request)
        total, changes = job.store.values.add(member_id, call, key, request.amount)
        await self._write(job, key, member_id, call, changes)
        return pb.AddResponse(value=total)

    async def CompareSet(self, request: pb.CompareSetRequest, context: _Context) -> pb.CompareSetResponse:
        """Sets a key if it holds the expected value."""
        job, key = self._caller(request.caller), self._key(request.key)
        expected = b"".join(request.expected) if request.expected else None
        if len(expected or b"") > (most := self._settings.max_value_bytes):
            raise LimitMet(f"an expected value has at most {most} bytes, as a value has")
        member_id, call = self._repeatable(request)
        swapped, value, changes = job.store.values.compare_set(
            member_id, call, key, expected, b"".join(request.desired)
        )
        await self._write(job, key, member_id, call, changes)
        return pb.CompareSetResponse(swapped=swapped, value=value)

    async def Wait(self, request: pb.WaitRequest, context: _Context) -> pb.WaitResponse:
        """Waits until all keys exist."""
        job = self._caller(request.caller)
        if len(request.keys) > self._settings.max_wait_keys:
            raise LimitMet(f"a Wait can name at most {self._settings.max_wait_keys} keys, not {len(request.keys)}")
        keys = [self._key(key) for key in request.keys]
        try:
            await job.store.until_there(request.caller.member_id, keys, self._timeout(request))
        finally:
            await self._durable(job)
        return pb.WaitResponse()

    async def Delete(self, request: pb.DeleteRequest, context: _Context) -> pb.DeleteResponse:
        """Deletes a key."""
        job, key = self._caller(request.caller), self._key(request.key)
        member_id, call = self._repeatable(request)
        existed, changes = job.store.values.delete(key, member_id, call)
        await self._write(job, key, member_id, call, changes)
        return pb.DeleteResponse(existed=existed)

    def _caller(self, caller: pb.Caller) -> Job:
        return self._dispatcher.authenticate(caller.job, caller.member_id, caller.session_token)

    def _repeatable(
        self, request: pb.SetRequest | pb.AddRequest | pb.CompareSetRequest | pb.DeleteRequest
    ) -> tuple[str, int]:
        """By what a repeat of a call is recognised: the member, and its number for the call."""
        return request.caller.member_id, check_number(request.call, "call")

    def _key(self, key: str) -> str:
        return wire.check_name(key, "a key", self._settings.max_key_bytes)

    def _timeout(self, request: pb.GetRequest | pb.WaitRequest) -> float:
        if not request.HasField("timeout"):
            raise BadRequest("timeout is required; 0 answers at once")
        return wire.from_duration(request.timeout, "timeout")

    async def _write(self, job: Job, key: str, member_id: str, call: int, changes: list[Change]) -> None:
        values = job.store.values
        if not changes:
            await self._settled(job)
            if not values.is_stored(member_id, call):
                raise OSError("the first try of this call could not be stored")
            return
        stored = job.store.written = self._dispatcher.storage.write(changes)
        stored.add_done_callback(functools.partial(_note, values, member_id, call))  # even if the caller hangs up
        job.store.wake(key)
        try:
            await asyncio.shield(stored)
        finally:  # even if the caller hangs up: the value takes memory until it is on the disk
            await asyncio.wait({stored})

    async def _durable(self, job: Job) -> None:
        """Returns once all that calls have changed so far is durable, or could not be stored."""
        if not self._dispatcher.epoch:  # with an epoch, `ConfirmingInterceptor` waits
            await self._settled(job)

    async def _settled(self, job: Job) -> None:
        written = job.store.written
        if written is not None and not written.done():
            await asyncio.wait({written})


def _note(values: KeyValues, member_id: str, call: int, stored: asyncio.Future[None]) -> None:
    if not stored.cancelled() and isinstance(stored.exception(), OSError):
        values.not_stored(member_id, call)
