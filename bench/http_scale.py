"""Measures the cost of watching a job of 1,000 members: a scrape of its metrics, and its stream to the page.

Run as a script it prints one JSON object. There are no sockets: members are registered with the coordinator's
dispatcher, and send heartbeats between two messages of the stream, so that every member has changed in each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from paceline_protocol import Counters, Progress
from paceline_protocol.coordinator import Heard
from paceline_server.dispatcher import Dispatcher
from paceline_server.services.admin import AdminHandlers
from paceline_server.settings import ServerSettings
from paceline_server.storage.memory import MemoryStorage
from paceline_server.web.metrics import JobCollector
from paceline_server.web.stream import Broadcast
from paceline_server.web.web_limits import USUAL
from pacelinepb import PROTOCOL_VERSION
from pacelinepb.status_json import detail_as_dict
from pacelinepb.v1 import admin_pb2
from pacelinepb.v1 import session_pb2 as pb
from support.coordinator import duration

__all__ = ["measure"]


def measure(members: int = 1_000, rounds: int = 20, viewers: int = 5) -> dict[str, Any]:
    """Measures everything; times in milliseconds."""
    return asyncio.run(_measure(members, rounds, viewers))


async def _measure(members: int, rounds: int, viewers: int) -> dict[str, Any]:
    dispatcher = Dispatcher(ServerSettings(), MemoryStorage())
    await dispatcher.start()
    settings = pb.JobSettings(min_workers=members, max_workers=members, failure_timeout=duration(60.0))
    streams = [
        dispatcher.register(
            pb.Register(
                job="job",
                protocol_version=PROTOCOL_VERSION,
                process=pb.ProcessIdentity(host=f"host-{number // 8}", pid=number),
                address=f"10.0.{number // 250}.{number % 250}:4000",
                settings=settings,
            )
        )
        for number in range(1, members + 1)
    ]
    job = dispatcher.jobs["job"]
    for _ in range(1000):  # the view is stored in some rounds of the loop
        await asyncio.sleep(0)
        if job.membership.state.live is not None:
            break
    step = 0

    def beat() -> float:
        nonlocal step
        step += 1
        now, began = asyncio.get_running_loop().time(), time.perf_counter()
        for number, stream in enumerate(streams):
            counters = Counters(step, 0, 32 * step, {"shm": step * number, "tcp": step}, 0.01 * step)
            dispatcher.apply_of(
                stream, Heard(stream.member_id, Progress(step, now, True, step, now, "all_reduce"), counters)
            )
        return (time.perf_counter() - began) / len(streams)

    admin = AdminHandlers(dispatcher)

    async def build() -> dict[str, Any]:
        return detail_as_dict(await admin.GetJob(admin_pb2.GetJobRequest(job="job")))

    broadcast = Broadcast("job", build)
    queues = [broadcast.join(lambda: None).queue for _ in range(viewers)]
    assert broadcast._task is not None
    broadcast._task.cancel()
    scrapes, messages, beats, sizes = [], [], [], []
    for _ in range(rounds + 1):
        beats.append(beat())
        began = time.perf_counter()
        await broadcast.round()
        messages.append(time.perf_counter() - began)
        sizes += [len(queue.get_nowait() or b"") for queue in queues]
        began = time.perf_counter()
        registry = CollectorRegistry()
        now = asyncio.get_running_loop().time()
        registry.register(JobCollector(dispatcher, now, lambda _: True))
        text = generate_latest(registry)
        scrapes.append(time.perf_counter() - began)
    dispatcher.drain()
    message = statistics.median(messages[1:])
    pause = max(USUAL.interval_s, message / USUAL.share)
    return {
        "members": members,
        "viewers": viewers,
        "scrape_ms": round(1e3 * statistics.median(scrapes), 2),
        "scrape_bytes": len(text),
        "message_ms": round(1e3 * message, 2),
        "message_bytes": sizes[-1],
        "messages_every_s": round(pause, 2),
        "stream_share_of_a_core": round(message / (message + pause), 5),
        "heartbeat_us": round(1e6 * statistics.median(beats), 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    print(json.dumps(measure(given.members, given.rounds)))
