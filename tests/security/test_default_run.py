"""A default `paceline run` on a machine with other users: they are refused, and its own user needs no flag."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.command import Command, command

SCRIPT = """
import signal, paceline
with paceline.join() as session:
    print("joined")
    signal.pause()
"""

ATTACK = """
import json, os, sys
import grpc
from paceline.launch._own_coordinator import own_addresses, own_token
from pacelinepb.v1 import admin_pb2, session_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from pacelinepb.v1.session_pb2_grpc import SessionServiceStub

address, folder, launcher, user = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
said = {"address": own_addresses(), "token": own_token(address)}
for path in (f"{folder}/{address}", f"/proc/{launcher}/environ"):
    try:
        open(path).close()
    except PermissionError:
        said[os.path.basename(path)] = "refused"
with grpc.insecure_channel(address) as channel:
    admin, session = AdminServiceStub(channel), SessionServiceStub(channel)
    member = session_pb2.SessionRequest(register=session_pb2.Register(job="default"))
    for name, call in {
        "ListJobs": lambda: admin.ListJobs(admin_pb2.ListJobsRequest(), timeout=10),
        "GetJob": lambda: admin.GetJob(admin_pb2.GetJobRequest(job="default"), timeout=10),
        "RestartJob": lambda: admin.RestartJob(admin_pb2.RestartJobRequest(job="default"), timeout=10),
        "DrainMembers": lambda: admin.DrainMembers(admin_pb2.DrainMembersRequest(job="default"), timeout=10),
        "register": lambda: next(session.Session(iter([member]), timeout=10)),
    }.items():
        try:
            call()
        except grpc.RpcError as error:
            said[name] = error.code().name
        else:
            said[name] = "served"
print(json.dumps(said))
"""

REFUSED = dict.fromkeys(("ListJobs", "GetJob", "RestartJob", "DrainMembers", "register"), "UNAUTHENTICATED")


@dataclass(frozen=True)
class Run:
    """A run that trains, with its temporary files in a folder that all users may write to, as /tmp is."""

    command: Command
    temporary: Path

    @property
    def folder(self) -> Path:
        return self.temporary / f"paceline-{os.geteuid()}" / "coordinators"

    @property
    def address(self) -> str:
        (path,) = self.folder.iterdir()
        return path.name

    @property
    def token(self) -> str:
        return (self.folder / self.address).read_text()

    def asks(self, *arguments: str) -> Command:
        with command(*arguments, TMPDIR=str(self.temporary)) as asked:
            asked.wait()
        return asked

    def attack(self, temporary: Path, user: int = 0) -> dict[str, object]:
        arguments = [self.address, str(self.folder), str(self.command.process.pid), str(user)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
        said = subprocess.run(
            [sys.executable, "-c", ATTACK, *arguments],
            env=environment | {"TMPDIR": str(temporary)}, stdout=subprocess.PIPE, text=True, timeout=40, check=True,
        ).stdout  # fmt: skip
        found: dict[str, object] = json.loads(said)
        return found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    temporary = Path(f"/tmp/paceline-test-{os.getpid()}")  # `tmp_path` lets nobody else in
    temporary.mkdir()
    temporary.chmod(0o1777)
    try:
        with command("run", "-n", "2", str(script), TMPDIR=str(temporary)) as running:
            running.wait_for("joined", 2)
            yield Run(running, temporary)
    finally:
        shutil.rmtree(temporary)


def test_a_run_accepts_only_callers_with_its_token(run: Run, tmp_path: Path) -> None:
    """As the same user, who does not look where the token is; nothing that others can see has it."""
    token, path = run.token, run.folder / run.address
    assert run.attack(tmp_path).items() >= (REFUSED | {"token": None, "address": []}).items()
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(run.folder.stat().st_mode)) == (0o600, 0o700)

    status = run.asks("status", "--json")
    assert [job["world_size"] for job in json.loads(status.stdout)["jobs"]] == [2]
    assert run.asks("status", "--coordinator", run.address, "default").process.returncode == 0
    (run.temporary / "other.py").write_text("import paceline\nwith paceline.join(): print('in')")
    joined = run.asks("run", "--coordinator", run.address, "--job", "two", str(run.temporary / "other.py"))
    assert joined.process.returncode == 0, str(joined)
    restart = run.asks("restart", "default")
    assert "job 'default' is running" in restart.stderr
    drain = run.asks("drain", "default", "--all")
    assert drain.stdout.count("was told to leave") == 2

    children = Path(f"/proc/{run.command.process.pid}/task/{run.command.process.pid}/children").read_text().split()
    assert len(children) == 2
    for pid in (str(run.command.process.pid), *children):
        assert token not in Path(f"/proc/{pid}/cmdline").read_text()
        if pid in children:
            assert f"PACELINE_TOKEN={token}\0" in Path(f"/proc/{pid}/environ").read_text()
    run.command.signal(signal.SIGTERM)
    run.command.wait()
    assert not path.exists()
    assert not any(token in str(said) for said in (run.command, status, joined, restart, drain))


@pytest.mark.needs(what="root")
def test_another_user_is_refused(run: Run) -> None:
    if os.geteuid() != 0:
        pytest.skip("another user takes root")
    nothing = REFUSED | {"address": [], "token": None, run.address: "refused", "environ": "refused"}
    assert run.attack(run.temporary, user=65534) == nothing
    # The same attack as the run's own user finds the token, so it is not the attack that fails.
    assert run.attack(run.temporary) == REFUSED | {"address": [run.address], "token": run.token}
    assert [job["phase"] for job in json.loads(run.asks("status", "--json").stdout)["jobs"]] == ["running"]


def test_a_token_from_the_environment_is_written_to_no_file(tmp_path: Path) -> None:
    """It is in no file, and `paceline status` finds the run by the same one."""
    script = tmp_path / "script.py"
    environment = {"TMPDIR": str(tmp_path), "PACELINE_TOKEN": "a-token-of-the-users"}
    script.write_text("import os; print('has', os.environ['PACELINE_TOKEN'])\n" + SCRIPT)
    with command("run", str(script), **environment) as ran:
        ran.wait_for("joined")
        (left,) = (tmp_path / f"paceline-{os.geteuid()}" / "coordinators").iterdir()
        assert left.read_text() == ""
        with command("status", "--json", **environment) as status:
            assert status.wait() == 0, str(status)
    assert "has a-token-of-the-users" in ran.stdout
