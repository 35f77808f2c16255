"""Answers an operator's questions to a member: its flight record, stacks or last lines, while training continues.

An answer is JSON of at most `MAX_ANSWER_BYTES`. It has `read_at` and `sent_at`, the times on this host's clock at which
the question was read and the answer was sent, in seconds since 1970.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline._base.activity import FlightRecorder
from paceline._base.proofs import DoorKey
from paceline._base.rpc import aio, is_transient
from paceline._session.control import ControlStream
from paceline._session.flight import flight_head
from paceline._session.output_file import own_output
from paceline._session.stack_file import own_stacks, stacks_by_signal, trouble_here
from pacelinepb import MOST_PIDS
from pacelinepb.pieces import cut, in_messages
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1.session_pb2_grpc import SessionServiceStub

MAX_ANSWER_BYTES = 1_000_000

_TIMEOUT_S = 60.0
"""Seconds for the call, which lasts until the operator has the answer; then nobody waits for it any more."""

_log = logging.getLogger("paceline.session")


async def answer_question(
    asked: pb.Asked, control: ControlStream, job: str, record: Callable[[], Mapping[str, Any]], door_key: DoorKey
) -> None:
    """Answers a question. What fails here is logged and has no other effect."""
    read_at = time.time()
    try:
        if asked.what == pb.QUESTION_RECORDS:
            data = record_answer(record(), read_at)
        elif asked.what == pb.QUESTION_STACKS:
            data = await stacks_answer(tuple(asked.pids), read_at, door_key)
        elif asked.what == pb.QUESTION_OUTPUT:
            data = output_answer(os.environ, read_at)
        else:  # of a newer coordinator
            return
        registered = control.registered
        assert registered is not None
        request = pb.AnswerAskRequest(
            job=job,
            member_id=registered.member_id,
            session_token=registered.session_token,
            ask=asked.ask,
            data=cut(data),
        )
        stub = SessionServiceStub(control.channel.newest)
        await stub.AnswerAsk(iter(in_messages(request)), timeout=_TIMEOUT_S)
    except aio.AioRpcError as error:
        level = logging.DEBUG if is_transient(error) else logging.INFO
        _log.log(level, "job %r: the answer to an operator was not taken: %s", job, error.details())
    except Exception:  # noqa: BLE001  whatever it is, a question must not end training
        _log.exception("job %r: a question of an operator could not be answered", job)


def record_answer(record: Mapping[str, Any], read_at: float) -> bytes:
    """Returns a flight record, with its head, as an answer; if it is too long, without its oldest operations."""
    head = {**record, "operations": [], "read_at": read_at, "sent_at": time.time()}
    room = MAX_ANSWER_BYTES - len(json.dumps(head, default=str)) - 64
    kept: list[str] = []
    operations = record["operations"]
    for operation in reversed(operations):
        text = json.dumps(operation, default=str)
        room -= len(text) + 2
        if room < 0:
            break
        kept.append(text)
    del head["operations"]
    head["left_out"] = len(operations) - len(kept)
    return f'{json.dumps(head, default=str)[:-1]}, "operations": [{", ".join(reversed(kept))}]}}'.encode()


def output_answer(environment: Mapping[str, str], read_at: float) -> bytes:
    """Returns the last lines that this process has printed as an answer, or why they are not known."""
    lines, trouble = own_output(environment)
    return json.dumps({"lines": lines, "trouble": trouble, "read_at": read_at, "sent_at": time.time()}).encode()


async def stacks_answer(pids: tuple[int, ...], read_at: float, door_key: DoorKey) -> bytes:
    """Returns this process's own stacks as an answer, or by a signal those that other members of this host write."""
    stacks = await _of_others(pids, door_key) if pids else [_own()]
    room = MAX_ANSWER_BYTES // 4 // len(stacks)  # a byte may take more in JSON
    for each in stacks:
        each["text"] = each["text"][:room]
    answer = {"host": socket.gethostname(), "stacks": stacks, "read_at": read_at, "sent_at": time.time()}
    return json.dumps(answer).encode()


async def _of_others(pids: tuple[int, ...], door_key: DoorKey) -> list[dict[str, Any]]:
    """Signals all at the same time: where a whole host hangs, each takes half a second, and the operator waits 5."""
    pool = ThreadPoolExecutor(min(len(pids), MOST_PIDS), "paceline-stacks")  # asyncio's own has few threads
    try:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(pool, _of_other, pid, door_key) for pid in pids))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _own() -> dict[str, Any]:
    return {"pid": os.getpid(), "text": own_stacks(), "trouble": "", "by_signal": trouble_here()}


def _of_other(pid: int, door_key: DoorKey) -> dict[str, Any]:
    if pid == os.getpid():
        return _own()
    try:
        return {"pid": pid, "text": stacks_by_signal(pid, door_key), "trouble": ""}
    except OSError as error:
        return {"pid": pid, "text": "", "trouble": error.strerror or str(error)}


def whole_record(recorder: FlightRecorder | None, described: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a member's flight record; without a recorder the record of a worker which is in no view yet."""
    nothing: dict[str, Any] = {"groups": {}, "steps": [], "operations": []}
    head = flight_head(described, os.getpid(), "an operator asked")
    return {**head, **(nothing if recorder is None else recorder.record())}
