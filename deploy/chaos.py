#!/usr/bin/env python3
"""Trains the digits in containers, disturbs them in every way, and tells how it went.

    python3 deploy/chaos.py                      builds the image, starts four workers, and disturbs them
    python3 deploy/chaos.py --faults kill,pause  only these, in this order
    sudo python3 deploy/chaos.py --faults drop   packets that vanish: needs root, iptables and br_netfilter

Needs Docker with Compose (v2, or docker-compose 1.29) and Python's standard library. The exit code is 0 only if
training went on after every fault, the digits were learnt, and every epoch used each sample exactly once.
"""

from __future__ import annotations

import argparse
import ipaddress
import itertools
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from records import Records

HERE = Path(__file__).parent
FILES = ("compose.yaml", "chaos.yaml")
FAULTS = ("kill", "more", "coordinator", "fewer", "pause", "disconnect", "move", "drop")
SILENCE_S = 3.0
"""Paceline's failure_timeout: seconds of silence after which a worker counts as lost."""
_AWAY_S = 2.0
"""Seconds for which a worker stays away longer. By then one that is cut off has noticed, and has tried to come back."""


class Fleet:
    """The containers of one project.

    Args:
        project: the project's name.
        environment: additional variables for Compose.
        files: Compose files in this folder.
    """

    def __init__(self, project: str, environment: dict[str, str], files: Sequence[str] = FILES) -> None:
        tokens = {name: secrets.token_hex(32) for name in ("PACELINE_TOKEN", "WORKER_TOKEN")}
        self._environment = {**tokens, **os.environ, **environment}
        self._project = project
        v2 = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
        command = ["docker", "compose"] if v2 else ["docker-compose"]
        self._compose = [*command, "-p", project, *(word for file in files for word in ("-f", str(HERE / file)))]
        self.network = f"{project}_default"
        self._taken = itertools.count()

    def run(self, *words: str, timeout: float = 120.0) -> str:
        """Runs a command and returns its output; if it fails, the error contains the output."""
        done = subprocess.run(words, env=self._environment, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout[-4000:]}{done.stderr[-4000:]}")
        return done.stdout.strip()

    def build(self) -> None:
        """Builds the image."""
        subprocess.run([*self._compose, "build"], env=self._environment, check=True)

    def scale(self, workers: int) -> None:
        """Starts or stops containers until `workers` run; SIGTERM lets those that leave finish their step."""
        self.run(*self._compose, "up", "-d", "--no-build", "--scale", f"worker={workers}")

    def containers(self, service: str, *, running: bool = True) -> list[str]:
        """Returns ids of 12 characters, which are also the containers' host names."""
        labels = (f"com.docker.compose.project={self._project}", f"com.docker.compose.service={service}")
        words = ["docker", "ps", "-q", *(word for label in labels for word in ("--filter", f"label={label}"))]
        return self.run(*words, *([] if running else ["-a"])).split()

    def free_address(self) -> str:
        """Returns an unused IP address from the end of the network, as Docker assigns addresses from the start."""
        subnet = self.run("docker", "network", "inspect", "-f", "{{(index .IPAM.Config 0).Subnet}}", self.network)
        return str(ipaddress.ip_network(subnet)[-2 - next(self._taken)])

    def address(self, container: str) -> str:
        """Returns a container's IP address."""
        form = f'{{{{(index .NetworkSettings.Networks "{self.network}").IPAddress}}}}'
        return self.run("docker", "inspect", "-f", form, container)

    def logs(self) -> str:
        """Returns the logs of all containers that still exist."""
        done = subprocess.run(
            [*self._compose, "logs", "--no-color"], env=self._environment, capture_output=True, text=True
        )
        return done.stdout

    def account(self, container: str) -> str:
        """Says how a container is, what it printed last, and what the coordinator knows of the job."""
        (coordinator,) = self.containers("coordinator")
        state = "{{.State.Status}}, code {{.State.ExitCode}}{{range .NetworkSettings.Networks}} {{.IPAddress}}{{end}}"
        ask = ("docker", "exec", "-e", "PACELINE_COORDINATOR=127.0.0.1:7400", coordinator, "paceline")
        questions = (
            ("docker", "inspect", "-f", state, container),
            ("docker", "logs", "--tail", "30", "--timestamps", container),
            ("docker", "exec", container, "getent", "hosts", "coordinator"),
            (*ask, "status"),
            (*ask, "debug", "stacks", "digits"),
        )
        told = []
        for words in questions:
            done = subprocess.run(words, env=self._environment, capture_output=True, text=True, timeout=60.0)
            told.append(f"$ {' '.join(words)}\n{done.stdout[-2500:]}{done.stderr[-2500:]}")
        return "\n".join(told)

    def down(self) -> None:
        """Removes all containers, volumes and networks."""
        self.run(*self._compose, "down", "-v", "--remove-orphans", "-t", "1")


class Chaos:
    """Disturbs a fleet that trains.

    Args:
        fleet: its containers.
        records: what its workers record.
        workers: how many workers there are at the start, and again after `fewer`.
        say: called with a line for each fault.

    Attributes:
        results: one for each fault: its name; what was done to which container; `others`, the seconds from the command
            until the others had committed a step of the next view; `back`, the seconds from the healing command until
            all workers had, with the disturbed one; and `gap`, the longest time in which no worker committed.
    """

    def __init__(self, fleet: Fleet, records: Records, workers: int, say: Callable[[str], None]) -> None:
        self.results: list[dict[str, Any]] = []
        self._fleet = fleet
        self._records = records
        self._workers = workers
        self._say = say

    def inflict(self, name: str) -> None:
        """Inflicts the named fault, and heals it."""
        began = time.time()
        result: dict[str, Any] = {"fault": name, **getattr(self, f"_{name}")()}
        result["gap"] = self._records.longest_gap(began, time.time())
        self.results.append(result)
        self._say(describe(result))

    # Faults -----------------------------------------------------------------------------------------------------------

    def _kill(self) -> dict[str, Any]:
        return self._lose(-1, lambda victim: ["docker", "kill", victim])

    def _more(self) -> dict[str, Any]:
        return self._scale(self._workers + 2)

    def _fewer(self) -> dict[str, Any]:
        facts = self._scale(2)
        self._scale(self._workers)
        return facts

    def _coordinator(self) -> dict[str, Any]:
        (coordinator,) = self._fleet.containers("coordinator")
        hosts, start = self._fleet.containers("worker"), time.time()
        self._fleet.run("docker", "restart", coordinator)
        again = time.time()
        self._await(lambda: self._records.committed(hosts, again), "a step was committed after it")
        return {"what": f"the coordinator is restarted in {again - start:.1f} s"}

    def _pause(self) -> dict[str, Any]:
        return self._lose(1, lambda victim: ["docker", "pause", victim], lambda victim: ["docker", "unpause", victim])

    def _disconnect(self) -> dict[str, Any]:
        network = self._fleet.network

        def connect(victim: str) -> list[str]:  # with its former address
            return ["docker", "network", "connect", "--ip", self._fleet.address(victim), network, victim]

        return self._lose(0, lambda victim: ["docker", "network", "disconnect", network, victim], connect)

    def _move(self) -> dict[str, Any]:
        network, address = self._fleet.network, self._fleet.free_address()

        def connect(victim: str) -> list[str]:
            return ["docker", "network", "connect", "--ip", address, network, victim]

        return self._lose(0, lambda victim: ["docker", "network", "disconnect", network, victim], connect)

    def _drop(self) -> dict[str, Any]:
        def rule(verb: str) -> Callable[[str], list[str]]:
            def command(victim: str) -> list[str]:
                address = self._fleet.address(victim)
                rules = [f"iptables -w {verb} DOCKER-USER {end} {address} -j DROP" for end in ("-s", "-d")]
                return ["sh", "-ec", "\n".join(rules)]

            return command

        return self._lose(-1, rule("-I"), rule("-D"))

    # ------------------------------------------------------------------------------------------------------------------

    def _lose(
        self, rank: int, cut: Callable[[str], list[str]], heal: Callable[[str], list[str]] | None = None
    ) -> dict[str, Any]:
        hosts = self._fleet.containers("worker")
        victim = self._records.by_rank(hosts)[rank]
        others = [host for host in hosts if host != victim]
        commands = cut(victim), heal(victim) if heal is not None else None  # while Docker still knows its address
        start = time.time()
        self._fleet.run(*commands[0])
        try:
            again = self._await(lambda: self._records.back(others, start), "the others committed again")
            if commands[1] is not None:
                time.sleep(_AWAY_S)
        finally:
            healed = time.time()
            if commands[1] is not None:
                self._fleet.run(*commands[1])
        result = {"what": f"{victim} of {len(hosts)}", "others": again - start}
        if commands[1] is not None:
            try:
                back = self._await(
                    lambda: self._records.back(hosts, healed, size=len(hosts)), f"{victim} was back and all committed"
                )
            except TimeoutError as error:
                raise TimeoutError(f"{error}\n{self._fleet.account(victim)}") from None
            result["back"] = back - healed
        return result

    def _await(self, look: Callable[[], float | None], what: str) -> float:
        def unless_over() -> float | None:
            if self._records.ended:
                raise RuntimeError(f"training ended before {what}: PACELINE_EPOCHS makes it longer")
            return look()

        return self._records.wait(unless_over, what)

    def _scale(self, workers: int) -> dict[str, Any]:
        before = len(self._fleet.containers("worker"))
        start = time.time()
        self._fleet.scale(workers)
        hosts = self._fleet.containers("worker")
        again = self._await(lambda: self._records.back(hosts, start, size=workers), f"{workers} workers committed")
        return {"what": f"{before} workers become {workers}", "others": again - start}


def describe(result: dict[str, Any]) -> str:
    """Formats a result as a line."""
    parts = [f"{result['fault']:<12}{result['what']:<40}"]
    for key, text in (("others", "committing after"), ("back", "back after"), ("gap", "longest gap")):
        if key in result:
            parts.append(f"{text} {result[key]:.2f} s")
    return "  ".join(parts)


def train(
    fleet: Fleet, records: Records, workers: int, faults: Sequence[str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Starts the workers, disturbs them, and waits for the end; returns the facts to report."""
    start = time.time()
    fleet.scale(workers)
    hosts = fleet.containers("worker")
    first = records.wait(lambda: records.committed(hosts, start), "the first step is committed")
    say(f"first step committed {first - start:.1f} s after `up`")
    records.wait(lambda: records.back(hosts, start, size=workers), f"all {workers} train")
    chaos = Chaos(fleet, records, workers, say)
    for fault in faults:
        chaos.inflict(fault)
    records.wait(lambda: records.ended, "training ends", timeout=600.0)
    last = fleet.containers("worker", running=False)
    codes = fleet.run("docker", "wait", *last).split()
    records.refresh()
    printed = re.search(r"accuracy ([\d.]+) after", fleet.logs())  # by rank 0, whichever that is
    return {
        "first_s": first - start,
        "faults": chaos.results,
        "accuracy": float(printed[1]) if printed else 0.0,
        "steps": records.steps,
        "wrong": records.wrong(),
        "exit_codes": dict(zip(last, map(int, codes), strict=True)),
        "seconds": time.time() - start,
    }


def _can_drop() -> bool:
    """True if this user may set a packet filter, and traffic between containers passes through it."""
    bridged = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    return os.geteuid() == 0 and bridged.exists() and bridged.read_text().strip() == "1"


def main() -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    standard = [fault for fault in FAULTS if fault != "drop" or _can_drop()]
    parser.add_argument(
        "--workers", type=int, default=4, choices=range(3, 7), help="number of workers at the start; default: 4"
    )
    parser.add_argument(
        "--faults", default=",".join(standard), help=f"faults to cause, of {','.join(FAULTS)}; default: %(default)s"
    )
    parser.add_argument("--project", default="paceline-chaos")
    parser.add_argument("--audit", type=Path, metavar="FOLDER", help="keep the records of the workers here")
    parser.add_argument("--no-build", action="store_true", help="use the image that is there")
    parser.add_argument("--json", action="store_true", help="print the result as a JSON object on the last line")
    asked = parser.parse_args()
    faults = [fault for fault in asked.faults.split(",") if fault]
    if unknown := set(faults) - set(FAULTS):
        parser.error(f"no such fault: {', '.join(unknown)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.audit or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)  # the containers' user does not exist on this host
        fleet = Fleet(asked.project, {"PACELINE_AUDIT": str(folder)})
        records = Records(folder)
        if not asked.no_build:
            fleet.build()
        try:
            told = train(fleet, records, asked.workers, faults, lambda line: print(line, flush=True))
        except BaseException:
            print(fleet.logs(), records, sep="\n", file=sys.stderr)
            raise
        finally:
            fleet.down()
    print(f"accuracy {told['accuracy']:.4f} after {told['steps']} steps in {told['seconds']:.0f} s")
    print("\n".join(told["wrong"]) or "every sample counted exactly once in each epoch, in spite of the faults")
    if asked.json:
        print(json.dumps(told))
    return 0 if told["accuracy"] >= 0.95 and not told["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
