"""A worker for tests of local training in elastic jobs: `support.elastic.trainer` with rounds in place of steps.

    python trainer.py '{"total": 8, "method": "DiLoCo", "inner_steps": 3, ...}'

The same lines; `undone` and `applied` tell how many inner steps were made, `done` the net's own parameters too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # tests/, for `support`

from pytorch.local_training.problem import build, flat, inner_step, make_inner

import paceline
import paceline.torch
from support.elastic.faults import Fault, inflict
from support.elastic.problem import BATCH, SAMPLES
from support.elastic.trainer import digest, emit, numbers


def main() -> None:
    """Joins and trains."""
    plan = json.loads(sys.argv[1])
    faults = [Fault(**fault) for fault in plan["faults"]]
    inflict(faults, emit)
    net = build(plan["model_seed"])
    inner = make_inner(net)
    emit("ready")
    sys.stdin.readline()
    with paceline.join(timeout=plan["join_timeout"]) as session:
        group = session.group  # a newcomer has no rank yet
        emit("joined", rank=group.rank, size=group.size, generation=session.generation, pid=os.getpid())
        method = getattr(paceline.torch, plan["method"])
        local = method(net, inner, session.group, compression=plan.get("compression"))
        sampler = paceline.ElasticSampler(SAMPLES, global_batch=BATCH)
        state = paceline.TrainState(model=local, sampler=sampler)
        session.on_view(lambda: emit("view", generation=session.generation, rank=session.rank, size=session.size))
        now: list[Any] = [None]

        def strike(phase: str) -> None:
            for fault in faults:
                fault.in_step(now[0], phase)

        update = local.outer_optimizer.step

        def in_update() -> None:
            strike("in_update")
            update()

        local.outer_optimizer.step = in_update
        try:
            for step in session.steps(
                state,
                total=plan["total"],
                checkpoint_dir=plan.get("checkpoint_dir"),
                checkpoint_every=plan.get("checkpoint_every"),
            ):
                now[0] = step
                facts = {"generation": step.generation, "step": step.number, "rank": step.rank}
                made = 0
                with step:
                    used = step.indices.tolist() if step.weight else []
                    batches = [batch.tolist() for batch in local.batches(step.indices, plan["inner_steps"])]
                    emit("attempt", **facts, indices=used, batches=batches, weight=step.weight)
                    for batch in batches:
                        inner_step(net, inner, batch)
                        made += 1
                        strike("mid_round")
                        if plan.get("pace"):
                            time.sleep(plan["pace"])  # the computation of a real model
                    local.outer_step(step.weight)
                    strike("behind_gate")
                emit("applied" if step.applied else "undone", **facts, made=made, cause=str(step.cause))
                if plan.get("wait_at") == step.number and step.applied:
                    sys.stdin.readline()  # for others, who take their time to import torch
        except paceline.Dismissed as end:
            emit("dismissed", reason=end.reason, step=state.step)
            raise
        found = state._core.large()
        emit("done", step=state.step, digest=digest(found), weights=numbers(found), net=flat(net).tolist())


if __name__ == "__main__":
    try:
        main()
    except paceline.PacelineError as error:
        emit("error", type=type(error).__name__, text=str(error), ranks=list(error.ranks))
        raise SystemExit(3) from error
