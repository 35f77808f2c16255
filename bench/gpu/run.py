"""Runs Paceline on one GPU that several workers share: `python bench/gpu/run.py` (see README.md beside it).

Each experiment has processes and a time limit of its own. One that fails or takes too long does not stop the others:
the result says so, with the stacks of its workers. Nothing is asserted; `results.json` and `results.md` say what was
found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from paceline.testing import coordinator

HERE = Path(__file__).parent
MODELS = {
    "AMP, float16, GradScaler": ("--autocast", "float16", "--scaled", "--optimizer", "AdamW"),
    "AMP, bfloat16": ("--autocast", "bfloat16", "--optimizer", "AdamW"),
    "parameters in bfloat16": ("--bf16",),
    "AdamW, fused": ("--optimizer", "AdamW", "--optimizer-flag", "fused"),
    "AdamW, capturable": ("--optimizer", "AdamW", "--optimizer-flag", "capturable"),
    "BatchNorm": ("--model", "normed"),
    "torch.compile": ("--compiled",),
}


class Worker:
    """One worker process, the lines that it has printed so far, and its stderr in a file."""

    def __init__(self, name: str, out: Path, command: Sequence[str], environment: dict[str, str]) -> None:
        self.stderr = out / f"{name}.stderr"
        with self.stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
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
                self.events.append(json.loads(line) if line.startswith("{") else {"event": "text", "at": monotonic()})
                self.changed.notify_all()
        with self.changed:
            self.events.append({"event": "end", "at": monotonic(), "code": self.process.wait()})
            self.changed.notify_all()

    def wait_for(self, event: str, *, after: float = 0.0, timeout: float = 600.0, **facts: Any) -> dict[str, Any]:
        """Returns the first event of this name, with these facts, that came after a time.

        Raises:
            TimeoutError: it did not come in time, or the worker has ended.
        """
        deadline = monotonic() + timeout
        with self.changed:
            while True:
                for found in self.events:
                    if found["event"] == event and found["at"] > after and facts.items() <= found.items():
                        return found
                if monotonic() > deadline or any(found["event"] == "end" for found in self.events):
                    raise TimeoutError(f"no {event!r} {facts} from a worker; its last events: {self.events[-3:]}")
                self.changed.wait(1.0)

    def all(self, event: str) -> list[dict[str, Any]]:
        """Returns all events of this name so far."""
        with self.changed:
            return [found for found in self.events if found["event"] == event]


class World:
    """The workers of one experiment, and the coordinator that they join.

    Args:
        options: the command's options.
        out: folder for what workers write to stderr.
        settings: environment variables of all workers.
        role: the workers' role, with its arguments.
    """

    def __init__(self, options: argparse.Namespace, out: Path, settings: dict[str, str], role: Sequence[str]) -> None:
        self._options, self._out, self._settings, self._role = options, out, settings, role
        self.workers: list[Worker] = []

    def start(self, **settings: str) -> Worker:
        """Starts a worker, which joins at `go`."""
        options, number = self._options, len(self.workers)
        environment = {
            **os.environ,
            **self._settings,
            "PACELINE_ENGINE": options.engine,
            "NCCL_DEBUG": "WARN",
            **settings,
        }
        if options.sharing == "hostid":
            environment["NCCL_HOSTID"] = f"paceline-{os.getpid()}-{number}"
        else:
            environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        command = [sys.executable, str(HERE / "roles.py"), *self._role, "--engine", options.engine]
        command += ["--device", options.device, "--width", str(options.width)]
        if options.blocking is not None:
            command += ["--blocking", str(options.blocking)]
        self.workers.append(Worker(f"worker-{number}", self._out, command, environment))
        return self.workers[-1]

    def end(self) -> None:
        """Kills what still runs."""
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()


@contextmanager
def world(
    options: argparse.Namespace,
    out: Path,
    size: int,
    role: Sequence[str],
    *,
    spares: int = 0,
    least: int | None = None,
    most: int | None = None,
) -> Iterator[World]:
    """Starts a coordinator and workers, of which all but the spares have been told to join.

    Args:
        options: the command's options.
        out: folder for what workers write to stderr.
        size: how many join at once.
        role: the workers' role, with its arguments.
        spares: how many more are started, and join at `go`.
        least: with how many the job goes on; `size` if left out.
        most: how many may join; `size` if left out.
    """
    settings = {
        "PACELINE_MIN_WORKERS": str(size if least is None else least),
        "PACELINE_MAX_WORKERS": str(size if most is None else most),
        "PACELINE_FAILURE_TIMEOUT": os.environ.get("PACELINE_FAILURE_TIMEOUT", "3"),
    }
    with coordinator(settle_time=10.0) as address:
        found = World(options, out, {**settings, "PACELINE_COORDINATOR": address}, role)
        signal.signal(signal.SIGUSR1, lambda *_: [each.process.send_signal(signal.SIGUSR1) for each in found.workers])
        try:
            started = [found.start() for _ in range(size + spares)]
            for worker in started:
                worker.wait_for("ready")
            for worker in started[:size]:
                worker.go()
            yield found
        finally:
            found.end()


def _summary(values: Iterable[float]) -> dict[str, float]:
    """Returns the median, the 90th percentile, the least and the greatest of some seconds."""
    found = sorted(values)
    if not found:
        return {"n": 0}
    ninety = found[-(-9 * len(found) // 10) - 1]
    return {"n": len(found), "p50": statistics.median(found), "p90": ninety, "min": found[0], "max": found[-1]}


# Experiments ---------------------------------------------------------------------------------------------------------


def sums(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Sums of the engine at W = 2 and 4: all dtypes, several sizes, several at once."""
    result = {}
    for size in (2, 4):
        with world(options, out, size, ["sums"]) as found:
            digests = {worker.wait_for("done")["digest"] for worker in found.workers}
            wrong = [event for worker in found.workers for event in worker.all("wrong")]
        result[f"W={size}"] = {"same bits": len(digests) == 1, "wrong": wrong[:5]}
    return result


def digests(options: argparse.Namespace, out: Path, *arguments: str) -> dict[str, Any]:
    """Elastic training for 50 steps at W = 2 and 3: digests of all ranks, and what a step and its update take."""
    result = {}
    for size in (2, 3):
        with world(options, out, size, ["train", *arguments]) as found:
            last = {worker.wait_for("done")["digest"] for worker in found.workers}
            applied = [event for worker in found.workers for event in worker.all("applied") if event["step"] > 5]
        result[f"W={size}"] = {
            "same bits": len(last) == 1,
            "step": _summary(event["seconds"] for event in applied),
            "update with gate": _summary(event["update"] for event in applied),
        }
    return result


def models(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Elastic training for 30 steps at W = 2 with AMP, GradScaler, BatchNorm, ...: digests of all ranks."""
    result: dict[str, Any] = {}
    for name, arguments in MODELS.items():
        folder = out / name.replace(" ", "-").replace(",", "")
        folder.mkdir()
        try:
            with world(options, folder, 2, ["train", "--total", "30", *arguments]) as found:
                last = {worker.wait_for("done")["digest"] for worker in found.workers}
                result[name] = {"same bits": len(last) == 1}
        except TimeoutError as error:
            result[name] = {"failed": str(error)[:500], "stderr": _tails(folder)}
        _tell(result)
    return result


def links(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """The same over links, in microbatches: digests of all ranks at W = 1, 2 and 3, which should be one."""
    return _in_microbatches(options, out, "--total", "50")


def fsdp(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """The same with FSDP (FULL_SHARD), whose shards lie in host memory."""
    return _in_microbatches(options, out, "--total", "20", "--sharded")


def fsdp_carried(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """FSDP (FULL_SHARD) for 20 steps, whose gathers and scatters the engine carries; as `digests`."""
    return digests(options, out, "--total", "20", "--sharded")


def _in_microbatches(options: argparse.Namespace, out: Path, *arguments: str) -> dict[str, Any]:
    options.engine = "links"
    result: dict[str, Any] = {}
    found_in_all: set[str] = set()
    for size in (1, 2, 3):
        with world(options, out, size, ["train", "--microbatches", "8", *arguments]) as found:
            last = {worker.wait_for("done")["digest"] for worker in found.workers}
            applied = [event for worker in found.workers for event in worker.all("applied") if event["step"] > 5]
        found_in_all |= last
        result[f"W={size}"] = {"step": _summary(event["seconds"] for event in applied)}
    return {"same bits": len(found_in_all) == 1, **result}


def carry(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Links sum 256 MB on the device at W = 2: bytes a second, also of the copies and of links alone."""
    options.engine = "links"
    with world(options, out, 2, ["carry", "--total", "13"]) as found:
        told = [worker.wait_for("times") for worker in found.workers]
    rates = {
        way: told[0]["bytes"]
        / statistics.median(max(each) for each in zip(*(t["times"][way] for t in told), strict=True))
        for way in told[0]["times"]
    }
    return {"bytes a second": rates, "of the slower part": rates["sum"] / min(rates["copies"], rates["links"])}


def links_kills(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """SIGKILL of one of three workers whose gradients travel over links; a spare joins after each."""
    options.engine = "links"
    return _lose(options, out, signal.SIGKILL, options.kills)


def replicas(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Two replicas of two ranks, FSDP2 inside: one loses a rank, and another comes; the digests of one undisturbed."""
    options.engine = "links"
    role = ["replica", "--microbatches", "8", "--total", str(options.replica_steps)]
    with world(options, out, 0, role, least=1, most=1) as found:
        alone = _replica(found)
        for worker in alone:
            worker.go()
        expected = _digests(alone)
    return _lose_replica(options, out, role, expected)


def replicas_carried(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """The same over the engine, without microbatches: the digests of the replica that stays and of the newcomer."""
    return _lose_replica(options, out, ["replica", "--total", str(options.replica_steps)])


def _lose_replica(
    options: argparse.Namespace, out: Path, role: Sequence[str], expected: dict[int, str] | None = None
) -> dict[str, Any]:
    with world(options, out, 0, role, least=1, most=2) as found:
        first, second, late = (_replica(found) for _ in range(3))
        for worker in late:
            worker.wait_for("ready")
        for worker in (*first, *second):
            worker.go()
        for worker in first:
            worker.wait_for("applied", world=2)
        second[0].wait_for("gradients", after=monotonic())
        struck = monotonic()
        second[0].process.send_signal(signal.SIGKILL)
        recovered = [worker.wait_for("applied", after=struck, world=1)["at"] - struck for worker in first]
        ended = second[1].wait_for("end")["at"] - struck
        for worker in late:
            worker.go()
        for worker in (*first, *late):
            worker.wait_for("applied", after=struck, world=2)
        stayed, came = _digests(first), _digests(late)
    same = stayed == came and expected in (None, stayed)
    return {"same bits": same, "to the next step": _summary(recovered), "the mate ends": ended}


def _replica(found: World) -> list[Worker]:
    """Starts the two ranks of a replica, which join at `go`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    return [found.start(**where, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]


def _digests(ranks: Sequence[Worker]) -> dict[int, str]:
    """Returns the digest that each rank of a replica tells at the end."""
    told = [rank.wait_for("done") for rank in ranks]
    return {event["rank"]: event["digest"] for event in told}


def step(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """A forward and backward pass of a GPT with 124 M parameters at W = 2, in turns with torch's DDP."""
    result = {}
    for name, arguments in {"autocast bfloat16": ["--autocast", "bfloat16"], "bfloat16": ["--bf16"]}.items():
        role = ["compare", "--model", "gpt", "--batch", "8", "--total", "12", "--port", str(options.port), *arguments]
        with world(options, out, 2, role) as found:
            ranks = [worker.wait_for("times")["times"] for worker in found.workers]
        slowest = {
            way: [max(each) for each in zip(*(rank[way] for rank in ranks), strict=True)]
            for way in ("torch", "paceline")
        }
        ratios = [ours / theirs for ours, theirs in zip(slowest["paceline"], slowest["torch"], strict=True)]
        result[name] = {**{way: _summary(times) for way, times in slowest.items()}, "ratio": _summary(ratios)}
    return result


def gate(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """A step of the same GPT with one worker: a bare loop, with the wrapper, and in `session.steps` with either.

    The share of idle device time is that of ten more steps of each, with torch's profiler.
    """
    role = ["gate", "--model", "gpt", "--batch", "16", "--total", "25", "--autocast", "bfloat16"]
    times: dict[str, list[float]] = {}
    idle: dict[str, list[float | None]] = {}
    for way in ("bare", "wrapper"):
        with world(options, out, 1, [*role, "--way", way]) as found:
            told = found.workers[0].wait_for("times")
            for name, each in told["times"].items():
                times.setdefault(name, []).extend(each)
                idle.setdefault(name, []).append(told["idle"][name])
    result: dict[str, Any] = {way: _summary(each) for way, each in times.items()}
    result["ratios of medians"] = {way: result[way]["p50"] / result["bare"]["p50"] for way in times}
    result["idle share of the device"] = idle
    return result


def kills(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """SIGKILL of one of three workers, again and again; a spare joins after each."""
    return _lose(options, out, signal.SIGKILL, options.kills)


def freezes(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """SIGSTOP of one of three workers, again and again; a spare joins after each."""
    return _lose(options, out, signal.SIGSTOP, options.freezes)


def _until_gone(process: subprocess.Popen[str]) -> dict[str, float]:
    """Returns how long a killed process takes until it exits (its flag PF_EXITING), and until it is a zombie."""
    began, found = monotonic(), {}
    while "zombie" not in found and monotonic() < began + 10:
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            found["zombie"] = monotonic() - began
            break
        if int(fields[6]) & 4:
            found.setdefault("exiting", monotonic() - began)
        if fields[0] in "ZX":
            found["zombie"] = monotonic() - began
        sleep(0.001)
    return found


def _lose(options: argparse.Namespace, out: Path, how: signal.Signals, rounds: int) -> dict[str, Any]:
    errors, recovered, joined, dying = [], [], [], []
    role = ["train", "--total", "1000000", *(["--warm"] if options.warm else [])]
    stages: list[dict[str, float]] = []
    with world(options, out, 3, role, spares=rounds, least=1) as found:
        training, spares = found.workers[:3], found.workers[3:]
        last = monotonic()
        for worker in training:
            worker.wait_for("applied", after=last, world=3)
        for round_, spare in enumerate(spares):
            victim = training.pop(round_ % 3)
            victim.wait_for("gradients", after=monotonic())
            struck = monotonic()
            victim.process.send_signal(how)
            if how is signal.SIGKILL:
                dying.append(_until_gone(victim.process))
            for worker in training:
                applied = worker.wait_for("applied", after=struck, world=2, timeout=20)
                recovered.append(applied["at"] - struck)
                errors += [event["at"] - struck for event in worker.all("raised") if event["at"] > struck][:1]
            if how is signal.SIGSTOP:
                victim.process.kill()
            began = monotonic()
            spare.go()
            training.append(spare)
            for worker in training:
                worker.wait_for("applied", after=began, world=3, timeout=20)
            joined.append(monotonic() - began)
            stages.append(_stages(spare, began))
            _tell({"to the error": errors, "to the next step": recovered, "until a spare trains": joined})
        return {
            "rounds": len(joined),
            "a killed process exits": _summary(each["exiting"] for each in dying if "exiting" in each),
            "a killed process is a zombie": _summary(each["zombie"] for each in dying if "zombie" in each),
            "stages of the last spare": stages[-1],
            "to the error": _summary(errors),
            "to the next step": _summary(recovered),
            "until a spare trains": _summary(joined),
        }


def _stages(worker: Worker, began: float) -> dict[str, float]:
    """Returns when a newcomer did what for the first time, in seconds after it was told to join."""
    found: dict[str, float] = {}
    for event in list(worker.events):
        found.setdefault(event["event"], event["at"] - began)
    return {name: found[name] for name in ("warm", "joined", "begins", "gradients", "applied") if name in found}


def _tell(result: dict[str, Any]) -> None:
    """Writes what was found so far to stderr, which is kept if the experiment fails."""
    print(json.dumps(result), file=sys.stderr, flush=True)


def newcomer(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """One worker joins two others that hold 500 MB of state (42 M parameters with Adam's moments)."""
    options.width = options.width * 9 // 4
    role = ["train", "--optimizer", "AdamW", "--total", "1000000", *(["--warm"] if options.warm else [])]
    with world(options, out, 2, role, spares=1, least=1, most=3) as found:
        found.workers[0].wait_for("applied", step=5)
        late = found.workers[-1]
        began = monotonic()
        late.go()
        first = late.wait_for("applied")
        steps = [event["seconds"] for event in found.workers[0].all("applied") if event["at"] < began][2:]
        pause = max(
            after["at"] - before["at"]
            for before, after in zip(*[found.workers[0].all("applied")[i:] for i in (0, 1)], strict=False)
            if after["at"] > began
        )
    return {
        "seconds until its first step": first["at"] - began,
        "stages": _stages(late, began),
        "longest time between two steps of a member": pause,
        "a step before": _summary(steps),
    }


def abort(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """An engine is aborted with 1, 2 and 8 sums under way; then 20 generations, and the memory in use after each."""
    with world(options, out, 2, ["abort"]) as found:
        for worker in found.workers:
            worker.wait_for("done")
        events = [event for worker in found.workers for event in worker.all("aborted")]
        generations = found.workers[0].wait_for("generations")
    result: dict[str, Any] = {
        f"{queued} sums": {key: [e[key] for e in events if e["queued"] == queued] for key in ("returned", "drained")}
        for queued in (1, 2, 8)
    }
    memory = generations["memory"]
    result["memory after generations 1, 2, 10, 20 (bytes)"] = [memory[i] for i in (0, 1, 9, 19)]
    result["an engine opens (median)"] = generations["opened"]
    result["threads in the end"] = generations["threads"]
    return result


def broken(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """One rank's communicator ends while all workers live."""
    with world(options, out, 3, ["broken"]) as found:
        for worker in found.workers:
            worker.wait_for("done")
        events = [event for worker in found.workers for event in worker.all("outcome")]
    return {"outcomes": [{key: event[key] for key in ("result", "seconds")} for event in events]}


EXPERIMENTS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        *(links, links_kills, carry, fsdp, fsdp_carried, replicas, replicas_carried),
        *(abort, sums, digests, kills, freezes, broken, newcomer, models, gate, step),
    )
}
ALONE = ("links_kills", "carry", "abort", "kills", "newcomer", "freezes", "gate", "step")
"""Experiments that measure times of training, so nothing runs beside them."""
KILLS = ("kills", "links_kills")
LONGER = {"models": 2.0, **dict.fromkeys(KILLS, 2.0)}
"""How many times the limit an experiment may take that starts workers again and again; more for more than 10 kills."""


# The command ---------------------------------------------------------------------------------------------------------


def _tails(out: Path) -> dict[str, str]:
    """Returns the ends of what workers wrote to stderr."""
    return {
        path.name: text[-3000:]
        for path in sorted(out.rglob("*.stderr"))
        if (text := path.read_text(errors="replace").strip())
    }


def run_one(name: str, options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs an experiment in a process of its own, for as long as its limit."""
    out = options.out / name
    out.mkdir(parents=True, exist_ok=True)
    limit = options.limit * LONGER.get(name, 1.0) * (max(1.0, options.kills / 10) if name in KILLS else 1.0)
    began = monotonic()
    with (out / "experiment.stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, __file__, "--only", name, *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        result: dict[str, Any]
        try:
            printed, _ = process.communicate(timeout=limit)
            result = json.loads(printed) if not process.returncode else {"failed": f"exit code {process.returncode}"}
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # its workers write their stacks
            sleep(1.0)
            result = {"failed": f"not over after {limit:.0f} s"}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if "failed" in result:
        result["stderr"] = _tails(out)
    result["wall seconds"] = round(monotonic() - began, 1)
    return result


def facts(options: argparse.Namespace) -> dict[str, str]:
    """Returns what the figures were found on."""
    import torch

    found = {"torch": torch.__version__, "python": platform.python_version(), "engine": options.engine}
    if options.device != "cpu":
        found["device"] = torch.cuda.get_device_name()
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    found["processors"] = str(os.cpu_count())
    return found


def page(found: dict[str, Any]) -> str:
    """Returns the results as Markdown."""
    lines = ["# Found on a GPU", "", ", ".join(f"{key} {value}" for key, value in found["facts"].items()), ""]
    for name, result in found["experiments"].items():
        lines += [f"## {name}", EXPERIMENTS[name].__doc__ or "", "", "```json"]
        lines += [json.dumps({k: v for k, v in result.items() if k != "stderr"}, indent=1, default=str), "```", ""]
    return "\n".join(lines)


def main() -> None:
    """Runs all experiments, or those that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="nccl")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sharing", choices=("hostid", "multirank"), default="hostid", help="how ranks share one GPU")
    parser.add_argument("--port", type=int, default=29511, help="a free port for torch's own DDP")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each; twice as many for some")
    parser.add_argument("--blocking", type=int, choices=(0, 1), help="NCCL's config.blocking")
    parser.add_argument("--warm", action="store_true", help="workers open an engine of one rank before they join")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--freezes", type=int, default=3)
    parser.add_argument("--replica-steps", type=int, default=150, help="of the experiment with replicas")
    parser.add_argument(
        "--side-by-side", type=int, default=3, help="experiments at once, but for those that need quiet"
    )
    parser.add_argument("--skip", nargs="*", choices=EXPERIMENTS, default=[])
    parser.add_argument("--pick", nargs="*", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--only", choices=EXPERIMENTS, help="runs one in this process and prints its result")
    options = parser.parse_args()
    if options.only:
        out = options.out / options.only
        out.mkdir(parents=True, exist_ok=True)
        print(json.dumps(EXPERIMENTS[options.only](options, out)))
        return
    arguments = ["--engine", options.engine, "--device", options.device, "--width", str(options.width)]
    arguments += ["--sharing", options.sharing, "--port", str(options.port), "--out", str(options.out)]
    arguments += ["--kills", str(options.kills), "--freezes", str(options.freezes)]
    arguments += ["--replica-steps", str(options.replica_steps)]
    if options.blocking is not None:
        arguments += ["--blocking", str(options.blocking)]
    if options.warm:
        arguments.append("--warm")
    names = [name for name in options.pick if name not in options.skip]
    found: dict[str, Any] = {"facts": facts(options), "experiments": {}}

    def record(name: str) -> None:
        result = run_one(name, options, arguments)
        found["experiments"][name] = result
        print(name, json.dumps(result)[:3000], flush=True)
        (options.out / "results.json").write_text(json.dumps(found, indent=1))
        (options.out / "results.md").write_text(page(found))

    options.out.mkdir(parents=True, exist_ok=True)
    print(json.dumps(found["facts"]), flush=True)
    with ThreadPoolExecutor(options.side_by_side) as pool:
        list(pool.map(record, (name for name in names if name not in ALONE)))
    for name in names:
        if name in ALONE:
            record(name)


if __name__ == "__main__":
    main()
