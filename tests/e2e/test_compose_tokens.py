"""What the compose files' coordinators are started with: workers have a token that is good for being a worker."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from paceline_server._grpc import aio
from support.command import command
from support.coordinator import RawSession, reason_of, run

DEPLOY = Path(__file__).parents[2] / "deploy"
TOKENS = {"PACELINE_TOKEN": "the-token-of-the-operator", "WORKER_TOKEN": "the-token-of-the-workers"}


def services(file: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / file).read_text())["services"]
    return found


def environment_of(service: dict[str, Any]) -> dict[str, str]:
    """The variables of a service as Compose fills them in, with the tokens."""
    given = service["environment"].items()
    return {name: re.sub(r"\$\{(\w+):.*\}", lambda found: TOKENS[found[1]], str(value)) for name, value in given}


@contextmanager
def coordinator(folder: Path) -> Iterator[str]:
    """What the compose file's coordinator runs, here; its address."""
    service = services("compose.yaml")["coordinator"]
    (folder / "paceline").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m paceline "$@"\n')
    (folder / "paceline").chmod(0o700)
    words = [*service["entrypoint"], *shlex.split(service["command"])]
    here = {"$$": "$", "/tmp": str(folder), "/var/lib/paceline": str(folder)}
    here |= {"0.0.0.0:7400": "127.0.0.1:0", "0.0.0.0:7401": "127.0.0.1:0"}
    for there, own in here.items():
        words = [word.replace(there, own) for word in words]
    environment = {**os.environ, **environment_of(service), "PATH": f"{folder}:{os.environ['PATH']}"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
    try:
        while not (found := re.search(r"listens on (127\.0\.0\.1:\d+)", (folder / "log").read_text())):
            assert process.poll() is None, (folder / "log").read_text()
        yield found[1]
    finally:
        process.kill()
        process.wait()


def test_a_workers_token_allows_only_to_join_its_own_job(tmp_path: Path) -> None:
    worker = environment_of(services("compose.yaml")["worker"])["PACELINE_TOKEN"]

    async def join(address: str, job: str) -> str:
        async with aio.insecure_channel(address) as channel:
            try:
                session = await RawSession.register(channel, job, token=worker)
            except aio.AioRpcError as error:
                return reason_of(error)
            await session.leave()
        return "joined"

    with coordinator(tmp_path) as address:
        assert (tmp_path / "tokens").stat().st_mode & 0o777 == 0o600
        assert run(lambda: join(address, "digits")) == "joined"
        assert run(lambda: join(address, "other")) == "PERMISSION_DENIED"
        where = ("--coordinator", address)
        with command("status", *where, PACELINE_TOKEN=worker) as status:
            assert status.wait() == 0, str(status)
        with command("restart", "digits", "--forget", *where, PACELINE_TOKEN=worker) as refused:
            assert refused.wait() == 1
            assert "the role 'worker', and this call needs 'operator'" in refused.stderr
        with command("restart", "digits", "--forget", *where, PACELINE_TOKEN=TOKENS["PACELINE_TOKEN"]) as operator:
            assert operator.wait() == 1
            assert "there is no job 'digits'" in operator.stderr


def test_both_coordinators_have_the_same_entrypoint_and_environment() -> None:
    one, other = services("compose.yaml")["coordinator"], services("compose.etcd.yaml")["coordinator-b"]
    assert one["entrypoint"] == other["entrypoint"]
    assert one["environment"] == other["environment"]
