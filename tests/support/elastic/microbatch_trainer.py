"""A worker that trains in microbatches, run as a script; tells the digest of its whole state.

    python microbatch_trainer.py '{"model": "mlp", "total": 8, ...}'

Lines: as those of trainer.py; "done" has the digest, and so has "applied" unless the state is sharded, of which a line
"digest" tells it now and then.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # tests/, for `support`

import numpy as np

import paceline
from support.elastic.brake import Brake
from support.elastic.faults import Fault, inflict
from support.elastic.microbatch_problem import problem_of

OLD = not hasattr(paceline.Step, "microbatches")
"""True in a worker of the last release, which called them parts (tests/upgrade)."""


def emit(event: str, **facts: Any) -> None:
    """One line; whole even if the process is killed right after."""
    os.write(1, (json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n").encode())


def samples_of(sampler: Any, number: int) -> list[int]:
    """The samples of a microbatch."""
    indices, weight = (sampler.current_part if OLD else sampler.current_microbatch)(number)
    return indices.tolist() if weight else []


def send_bad_rows() -> None:
    """Has this worker tell the others that it holds what is no node of the tree, and find nothing wrong with that."""

    from paceline._microbatch import kept_sums, rank_plan, step_microbatches

    def bad_row(nodes: Any, microbatches: int) -> Any:
        row = rank_plan.row_of_held(nodes, microbatches)
        row[1] = 4
        return row

    def nodes_of(row: Any) -> Any:
        return () if row[1] == 4 else rank_plan.held_of_row(row)

    mock.patch.object(kept_sums, "row_of_held", bad_row).start()
    mock.patch.object(step_microbatches, "held_of_row", nodes_of).start()


def main() -> None:
    """Joins and trains."""
    plan = json.loads(sys.argv[1])
    if plan.get("log"):
        logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s %(message)s")
    faults = [Fault(**fault) for fault in plan["faults"]]
    inflict(faults, emit)
    brake = Brake(Path(plan["brake"]))
    problem: Any = problem_of(plan["model"])
    problem.bare = plan.get("bare", False)
    if "threads" in plan:
        os.environ["OPENBLAS_NUM_THREADS"] = plan["threads"]
    if plan.get("bad_rows"):
        send_bad_rows()
    if plan.get("other_processor"):
        from paceline._microbatch import machine_bits

        machine_bits.numpy_probe = lambda: b"other bits"
    slowness = os.getpid() % 4 if plan.get("uneven") else 1
    if plan.get("uneven"):  # few generations of a storm are long enough for measurements of the usual length
        from paceline._base import activity

        activity._MEASURED_S = 0.0
    emit("ready")
    sys.stdin.readline()  # all that are started together knock together
    with paceline.join(timeout=plan["join_timeout"]) as session:
        emit("joined", rank=session.group.rank, size=session.group.size, pid=os.getpid())
        kinds = {"microbatches": 8, "same_bits": True, "check_every": 0}
        settings = {name: plan.get(name, usual) for name, usual in kinds.items()}
        if OLD:
            settings["parts"] = settings.pop("microbatches")
        state = problem.build(session.group, **settings)
        session.on_view(lambda: emit("view", generation=session.generation, rank=session.rank, size=session.size))
        session.on_commit(lambda number: emit("committed", step=number))
        is_sharded = (state if OLD else state._core).is_sharded
        try:
            for step in session.steps(
                state,
                total=plan["total"],
                checkpoint_dir=plan.get("checkpoint_dir"),
                checkpoint_every=plan.get("checkpoint_every"),
                **({"balance": True} if plan.get("balance") else {}),
            ):
                with step:
                    if plan.get("looks_early"):
                        if step.rank == 0:
                            len(step.microbatches)
                        session.group.all_reduce(np.ones(1))
                    microbatches, kept = (
                        (step.parts, step.kept_parts) if OLD else (step.microbatches, step.kept_microbatches)
                    )
                    problem.flips = step.number >= plan.get("flips_from", step.number + 1)
                    used = [
                        int(i) for micro in microbatches if not micro.is_check for i in micro.indices[: micro.samples]
                    ]
                    used += [i for number in kept for i in samples_of(state.sampler, number)]
                    place = {"generation": step.generation, "step": step.number, "rank": step.rank}
                    told = [micro.number for micro in microbatches if not micro.is_check]
                    emit("attempt", **place, indices=used, microbatches=told, kept=list(kept))
                    emit("share", **place, shares=getattr(step, "shares", None))
                    problem.optimizer.zero_grad()
                    for micro in microbatches:
                        with micro:
                            if micro.number == plan.get("fault_in_microbatch", microbatches[-1].number):
                                for fault in faults:
                                    fault.in_step(step, "forward")
                            if kept and not micro.is_check:
                                for fault in faults:
                                    if fault.at == "repairing" and fault.rank in (None, step.rank):
                                        fault.strike()
                            if plan.get("pace"):
                                brake.compute(plan["pace"] / len(microbatches))
                            time.sleep(slowness * plan.get("microbatch_s", 0.0))
                            if plan.get("tells_microbatches"):
                                emit("microbatch", **place, microbatch=micro.number, is_check=micro.is_check)
                            problem.compute(micro)
                        if micro is microbatches[0] and (step.number, step.generation) == (plan.get("barrier_in"), 2):
                            session.group.barrier()  # all have computed one microbatch
                    for fault in faults:
                        fault.in_step(step, "before_gate")
                    problem.update()
                    for fault in faults:
                        fault.in_step(step, "behind_gate")
                if step.applied:
                    digest = "" if is_sharded else state.fingerprint().hex()  # a collective
                    emit("applied", generation=step.generation, step=step.number, digest=digest, world=step.world)
                else:
                    emit("undone", generation=step.generation, step=step.number, cause=str(step.cause))
                if is_sharded and step.applied and step.number % plan.get("digest_every", step.number + 1) == 0:
                    for attempt in session.retry():
                        with attempt:
                            emit("digest", step=state.step, digest=state.fingerprint().hex())
                if plan.get("stop_at") == step.number and step.applied:
                    break
        except paceline.Dismissed as end:
            emit("dismissed", reason=end.reason, step=state.step)
            raise
        emit("done", step=state.step, digest=state.fingerprint().hex())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except (paceline.PacelineError, ValueError) as error:
        emit("error", type=type(error).__name__, text=str(error), ranks=list(getattr(error, "ranks", ())))
        raise SystemExit(3) from error
