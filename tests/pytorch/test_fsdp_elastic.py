"""A torch model that is spread, in `session.steps`: workers come, go and die, and weights are those of one process."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch.fake_device import ON_DEVICE
from pytorch.torch_models import made
from torch import nn
from torch.nn import functional as F
from unit.elastic.resharding import form, reshard, together
from unit.elastic.solo import ENVIRONMENT, fail
from unit.parallel.sharding.models import chosen

import paceline
from paceline._group import Group
from paceline._links.local import local_meshes
from paceline._links.nowhere import NoMesh
from paceline.errors import UnsupportedOp
from paceline.testing import coordinator
from paceline.torch import FSDP
from support.parts import SOON, each
from support.processes import Worker, workers
from support.turns import by_turns

pytestmark = pytest.mark.needs(what="torch")

N, BATCH = 30, 7
SAMPLER = paceline.ElasticSampler(N, global_batch=BATCH)
rng = np.random.default_rng(4)
X, T = torch.from_numpy(rng.standard_normal((N, 5))), torch.from_numpy(rng.integers(0, 3, N))
STRATEGIES = list(paceline.ShardingStrategy)
FULL, HYBRID = paceline.ShardingStrategy.FULL_SHARD, paceline.ShardingStrategy.HYBRID_SHARD

CODE = """
import torch
from torch import nn
from torch.nn import functional as F
from paceline.torch import FSDP

torch.set_num_threads(1)
rng = np.random.default_rng(4)
x, t = torch.from_numpy(rng.standard_normal((30, 5))), torch.from_numpy(rng.integers(0, 3, 30))
emit("ready")
wait_for_go()
with paceline.join() as session:
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model = FSDP(net, session.group, paceline.ShardingStrategy.STRATEGY, NODE, auto_wrap=nn.Linear)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sampler = paceline.ElasticSampler(30, global_batch=7)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    phase, count = None, 0
    try:
        for step in session.steps(state, total=100_000, checkpoint_dir=DIRECTORY):
            with step:
                loss = F.cross_entropy(model(x[step.indices]), t[step.indices])
                optimizer.zero_grad()
                model.backward(loss, step.weight)
                FAULT
                optimizer.step()
            if not step.applied:
                continue
            if phase is None or step.world == (WORLDS[phase + 1] if phase + 1 < len(WORLDS) else 0):
                phase, count = WORLDS.index(step.world) if phase is None else phase + 1, 0
            count += 1
            emit("applied", step=step.number, world=step.world)
            if phase == len(WORLDS) - 1 and count == 3:
                break
    except paceline.Dismissed:
        emit("dismissed")
        raise
    weights = {path: p.tolist() for path, p in model.state_dict().items()}
    kept = sum(p.numel() for p in model.parameters())
    emit("done", steps=state.step, weights=weights, kept=kept)
"""


def network() -> Any:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def train(model: Any, optimizer: Any, indices: Any) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(X[indices]), T[indices]).backward()
    optimizer.step()


def plain(steps: int, seed: int = 0) -> dict[str, Any]:
    """The weights of one process after so many steps."""
    model = made(network, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for number in range(steps):
        train(model, optimizer, SAMPLER.batch(number))
    return dict(model.state_dict())


def code(worlds: list[int], strategy: str, *, node: int | None = None, fault: str = "", directory: str = "") -> str:
    filled = CODE.replace("WORLDS", str(worlds)).replace("STRATEGY", strategy).replace("NODE", str(node))
    # Whoever is rank 0 of the first view gives its values: all who may be are built alike.
    return filled.replace("FAULT", fault or "pass").replace("SEED", "0").replace("DIRECTORY", repr(directory or None))


def until(worker: Worker, event: str, **facts: Any) -> dict[str, Any]:
    """The next event of a kind with such facts, all before it being left out."""
    while True:
        found = worker.expect_any(40.0, event)
        if found["event"] == event and all(found[name] == value for name, value in facts.items()):
            return found


def check(ends: list[dict[str, Any]]) -> None:
    """They hold the same weights, and those of one process."""
    assert len({end["steps"] for end in ends}) == 1
    for end in ends:
        assert end["weights"] == ends[0]["weights"]
    for path, values in plain(ends[0]["steps"]).items():
        np.testing.assert_allclose(ends[0]["weights"][path], values, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("strategy", "node"), [*((strategy, None) for strategy in STRATEGIES), (HYBRID, 1)])
def test_a_world_of_one_retries_failed_steps(strategy: Any, node: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps that fail before their update, and come again."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)
    with paceline.join() as session:
        model = FSDP(made(network), session.group, strategy, node, auto_wrap=nn.Linear)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        state = paceline.TrainState(model=model, optimizer=optimizer)
        attempts = 0
        for step in session.steps(state, total=4):
            with step:
                attempts += 1
                indices = SAMPLER.batch(step.number - 1)
                optimizer.zero_grad()
                with model.no_sync():
                    model.backward(F.cross_entropy(model(X[indices[:3]]), T[indices[:3]]) * 3 / BATCH, 1.0)
                if step.number == 2 and step.attempt < 3:
                    fail(session)
                model.backward(F.cross_entropy(model(X[indices[3:]]), T[indices[3:]]) * 4 / BATCH, 1.0)
                optimizer.step()
        assert attempts == 6
        for path, values in model.state_dict().items():
            np.testing.assert_allclose(values, plain(4)[path], rtol=1e-10, atol=1e-12)


def test_a_train_state_resumes_from_the_state_dict_of_another() -> None:
    """What a checkpoint keeps of a state: loaded by another one, that goes on alike."""
    states = []
    for seed in (0, 1):
        with paceline.join() as session:
            model = FSDP(made(network, seed), session.group, auto_wrap=nn.Linear)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05 + seed)
            state = paceline.TrainState(model=model, optimizer=optimizer)
            if states:
                state.load_state_dict(states[0])
            for number in range(2):
                train(model, optimizer, SAMPLER.batch(2 * len(states) + number))
            states.append(state.state_dict())
            found = model.state_dict()
    for path, values in plain(4).items():
        np.testing.assert_allclose(found[path], values, rtol=1e-10, atol=1e-12)


def test_nadam_is_refused_unless_parameters_are_not_sharded() -> None:
    with paceline.join() as session:
        model = FSDP(made(network), session.group)
        with pytest.raises(UnsupportedOp, match="does not begin with zeros"):
            paceline.TrainState(model=model, optimizer=torch.optim.NAdam(model.parameters()))
        model = FSDP(made(network), session.group, paceline.ShardingStrategy.NO_SHARD)
        optimizer = torch.optim.NAdam(model.parameters())
        state = paceline.TrainState(model=model, optimizer=optimizer)
        for step in session.steps(state, total=2):
            with step:
                train(model, optimizer, np.arange(7))
        assert state.step == 2


class Trainee:
    """One process, as it were; as `unit.elastic.resharding` has them for NumPy."""

    def __init__(self, name: str, group: Group, precision: str | None, seed: int = 0) -> None:
        self.group = group
        self.model = FSDP(
            made(lambda: network().to(torch.float32 if precision else torch.float64), seed),
            group,
            auto_wrap=nn.Linear,
            mixed_precision=precision,
            **chosen(name),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.state = paceline.TrainState(model=self.model, optimizer=self.optimizer)

    def step(self, number: int, rank: int, world: int) -> None:
        indices, weight = SAMPLER.share(number, rank, world)
        self.optimizer.zero_grad()
        y = self.model(X[indices].to(next(self.model.parameters()).dtype))
        self.model.backward(F.cross_entropy(y.to(X.dtype), T[indices]), weight)
        self.optimizer.step()


@pytest.mark.parametrize(
    ("name", "world", "next_world", "precision"),
    by_turns(
        [
            *(("full", *worlds) for worlds in [(1, 2), (2, 3), (3, 2), (2, 4), (4, 2), (3, 1)]),
            *((name, *worlds) for name in ("grad", "none", "hybrid2") for worlds in [(2, 4), (4, 2), (3, 1)]),
        ],
        [(None,), ("bf16",)],
    ),
)
def test_a_state_is_resharded_between_worlds(name: str, world: int, next_world: int, precision: str | None) -> None:
    """Some stay, in another order; some are new, built from other values."""
    if name == "hybrid2":
        world, next_world = 2 * (world // 2) or 2, 2 * (next_world // 2) or 2
    made_now: list[Trainee] = []

    def member(mesh: Any, seed: int) -> Trainee:
        made_now.append(Trainee(name, Group(mesh, SOON), precision, seed))
        return made_now[-1]

    try:
        before = [member(mesh, 0) for mesh in local_meshes(world)]
        form(before, 1)
        for number in range(3):
            together(before, number)
        after = before[::-1][:next_world]
        after += [member(NoMesh("waits"), 9) for _ in range(next_world - len(after))]
        reshard(before, after)
        form(after, 2)
        for number in range(3, 6):
            together(after, number)
            for trainee in after:
                trainee.state._core.keep_updated_shares()
        states = each([trainee.group for trainee in after], lambda group: after[group.rank].model.state_dict())
    finally:
        for trainee in made_now:
            trainee.group.close(0.2)
    for state in states:
        for path, values in plain(6).items():
            if precision is None:
                np.testing.assert_allclose(state[path], values, rtol=1e-8, atol=1e-10)
            else:
                np.testing.assert_allclose(state[path], values, rtol=0.1, atol=0.1)
                assert torch.equal(state[path], states[0][path])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "engine"),
    [
        ("FULL_SHARD", "links"),
        ("FULL_SHARD", "gloo"),
        pytest.param("SHARD_GRAD_OP", "links", marks=pytest.mark.exhaustive),
        pytest.param("SHARD_GRAD_OP", "gloo", marks=pytest.mark.exhaustive),
    ],
)
def test_a_worker_joins_two_and_another_is_drained(strategy: str, engine: str) -> None:
    """With an engine the model is on a device, which is a fake."""
    text = (ON_DEVICE if engine != "links" else "") + code([2, 3, 2], strategy)
    settings = {"MIN_WORKERS": "2", "MAX_WORKERS": "3", "ENGINE": engine}
    with coordinator() as address, workers(3, text, COORDINATOR=address, **settings) as started:
        first, second, newcomer = started
        for worker in started:
            worker.expect("ready", timeout=40.0)
        first.go()
        second.go()
        until(first, "applied", world=2)
        newcomer.go()
        until(newcomer, "applied", world=3)
        second.signal(signal.SIGTERM)
        until(second, "dismissed")
        ends = [until(worker, "done") for worker in (first, newcomer)]
        check(ends)
        total = sum(p.numel() for p in network().parameters())
        assert [end["kept"] < 0.6 * total for end in ends] == [strategy != "NO_SHARD"] * 2


@pytest.mark.slow
def test_survivors_train_on_after_a_kill() -> None:
    fault = "if (step.number, step.rank) == (4, 1): os.kill(os.getpid(), signal.SIGKILL)"
    with (
        coordinator(settle_time=20.0) as address,  # all begin together
        workers(3, code([3, 2], "NO_SHARD", fault=fault), COORDINATOR=address, MIN_WORKERS="2", MAX_WORKERS="3") as w,
    ):
        for worker in w:
            worker.expect("ready", timeout=40.0)
        for worker in w:
            worker.go()
        check([until(worker, "done") for worker in w if worker.wait(60.0) != -signal.SIGKILL])


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ["links", "gloo"])
def test_hybrid_shard_trains_on_after_a_node_loses_a_member(engine: str) -> None:
    fault = "if (step.world, step.rank, count) == (4, 1, 2): os.kill(os.getpid(), signal.SIGKILL)"
    text = code([2, 4, 2], "HYBRID_SHARD", node=2, fault=fault)  # the first view may have two already
    text = (ON_DEVICE if engine != "links" else "") + text
    with (
        ThreadPoolExecutor() as pool,
        coordinator() as address,
        workers(4, text, COORDINATOR=address, MIN_WORKERS="2", MAX_WORKERS="4", ENGINE=engine) as started,
    ):
        for worker in started:
            worker.expect("ready", timeout=50.0)
        for worker in started:
            worker.go()
        # One is killed, and one is a spare then: it waits for another until it is closed.
        told = as_completed([pool.submit(until, worker, "done") for worker in started], timeout=80.0)
        check(list(islice((future.result() for future in told if future.exception() is None), 2)))


@pytest.mark.slow
def test_another_world_resumes_from_the_checkpoint(tmp_path: Path) -> None:
    runs = str(tmp_path / "runs")
    with coordinator() as address:
        with workers(
            2, code([2, 9], "FULL_SHARD", directory=runs), COORDINATOR=address, MIN_WORKERS="2", MAX_WORKERS="2"
        ) as started:
            for worker in started:
                worker.expect("ready", timeout=40.0)
                worker.go()
            until(started[0], "applied", step=3)
            for worker in started:
                worker.signal(signal.SIGTERM)
            for worker in started:
                until(worker, "dismissed")
                worker.wait()
        again = code([3], "SHARD_GRAD_OP", directory=runs)
        with workers(3, again, COORDINATOR=address, MIN_WORKERS="3", MAX_WORKERS="3") as started:
            for worker in started:
                worker.expect("ready", timeout=40.0)
                worker.go()
            assert until(started[0], "applied")["step"] > 3
            check([until(worker, "done") for worker in started])
