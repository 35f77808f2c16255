"""Interprets or refuses torchrun's flags; -r and -t say whose lines are kept and shown. Pure."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass, fields

from paceline._base.addresses import Endpoint, parse_endpoint

_STREAMS = {"0": (), "1": ("stdout",), "2": ("stderr",), "3": ("stdout", "stderr")}
"""The streams that torchrun's numbers stand for."""

DEFAULT_MASTER_PORT = 29500
"""torchrun's default; launchers meet at the port after it."""

_MEETING_PORT = 29400
"""torchrun's default if --rdzv-endpoint names no port."""

_MAX_RUN_ID_BYTES = 120
"""A job's name has at most 128 bytes (session.proto), and the launchers' own job has a few bytes more than the run."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Which lines are kept, and which are shown.

    Attributes:
        kept: True if any lines should be kept; the log files then have all.
        hidden: pairs of a worker's index and "stdout" or "stderr", whose lines are kept but not shown.
    """

    kept: bool = False
    hidden: frozenset[tuple[int, str]] = frozenset()


def read_streams(redirects: str | None, tee: str | None, workers: int) -> Streams:
    """Parses -r and -t: 0 to 3 for all workers, or WORKER:0 to WORKER:3 with commas. -t shows what -r would hide.

    Raises:
        ValueError: one of them has neither form.
    """
    hidden, shown = _pairs("-r/--redirects", redirects, workers), _pairs("-t/--tee", tee, workers)
    return Streams(bool(hidden or shown), frozenset(hidden - shown))


def _pairs(flag: str, text: str | None, workers: int) -> set[tuple[int, str]]:
    if text is None:
        return set()
    if text in _STREAMS:
        return {(index, stream) for index in range(workers) for stream in _STREAMS[text]}
    found = set()
    for item in text.split(","):
        index, colon, number = item.partition(":")
        if not (colon and index.isascii() and index.isdigit() and number in _STREAMS):
            raise ValueError(f"{flag} must be 0 (none), 1 (stdout), 2 (stderr), 3 (both), or 0:3,1:2,..., not {text!r}")
        found |= {(int(index), stream) for stream in _STREAMS[number]}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """torchrun's flags as given; None (or False) for those that were not."""

    nnodes: str | None = None
    nproc_per_node: str | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    standalone: bool = False
    max_restarts: int | None = None

    @property
    def given(self) -> list[str]:
        """The names of the flags that were given, as on the command line."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return [
            f"--{name.replace('_', '-')}" for name, value in values.items() if value is not None and value is not False
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one launcher does, according to the flags.

    Attributes:
        workers: how many workers it starts.
        min_nodes: least number of launchers in a world.
        max_nodes: most launchers in a world.
        node: its number among the launchers; None if the coordinator assigns it.
        meeting: where launchers meet; None for a single launcher, which needs no address that others know.
        serves: whether this launcher serves the coordinator there; None if the first launcher on that host does.
        master_addr: address of rank 0; None to detect it.
        master_port: port at which rank 0 listens; None for a free port.
        run_id: name of the job.
        max_restarts: how often a new world follows one that failed, at most.
    """

    workers: int = 1
    min_nodes: int = 1
    max_nodes: int = 1
    node: int | None = None
    meeting: Endpoint | None = None
    serves: bool | None = None
    master_addr: str | None = None
    master_port: int | None = None
    run_id: str = "default"
    max_restarts: int = 0

    @property
    def alone(self) -> bool:
        """True if there is never another launcher."""
        return self.max_nodes == 1

    @property
    def is_open(self) -> bool:
        """True if launchers meet where other machines can connect."""
        return not self.alone and self.meeting is not None and not self.meeting.is_loopback


def read_flags(flags: Flags, *, job: str, cores: int, accelerated: bool = False) -> Plan:
    """Turns the flags into a plan.

    Args:
        flags: the flags as given.
        job: the job's name if --rdzv-id gives none.
        cores: number of cores that workers may use here, for which `cpu` stands.
        accelerated: there are devices, for each of which torchrun would start one worker with `auto`.

    Raises:
        ValueError: the flags are invalid, or not supported here; the text says what to write instead.
    """
    low, high = _nodes(flags.nnodes)
    if flags.rdzv_backend not in (None, "c10d", "static"):
        raise ValueError(
            f"--rdzv-backend {flags.rdzv_backend}: launchers always meet at a Paceline coordinator, as "
            "with c10d and static; leave the flag out"
        )
    if flags.standalone and high > 1:
        raise ValueError(f"--standalone means one node, but --nnodes {flags.nnodes} means more: leave one of them out")
    if flags.node_rank is not None and low < high:
        raise ValueError(f"--node-rank needs a fixed number of nodes, but --nnodes {flags.nnodes} is a range")
    if flags.node_rank is not None and not 0 <= flags.node_rank < high:
        raise ValueError(f"--node-rank {flags.node_rank} is outside of {high} node{'s'[: high != 1]} (--nnodes)")
    if flags.master_port is not None and not 0 < flags.master_port < 1 << 16:
        raise ValueError(f"--master-port must be 1 to 65535, not {flags.master_port}")
    restarts = flags.max_restarts or 0
    if restarts < 0:
        raise ValueError(f"--max-restarts must be 0 or more, not {restarts}")
    run_id = flags.rdzv_id or job
    if len(run_id.encode()) > _MAX_RUN_ID_BYTES:
        raise ValueError(f"--rdzv-id can have at most {_MAX_RUN_ID_BYTES} bytes")
    meeting, serves = _meeting(flags, high)
    return Plan(
        workers=_workers(flags.nproc_per_node, cores, accelerated),
        min_nodes=low,
        max_nodes=high,
        node=0 if high == 1 else flags.node_rank,
        meeting=meeting,
        serves=serves,
        # If the coordinator numbers the nodes, rank 0 may be anywhere, and the address only says where nodes meet.
        master_addr=flags.master_addr.strip("[]")
        if flags.master_addr and (high == 1 or flags.node_rank is not None)
        else None,
        master_port=flags.master_port,
        run_id=run_id,
        max_restarts=restarts,
    )


def token_of(run_id: str) -> str | None:
    """Derives a token from a run's name if that may be a secret: 32 or more hexadecimal digits, as a UUID has.

    Other names can be guessed, such as numbers of queued jobs or names of experiments; for those it returns None.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{32,}", run_id.replace("-", "")):
        return None
    return hmac.new(b"paceline run: the token of --rdzv-id", run_id.encode(), "sha256").hexdigest()


def _nodes(text: str | None) -> tuple[int, int]:
    """Parses --nnodes: N or MIN:MAX."""
    if text is None:
        return 1, 1
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = 0, 0
    if not 0 < bounds[0] <= bounds[1] or text.endswith(":"):
        raise ValueError(f"--nnodes must be a number from 1, or MIN:MAX, not {text!r}")
    return bounds


def _workers(text: str | None, cores: int, accelerated: bool) -> int:
    """Parses --nproc-per-node: a number, cpu or auto."""
    if text is None:
        return 1
    if text in ("gpu", "xpu") or (text == "auto" and accelerated):
        raise ValueError(f"--nproc-per-node {text}: Paceline does not count devices; give the number of workers")
    if text in ("cpu", "auto"):
        return cores
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(f"--nproc-per-node must be a number from 1, cpu or auto, not {text!r}")
    return int(text)


def _meeting(flags: Flags, most: int) -> tuple[Endpoint | None, bool | None]:
    """Returns where launchers meet, and whether this one serves there; None for what is not known.

    Each port has one purpose: rank 0 has --master-port to itself, so launchers meet at the port after it.
    """
    if flags.rdzv_endpoint and not flags.standalone:
        endpoint = parse_endpoint(flags.rdzv_endpoint, default_port=_MEETING_PORT)
        if endpoint.port:
            return endpoint, None
        if most > 1:
            raise ValueError(f"--rdzv-endpoint {flags.rdzv_endpoint}: give a port, because other nodes need to know it")
    if most == 1:
        return None, None
    port = flags.master_port or DEFAULT_MASTER_PORT
    host = (flags.master_addr or "127.0.0.1").strip("[]")
    if port + 1 >= 1 << 16:
        raise ValueError(
            f"--master-port {port}: launchers would meet at the port after it; say where with --rdzv-endpoint"
        )
    address = str(Endpoint(host, port + 1))
    return parse_endpoint(address), None if flags.node_rank is None else flags.node_rank == 0
