"""Runs an engine with real workers and prints JSON: `python bench/gpu/engine_on_gpu.py` (see README.md beside it).

Two to four workers share one GPU. Each experiment prints one line. Nothing is asserted: the line says what was found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, perf_counter
from typing import Any

import torch
import torch.distributed as dist

import paceline
import paceline.torch
from paceline._engines.catalogue import make_engine
from paceline._engines.data_engine import EngineFailed, EngineTimeout, OnDevice
from paceline.testing import coordinator

LAYERS, WIDTH, BATCH = 8, 1024, 64
"""8.4 M parameters, 32 MiB of gradients."""

QUEUED = (1, 2, 8)
"""Numbers of sums that are under way when the engine is aborted."""


def tell(event: str, **facts: Any) -> None:
    """Prints a line for the parent."""
    sys.stdout.write(json.dumps({"event": event, "at": monotonic(), **facts}) + "\n")
    sys.stdout.flush()


def finish(device: torch.device) -> None:
    """Waits until the device is idle, so that the clock counts its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def net(device: torch.device, width: int) -> torch.nn.Module:
    """Returns the model, with the same values in all workers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS))).to(device)


def digest(model: torch.nn.Module) -> str:
    """Returns a hash of all parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return found.hexdigest()


# Workers ------------------------------------------------------------------------------------------------------------


def train(device: torch.device, width: int, total: int) -> None:
    """Trains in `session.steps`; tells how long each step and its gate take, and what ends a step."""
    with paceline.join() as session:
        model = paceline.torch.DDP(net(device, width), session.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        sampler = paceline.ElasticSampler(1 << 16, global_batch=BATCH)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        for step in session.steps(state, total=total):
            began = perf_counter()
            with step:
                x = torch.ones(max(1, len(step.indices)), width, device=device)
                optimizer.zero_grad()
                try:
                    model(x).square().mean().backward()
                except paceline.PacelineError as error:
                    tell("raised", step=step.number, type=type(error).__name__)
                    raise
                tell("gradients", step=step.number)
                before = perf_counter()
                optimizer.step()
                gate = perf_counter() - before
            finish(device)
            ended = "applied" if step.applied else "undone"
            tell(ended, step=step.number, world=step.world, seconds=perf_counter() - began, update=gate)
        tell("done", digest=digest(model.module))


def compare(device: torch.device, width: int, rounds: int, backend: str, port: int) -> None:
    """Takes steps of torch's DDP in turns with steps of Paceline's, outside of `session.steps` and without its gate."""
    with paceline.join() as session:
        group = session.group
        where = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(backend, init_method=where, rank=group.rank, world_size=group.size)
        ways = {
            "torch's DDP": torch.nn.parallel.DistributedDataParallel(net(device, width)),
            "paceline.torch.DDP": paceline.torch.DDP(net(device, width), group),
        }
        x = torch.ones(BATCH // group.size, width, device=device)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 3):  # the first ones open connections and plan buckets
            for way, model in ways.items():
                group.barrier()
                began = perf_counter()
                model.zero_grad()
                model(x).square().mean().backward()
                finish(device)
                if number >= 3:
                    times[way].append(perf_counter() - began)
        dist.destroy_process_group()
        tell("times", times=times)


def abort(device: torch.device, name: str) -> None:
    """Aborts an engine with sums under way that rank 1 has not begun; tells how long it takes until memory is free."""
    with paceline.join() as session:
        group = session.group
        for queued in QUEUED:
            engine = make_engine(name)
            engine.open(group.rank, group.members, 10.0)
            mine = engine.contact(monotonic() + 60)
            engine.connect(group.all_gather_object(mine))
            engine.await_ready(monotonic() + 60)
            warm = OnDevice(torch.ones(1 << 20, device=device))
            engine.all_reduce(warm).wait(monotonic() + 60)
            group.barrier()
            if group.rank != 1:
                tensors = [torch.ones(4 << 20, device=device) for _ in range(queued)]
                finish(device)
                tickets = [engine.all_reduce(OnDevice(tensor)) for tensor in tensors]
                threading.Event().wait(0.1)  # kernels begin; how many do is part of the question
                began = monotonic()
                engine.abort()
                returned = monotonic() - began
                for ticket in tickets:
                    try:
                        ticket.wait(monotonic() + 120)
                    except (EngineFailed, EngineTimeout):
                        continue
                free = engine.drained(monotonic() + 120)
                tell("aborted", queued=queued, returned=returned, drained=monotonic() - began if free else None)
            group.barrier()
            engine.abort()
            engine.close(monotonic() + 5)
        tell("done")


# The parent ---------------------------------------------------------------------------------------------------------


class Worker:
    """One worker process, and the lines that it has printed so far."""

    def __init__(
        self, options: argparse.Namespace, address: str, number: int, role: Sequence[str], **more: str
    ) -> None:
        environment = {**os.environ, "PACELINE_COORDINATOR": address, "PACELINE_ENGINE": options.engine, **more}
        if options.device == "cuda":
            if options.sharing == "hostid":
                environment["NCCL_HOSTID"] = f"paceline-{number}"
            else:
                environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        command = [sys.executable, __file__, "--device", options.device, "--width", str(options.width), *role]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.events: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def go(self) -> None:
        """Lets the worker join, once it has loaded what it needs."""
        self.wait_for("ready")
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.changed:
                self.events.append(json.loads(line))
                self.changed.notify_all()
        with self.changed:
            self.events.append({"event": "end", "at": monotonic()})
            self.changed.notify_all()

    def wait_for(self, event: str, *, after: float = 0.0, timeout: float = 180.0, **facts: Any) -> dict[str, Any]:
        """Returns the first event of this name, with these facts, that came after a time."""
        deadline = monotonic() + timeout
        with self.changed:
            while True:
                for found in self.events:
                    if found["event"] == event and found["at"] > after and facts.items() <= found.items():
                        return found
                if monotonic() > deadline or any(found["event"] == "end" for found in self.events):
                    raise TimeoutError(f"no {event!r} from a worker; its last lines: {self.events[-3:]}")
                self.changed.wait(1.0)


@contextmanager
def workers(options: argparse.Namespace, count: int, role: Sequence[str], **more: str) -> Iterator[list[Worker]]:
    """Starts a coordinator and as many workers as the world has; yields them when some have joined, and ends them.

    The others have loaded what they need, and join at `go`.
    """
    size = str(options.world)  # all are waited for, and training goes on with one
    settings = {"PACELINE_MIN_WORKERS": "1", "PACELINE_MAX_WORKERS": size, **more}
    settings.setdefault("PACELINE_FAILURE_TIMEOUT", os.environ.get("PACELINE_FAILURE_TIMEOUT", "5"))
    with coordinator(settle_time=10.0) as address:
        started = [Worker(options, address, number, role, **settings) for number in range(options.world)]
        try:
            for worker in started:
                worker.wait_for("ready")
            for worker in started[:count]:
                worker.go()
            yield started
        finally:
            for worker in started:
                worker.process.kill()
                worker.process.wait()


def lose_one(options: argparse.Namespace, how: signal.Signals) -> dict[str, Any]:
    """Kills or freezes one worker in the middle of training; tells what the others see, and when."""
    role = ["train", "--total", str(options.steps)]
    with workers(options, options.world, role) as started:
        victim, *others = started
        victim.wait_for("gradients", step=options.steps // 3)
        struck = monotonic()
        victim.process.send_signal(how)
        errors, recovered, digests = [], [], set()
        for worker in others:
            applied = worker.wait_for("applied", after=struck, world=options.world - 1)
            recovered.append(applied["at"] - struck)
            errors += [e["at"] - struck for e in worker.events if e["event"] == "raised" and e["at"] > struck][:1]
            digests.add(worker.wait_for("done")["digest"])
        return {"to_error": errors, "to_next_step": recovered, "same_bits": len(digests) == 1}


def join_later(options: argparse.Namespace) -> dict[str, Any]:
    """Lets one worker join while the others train."""
    role = ["train", "--total", str(options.steps * 100)]
    with workers(options, options.world - 1, role) as started:
        started[0].wait_for("applied", step=3)
        newcomer = started[-1]
        began = monotonic()
        newcomer.go()
        first = newcomer.wait_for("applied")
        digests = {worker.wait_for("done", timeout=600)["digest"] for worker in started}
        seconds = first["at"] - began
        return {"first_step": first["step"], "seconds": seconds, "same_bits": len(digests) == 1}


def measure_steps(options: argparse.Namespace) -> dict[str, Any]:
    """Measures steps in `session.steps`, and their updates with the gate, beside plain DDP."""
    with workers(options, options.world, ["train", "--total", str(options.steps)]) as started:
        digests = {worker.wait_for("done", timeout=600)["digest"] for worker in started}
        applied = [e for worker in started for e in worker.events if e["event"] == "applied" and e["step"] > 5]
    port = str(options.port)
    role = ["compare", "--rounds", str(options.steps), "--backend", options.engine, "--port", port]
    size = str(options.world)
    with workers(options, options.world, role, PACELINE_MIN_WORKERS=size) as started:
        ranks = [worker.wait_for("times", timeout=600)["times"] for worker in started]
    plain = {
        way: statistics.median(max(step) for step in zip(*(rank[way] for rank in ranks), strict=True))
        for way in ranks[0]
    }
    return {
        "step": statistics.median(e["seconds"] for e in applied),
        "update_with_gate": statistics.median(e["update"] for e in applied),
        "forward_and_backward": plain,
        "same_bits": len(digests) == 1,
    }


def measure_abort(options: argparse.Namespace) -> dict[str, Any]:
    """Measures how long it takes until an aborted engine has let go of its memory."""
    size = str(options.world)
    with workers(options, options.world, ["abort", "--engine", options.engine], PACELINE_MIN_WORKERS=size) as started:
        for worker in started:
            worker.wait_for("done", timeout=600)
        found = [e for worker in started for e in worker.events if e["event"] == "aborted"]
    return {
        str(queued): {
            "returned": [e["returned"] for e in found if e["queued"] == queued],
            "drained": [e["drained"] for e in found if e["queued"] == queued],
        }
        for queued in QUEUED
    }


def main() -> None:
    """Runs the experiments that were asked for, or one role of a worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", nargs="?", choices=("train", "compare", "abort"), help="for workers only")
    parser.add_argument("--engine", default="nccl")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sharing", choices=("hostid", "multirank"), default="hostid")
    parser.add_argument("--port", type=int, default=29511, help="a free port for torch's own DDP")
    parser.add_argument("--only", choices=("steps", "kill", "freeze", "newcomer", "abort"))
    parser.add_argument("--total", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--backend")
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device != "cpu" else torch.device("cpu")
    if options.device == "cpu":
        torch.set_num_threads(1)
    if options.role is not None:
        tell("ready")
        sys.stdin.readline()
    if options.role == "train":
        train(device, options.width, options.total)
    elif options.role == "compare":
        compare(device, options.width, options.rounds, options.backend, options.port)
    elif options.role == "abort":
        abort(device, options.engine)
    else:
        experiments = {
            "steps": lambda: measure_steps(options),
            "kill": lambda: lose_one(options, signal.SIGKILL),
            "freeze": lambda: lose_one(options, signal.SIGSTOP),
            "newcomer": lambda: join_later(options),
            "abort": lambda: measure_abort(options),
        }
        facts = {"engine": options.engine, "device": options.device, "world": options.world, "torch": torch.__version__}
        for name, run in experiments.items():
            if options.only in (None, name):
                print(json.dumps({"experiment": name, **facts, **run()}), flush=True)


if __name__ == "__main__":
    main()
