"""What Python shows of Paceline's objects and modules: short, and never a secret."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline._elastic.session import CoordinatedSession, Session, SoloSession
from paceline._group import Group
from paceline._links.nowhere import NoMesh
from paceline.config import Config
from paceline.errors import PeerLost
from paceline.testing import local_groups, next_generation, run_groups
from paceline_protocol import OURS, JobSettings, Process, Seat, View
from pacelinepb import install_command

ROOT = Path(__file__).parents[3]

SECRET = "c0ffee-is-a-secret"

HELP = """
import importlib, pkgutil, pydoc, sys
shown, without = [], {"torch", "mpi4py", "matplotlib", "cryptography", "aiohttp", "prometheus_client", "sklearn"}
for package in ("paceline", "paceline_server", "paceline_protocol", "pacelinepb"):
    for info in [None, *pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")]:
        name = info.name if info else package
        if name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            assert (error.name or "").partition(".")[0] in without, error
            continue
        text = pydoc.plain(pydoc.render_doc(module))
        assert %r not in text, f"help({name}) shows a token"
        shown.append(name)
print(len(shown), *shown)
"""


def test_help_does_not_show_the_token() -> None:
    code = HELP % SECRET
    environment = {**os.environ, "PACELINE_TOKEN": SECRET}
    # torch, where it is there, is no part of this: its import alone takes seconds.
    block = "import sys; sys.modules['torch'] = None\n"
    done = subprocess.run([sys.executable, "-c", block + code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, *names = done.stdout.split()
    assert int(count) > 100
    assert {"paceline", "paceline.config", "paceline.credentials"} <= set(names)


def test_pip_install_hints_use_the_git_address() -> None:
    """Paceline is on no package index yet: `pip install paceline` would fetch nothing, or something else."""
    assert install_command("tls") == 'pip install "paceline[tls] @ git+https://github.com/paceline/paceline"'
    wrong = []
    for folder in ("client", "integrations", "server", "protocol", "protos", "examples", "deploy"):
        for file in (ROOT / folder).rglob("*.py"):
            for found in re.findall(r"pip install ['\"]?paceline\b.*", file.read_text()):
                if " @ git+https://" not in found:
                    wrong.append(f"{file.relative_to(ROOT)}: {found}")
    assert not wrong


def test_from_environment_reads_the_environment_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CALL_TIMEOUT", "7")
    monkeypatch.setenv("PACELINE_TOKEN", SECRET)
    assert Config.from_environment().call_timeout == 7
    assert Config.from_environment({}).call_timeout == Config().call_timeout
    found = paceline.Credentials.from_environment()
    assert found.token is not None
    assert SECRET not in repr(found)
    assert paceline.Credentials.from_environment({}).token is None


def test_session_repr_shows_rank_job_and_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", SECRET)
    session = SoloSession("digits", Config())
    assert repr(session) == f"<Session rank 0 of 1, job 'digits', generation {session.generation}>"
    session.leave()
    assert repr(session) == f"<Session closed, job 'digits', generation {session.generation}>"


def test_repr_of_a_waiting_or_unjoined_session_shows_its_state() -> None:
    waits: Session = object.__new__(SoloSession)
    assert repr(waits) == "<Session not joined, job ''>"
    waits.job, waits.group = "digits", Group(NoMesh("waits"), Config())
    assert repr(waits) == "<Session in no view, job 'digits'>"
    assert not waits._asked_early, "looking at a session is not the same as asking for its rank"
    assert repr(object.__new__(CoordinatedSession)) == "<Session not joined, job ''>"


def test_group_repr_shows_its_rank_and_part_repr_its_members() -> None:
    groups = local_groups(3)
    assert repr(groups[1]) == f"<Group rank 1 of 3, generation {groups[1].generation}>"
    part = groups[2].subgroup([0, 2])
    assert repr(part) == f"<Group rank 1 of 2 (ranks 0, 2 of the view), generation {part.generation}>"
    next_generation(groups)
    assert repr(part).endswith(", stale>")
    for group in groups:
        group.close()
    assert "rank 1 of 3" in repr(groups[1])
    assert repr(Group(NoMesh("waits"), Config())) == "<Group in no view>"
    assert repr(object.__new__(Group)) == "<Group in no view>"


def test_repr_of_a_large_part_shows_only_its_first_ranks() -> None:
    groups = local_groups(12)
    part = groups[0].subgroup(range(11))
    assert "rank 0 of 11 (ranks 0, 1, 2, 3, 4, 5, 6, 7, ... of the view)" in repr(part)
    for group in groups:
        group.close()


def test_work_repr_shows_the_state_of_the_operation() -> None:
    (group,) = local_groups(1)
    begun, go_on = threading.Event(), threading.Event()

    def divisor() -> float:
        begun.set()
        go_on.wait(10)
        return 1.0

    work = group.all_reduce(np.ones(3), divisor=divisor, async_op=True)
    assert begun.wait(10)
    assert repr(work) == f"<Work operation {work.operation}, not done>"
    go_on.set()
    work.wait()
    assert repr(work) == f"<Work operation {work.operation}, done>"
    work._error = PeerLost("rank 1 was lost")
    assert repr(work) == f"<Work operation {work.operation}, failed: PeerLost>"
    group.close()


def test_view_repr_shows_only_generation_and_size() -> None:
    token = bytes(range(32))
    seat = Seat(0, "7", Process("host-a", 11, "node", 5), "host-a:1", token, 1)
    view = View(3, JobSettings(1, 4, 3.0), explicit=False, seats=(seat,), versions=OURS)
    assert repr(view) == "<View generation 3, 1 member>"


def test_ranks_may_mix_avg_and_mean_as_one_op() -> None:
    def call(group: Group) -> list[object]:
        op = "avg" if group.rank else "mean"  # ranks must agree on an operation; its two names are the same
        mine = np.full((2,), group.rank + 1.0, np.float32)
        reduced = group.reduce(mine, op=op)
        return [
            group.all_reduce(mine, op=op).tolist(),
            None if reduced is None else reduced.tolist(),
            group.reduce_scatter(mine, op=op).tolist(),
            group.all_reduce_compressed(mine, "bf16", op=op).tolist(),
        ]

    assert run_groups(local_groups(2), call) == [
        [[1.5, 1.5], [1.5, 1.5], [1.5], [1.5, 1.5]],
        [[1.5, 1.5], None, [1.5], [1.5, 1.5]],
    ]


def test_optimizer_sampler_and_state_reprs_are_one_line() -> None:
    optimizer = paceline.optim.SGD(paceline.nn.Linear(2, 2, rng=np.random.default_rng(0)), lr=0.1)
    sampler = paceline.ElasticSampler(12, 6, 0)
    assert repr(optimizer).startswith("SGD(lr=0.1, momentum=0.0, ")
    assert repr(sampler) == "ElasticSampler(n=12, global_batch=6, seed=0)"
    assert repr(paceline.TrainState(optimizer=optimizer, sampler=sampler)) == "TrainState(optimizer, sampler; step 0)"
