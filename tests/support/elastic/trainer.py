"""A worker for tests of elastic training, run as a script: trains a small model and tells of it in lines of JSON.

    python trainer.py '{"total": 8, ...}'

Lines: joined, view, attempt (what this rank is about to use: generation, step, indices), loss (of those samples, by
their share of the batch), applied, undone, committed, fault (just before one is inflicted), done (digest of the
weights), dismissed, error.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # tests/, for `support`

import paceline
from paceline._elastic import saver
from paceline.checkpoint.tree import split_shards
from support.elastic.brake import Brake
from support.elastic.faults import Fault, inflict, take_nothing
from support.elastic.problem import BATCH, SAMPLES, build, data

_lock = threading.Lock()


def emit(event: str, **facts: Any) -> None:
    """One line; whole even if the process is killed right after."""
    with _lock:
        os.write(1, (json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n").encode())


def main() -> None:
    """Joins and trains."""
    plan = json.loads(sys.argv[1])
    if plan.get("log"):
        import logging

        logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s %(message)s")
    faults = [Fault(**fault) for fault in plan["faults"]]
    inflict(faults, emit)
    if "visible_s" in plan:
        saver.VISIBLE_S = plan["visible_s"]
    if plan.get("takes_nothing"):
        take_nothing()
    x, t = data()
    brake = Brake(Path(plan["brake"]))
    if plan["wrapper"] == "torch":
        from support.elastic import torch_problem
    emit("ready")
    sys.stdin.readline()  # all that are started together knock together
    with ExitStack() as stack, paceline.join(timeout=plan["join_timeout"]) as session:
        group = session.group  # a newcomer has no rank yet
        emit("joined", rank=group.rank, size=group.size, generation=session.generation, pid=os.getpid())
        seed, hidden, bucket_mb = (
            plan.get("model_seed", os.getpid()),
            plan.get("hidden", 16),
            plan.get("bucket_mb"),
        )
        problem: Any = None
        if plan["wrapper"] == "torch":
            problem = torch_problem.TorchProblem(seed, hidden, session.group, bucket_mb)
            trained, optimizer, parts = problem.model, problem.optimizer, {"schedule": problem.schedule}
            if "data_workers" in plan:
                stack.enter_context(problem.load(plan["data_workers"]))
            if "stream_workers" in plan:
                parts["data"] = stack.enter_context(
                    problem.stream(plan["stream_workers"], plan.get("stream_shards", 0))
                )
        else:
            model = build(seed, hidden)
            wrapped = wrap(plan["wrapper"], model, session, bucket_mb, plan.get("redundancy"))
            trained = model if plan["wrapper"] == "ddp" else wrapped
            optimizer, parts = paceline.optim.Adam(trained, lr=0.01), {}
        if "data" not in parts:
            parts["sampler"] = paceline.ElasticSampler(
                SAMPLES, global_batch=plan.get("batch", BATCH), seed=plan.get("sampler_seed", 0)
            )
        state = paceline.TrainState(model=trained, optimizer=optimizer, notes={"seen": np.zeros(1)}, **parts)
        session.on_view(lambda: emit("view", generation=session.generation, rank=session.rank, size=session.size))
        session.on_commit(lambda number: emit("committed", step=number))

        def waits(number: int) -> bool:
            """Whether a checkpoint is being written that a fault waits for."""
            return number > plan.get("checkpoint_every", number) and any(map(Fault.waits_for_checkpoint, faults))

        try:
            for step in session.steps(
                state,
                total=plan["total"],
                checkpoint_dir=plan.get("checkpoint_dir"),
                checkpoint_every=plan.get("checkpoint_every"),
            ):
                with step:
                    for fault in faults:
                        fault.in_step(step, "loading")
                    if problem is not None:
                        batch, used = problem.batch(step)
                    else:
                        batch, used = (x[step.indices], t[step.indices]), step.indices.tolist()
                    used = used if step.weight else []
                    emit("attempt", generation=step.generation, step=step.number, rank=step.rank, indices=used)
                    if (step.number, step.generation) == (plan.get("barrier_in"), 2):
                        session.group.barrier()  # all are in this step
                    for fault in faults:
                        fault.in_step(step, "forward")
                    if plan.get("pace"):
                        brake.compute(plan["pace"], lambda number=step.number: waits(number))
                    if problem is not None:
                        loss = problem.loss(*batch)
                    else:
                        y = wrapped(batch[0])
                        loss, dy = paceline.nn.softmax_cross_entropy(y, batch[1])
                    emit("loss", generation=step.generation, step=step.number, value=float(loss) * step.weight)
                    optimizer.zero_grad()
                    if problem is not None:
                        loss.backward()
                    else:
                        wrapped.backward(dy, step.weight)
                    for fault in faults:
                        fault.in_step(step, "before_gate")
                    optimizer.step()
                    if problem is not None:
                        problem.schedule.step()
                    for fault in faults:
                        fault.in_step(step, "behind_gate")
                if step.applied:
                    state_notes = state.step
                    emit("applied", generation=step.generation, step=step.number, noted=state_notes)
                else:
                    emit("undone", generation=step.generation, step=step.number, cause=str(step.cause))
                for fault in faults:
                    fault.in_step(step, "between_steps")
                if plan.get("leave_at") == step.number and step.applied:
                    session.leave()
                    break
                if plan.get("evaluate"):
                    for attempt in session.retry():
                        with attempt:
                            total = session.group.all_reduce(np.ones(1))
                    assert total[0] == session.size
        except paceline.Dismissed as end:
            found = [] if state._core.is_sharded else large(state, problem)
            emit("dismissed", reason=end.reason, step=state.step, digest=digest(found), weights=numbers(found))
            raise
        found = whole(state, session.group) if state._core.is_sharded else large(state, problem)
        values = numbers(found) if plan.get("hidden", 16) <= 16 else []
        emit("done", step=state.step, generation=session.generation, digest=digest(found), weights=values)


def wrap(kind: str, model: Any, session: Any, bucket_mb: float | None, redundancy: int | None = None) -> Any:
    """The model as the plan has it."""
    if kind == "ddp":
        return paceline.DDP(model, session.group, bucket_mb=bucket_mb)
    strategy = paceline.ShardingStrategy[kind.upper()]
    size = 2 if strategy is paceline.ShardingStrategy.HYBRID_SHARD else None
    first, second, third = model.modules
    first = paceline.FSDP(first, session.group, strategy, size)
    model = paceline.nn.Sequential(first, second, third)
    return paceline.FSDP(model, session.group, strategy, size, redundancy=redundancy)


def large(state: Any, problem: Any) -> list[Any]:
    """All large state, as the NumPy problem has it."""
    found: list[Any] = state._core.large() if problem is None else problem.large()
    return found


def whole(state: Any, group: Any) -> list[Any]:
    """All large state of which this rank has a part, in the order of `StateCore.large`. A collective."""
    _, leaves = split_shards({name: part["arrays"] for name, part in state._core.content()["parts"].items()})
    found = []
    for leaf in leaves.values():
        pieces = group.all_gather_object((leaf.start, leaf.values.reshape(-1)))
        array = np.full(leaf.shape, np.nan)
        for start, values in pieces:
            array.reshape(-1)[start : start + values.size] = values
        found.append(array)
    return found


def digest(arrays: Any) -> str:
    """Of all large state."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def numbers(arrays: Any) -> list[float]:
    """All large state as numbers."""
    return [float(value) for array in arrays for value in array.reshape(-1)]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except paceline.PacelineError as error:
        emit("error", type=type(error).__name__, text=str(error), ranks=list(error.ranks))
        raise SystemExit(3) from error
    except ValueError as error:
        emit("error", type="ValueError", text=str(error), ranks=[])
        raise SystemExit(4) from error
