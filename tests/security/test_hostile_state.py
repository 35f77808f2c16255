"""A record of the shared state that makes no sense is refused by name, or harms no other job."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from paceline_protocol import Ending, Tag, Verdict
from paceline_server.storage.base import (
    AnswerKept,
    EndingStored,
    FinishedStored,
    ReachedStored,
    StateUnusable,
    VerdictStored,
    ViewFormed,
)
from pacelinepb.v1 import admin_pb2 as pb
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import run, running
from support.shared_keys import Node, next_leader
from support.views import view

HOSTILE = (None, True, -1, 3, 0.5, 1 << 63, 10**400, float("nan"), "", "x", [], [0], [7], {}, {"0": 0}, {"7": None})


async def honest_state() -> Node:
    """A job of which each record is there, with all its fields, and another one."""
    node = Node()
    storage = next_leader(node)
    await storage.load()
    formed = replace(view(3), base=Tag(2, 40), newcomers=(1,), manifest=b"\1", lost="5 steps")
    verdict = Verdict(3, ErrorReason.ERROR_REASON_PEER_LOST, (0, 1), 9, "rank 0 died")
    ending = EndingStored("a", 3, 1, Ending("left the job", orderly=True))
    more = [ending, FinishedStored("a", 7), ReachedStored("a", 6), VerdictStored("a", verdict)]
    more += [AnswerKept("a", "m", slot, slot + 16, -slot) for slot in range(3)]
    await storage.write([ViewFormed("other", view(1)), ViewFormed("a", formed, b"secret"), *more])
    await storage.close()
    return node


def variants(record: Any) -> Iterator[Any]:
    """A record with one value replaced, added or gone, at any depth."""
    yield from HOSTILE
    for key in range(len(record)) if isinstance(record, list) else list(record) if isinstance(record, dict) else ():
        for value in variants(record[key]):
            changed = record.copy()
            changed[key] = value
            yield changed
        changed = record.copy()
        del changed[key]
        yield changed
    if isinstance(record, dict):
        yield record | {"9": 9}


@pytest.mark.parametrize("kind", ["head", "view", "endings", "key/answers/m"])
def test_an_invalid_record_is_refused_or_harms_no_other_job(kind: str) -> None:
    async def main() -> None:
        node = await honest_state()
        key = f"p/jobs/a/{kind}".encode()
        honest = node.items[key]
        record = json.loads(zlib.decompress(honest.value))
        refused, harmless = list[str](), []
        for changed in variants(record):
            node.items[key] = replace(honest, value=zlib.compress(json.dumps(changed).encode()))
            storage = next_leader(node)
            try:
                await storage.load()
                harmless.append(changed)
            except StateUnusable as error:
                refused.append(str(error))
            await storage.close()
        assert len(refused) > 50
        assert [said for said in refused if "job 'a'" not in said and f"p/jobs/a/{kind}" not in said] == []
        assert harmless
        for changed in harmless:
            node.items[key] = replace(honest, value=zlib.compress(json.dumps(changed).encode()))
            async with running(next_leader(node), restart_after=None) as channel:
                admin = AdminServiceStub(channel)
                assert [job.name for job in (await admin.ListJobs(pb.ListJobsRequest())).jobs] == ["a", "other"], (
                    changed
                )
                for name in ("a", "other"):
                    await admin.GetJob(pb.GetJobRequest(job=name))

    run(main)
