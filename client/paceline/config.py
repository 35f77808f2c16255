"""Timeouts and limits, and the table of PACELINE_* environment variables.

An argument takes precedence over the environment, the environment over the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "ENGINES",
    "ENVIRONMENT",
    "LINKS",
    "MAX_STREAMS",
    "Config",
    "checked_timeout",
    "know_link",
    "plug_in_engines",
]

LINKS = ("shm", "tcp", "grpc")
"""Kinds of links between processes that members use by default, the best first: shared memory on one host, raw TCP, and
gRPC, which works wherever members can reach each other's doors."""

_known_links = list(LINKS)

ENGINES = ("links", "gloo", "nccl", "xccl", "ucc")
"""The engines that need no plug-in. Paceline's links, or a backend of torch."""


def plug_in_engines() -> Mapping[str, EntryPoint]:
    """Returns the engines that installed packages bring (`paceline.engines`), by name."""
    from importlib.metadata import entry_points  # few jobs need it

    return {entry.name: entry for entry in entry_points(group="paceline.engines")}


MAX_STREAMS = 16
"""TCP connections of one link, for each direction."""

ENVIRONMENT: Mapping[str, str] = {
    "PACELINE_COORDINATOR": "address of the coordinator, host:port; of several that share a state: all addresses, with "
    "commas between them; without it rank 0 of torchrun's workers serves one, or the world is this process alone",
    "PACELINE_COORDINATOR_ENDS": "set by `paceline run-rank` and `paceline.run`: 1 if nobody starts the coordinator "
    "again when it has ended",
    "PACELINE_JOB": "name of the job (default: 'default')",
    "PACELINE_MIN_WORKERS": "the job starts with at least this many workers",
    "PACELINE_MAX_WORKERS": "the job never has more workers than this",
    "PACELINE_RANK": "explicit rank; PACELINE_WORLD_SIZE must be set too",
    "PACELINE_WORLD_SIZE": "explicit number of workers",
    "PACELINE_ADVERTISE": "host or host:port at which peers reach this worker",
    "PACELINE_NOTICE": "clouds whose metadata services `paceline run` asks whether this machine will be taken: aws, "
    "gcp, azure, or the name of a plug-in, separated by commas",
    "PACELINE_NOTICE_URL": "address to ask in place of a cloud's metadata service; for tests",
    "PACELINE_DRAIN_BEFORE": "seconds before the end of the scheduler's job, such as Slurm's, at which workers leave "
    "(default: 60); 0 for never",
    "PACELINE_SLURM_PORT": "port of the coordinator that the first task of `srun paceline run` serves (default: one of "
    "20000 to 29999 that follows from the numbers of job and step)",
    "PACELINE_TLS_CA": "file with the certificate of the authority that signs those of the coordinator and the "
    "members; if set, all connections use TLS",
    "PACELINE_TLS_CERT": "file with this worker's certificate, for the name member.paceline",
    "PACELINE_TLS_KEY": "file with the key of that certificate",
    "PACELINE_TOKEN": "token that is sent to the coordinator with every call",
    "PACELINE_TOKEN_FILE": "file whose first token is used; the file is read again at most once a second",
    "PACELINE_LOCAL_RANK": "set by `paceline run`: the worker's number among those of its launcher, from 0, for "
    "example to choose its GPU",
    "PACELINE_LAUNCH": "set by `paceline run`: the id of this run and how many workers it has started; the first view "
    "waits for them",
    "PACELINE_TORCH_WORLD": "set by `paceline run` to 1 if RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR "
    "and MASTER_PORT describe its workers, for scripts that use torch.distributed by itself",
    "PACELINE_LAUNCHER_FD": "set by `paceline run`: a pipe on which workers report their views to it",
    "PACELINE_OUTPUT_FD": "set by `paceline run`: a file in which it keeps the last lines that the worker has printed",
    "PACELINE_FLIGHT_DIR": "folder for the last operations, written on SIGUSR2 and when a generation fails (default: "
    "paceline-UID/flight in the temporary directory); 'off' for none",
    "PACELINE_TRACEBACK": "1: show the stack of a PacelineError under `paceline run`, and of Ctrl-C",
    "PACELINE_JOIN_TIMEOUT": "seconds to wait until the job starts",
    "PACELINE_FAILURE_TIMEOUT": "seconds of silence after which a member counts as lost",
    "PACELINE_STEP_TIMEOUT": "seconds to wait for a member that has not entered a collective",
    "PACELINE_CALL_TIMEOUT": "seconds for a call to the coordinator: store, barrier",
    "PACELINE_REJOIN_TIMEOUT": "seconds to try to reach the coordinator again after losing it",
    "PACELINE_LINKS": "kinds of links that may be used, separated by commas (default: 'shm,tcp,grpc'); grpc is "
    "always allowed",
    "PACELINE_TCP_STREAMS": "TCP connections of one link in each direction, 1 to 16 (default: 1): several are "
    "faster if the delay is long",
    "PACELINE_PINNED": "MiB of pinned host memory for what is copied between a device and the host (default: 512)",
    "PACELINE_ENGINE": "what carries gradients, and FSDP's parameters on a device: links (default), gloo, mpi, or nccl "
    "on GPUs; all members need the same",
    "PACELINE_DRAIN_STRAGGLERS": "1: a worker leaves once it stays far slower than the others "
    "(`session.steps(..., balance=True)`), unless too few would be left (default: 0)",
    "PACELINE_REPLAY": "set by `paceline replay`: a file that says which step to compute again, and from which "
    "checkpoint",
    "PACELINE_TUNING": "file with a table of schedules, from `paceline bench --tune-out`; all members need the same",
}
"""Every variable that Paceline reads, and its meaning."""


@dataclass(frozen=True, slots=True)
class Config:
    """Timeouts in seconds, all above 0, and how members connect to each other.

    `failure_timeout` alone decides about silence: members send six heartbeats in that time, and a failure waits for the
    coordinator's verdict for a sixth of it, half a second at most. A process that runs is not silent, although a call
    into C may hold the GIL for longer.
    """

    failure_timeout: float = 3.0
    """Silence after which a member counts as lost. All members of a job must have the same value."""

    step_timeout: float = 600.0
    """Default timeout of a collective: how long to wait for a member that is alive and has not entered it."""

    call_timeout: float = 30.0
    """Default timeout of a call to the coordinator: barriers by name and the store."""

    join_timeout: float = 60.0
    """Default time to wait for the first view."""

    rejoin_timeout: float = 600.0
    """How long a member that has lost the coordinator tries to reach it again."""

    links: tuple[str, ...] = LINKS
    """Kinds of links that this member may use with peers that may use them too. gRPC is always allowed."""

    tcp_streams: int = 1
    """TCP connections of one link in each direction, 1 to 16."""

    pinned: int = 512
    """Most MiB of pinned host memory of a group for what is copied between a device and the host."""

    tuning: str = ""
    """File with a table of schedules (`paceline._collectives.choose`); all members of a job must have the same.

    Empty for Paceline's own table.
    """

    engine: str = "links"
    """The name of what carries the gradients of DDP, and what FSDP gathers and scatters on a device: "links", or an
    engine (docs/engines.md): "gloo" on the CPU, "nccl", "xccl" or "ucc" on a device, or one that an installed package
    brings, such as "mpi". Everything else travels over links. All members of a job must have the same."""

    drain_stragglers: bool = False
    """Whether this member leaves once it has become a straggler (`Session.steps` with `balance`)."""

    def __post_init__(self) -> None:
        for name in _SECONDS:
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} must be above 0 s, not {value!r}")
        for kind in self.links:
            if kind not in _known_links:
                raise ValueError(f"there is no kind of link {kind!r}; the kinds are {', '.join(_known_links)}")
        if self.engine not in ENGINES and self.engine not in (plug_ins := plug_in_engines()):
            raise ValueError(f"there is no engine {self.engine!r}; the engines are {', '.join((*ENGINES, *plug_ins))}")
        if not self.pinned >= 1:
            raise ValueError(f"pinned must be at least 1 MiB, not {self.pinned!r}")
        if not 1 <= self.tcp_streams <= MAX_STREAMS:
            raise ValueError(f"tcp_streams must be 1 to {MAX_STREAMS}, not {self.tcp_streams!r}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Returns the defaults, overridden by the variables PACELINE_<FIELD> that are set.

        Args:
            environ: the variables; None for those of this process.

        Raises:
            ValueError: a variable has an invalid value; the text names it.
        """
        environ = os.environ if environ is None else environ
        found: dict[str, Any] = {}
        for name in _SECONDS:
            variable = f"PACELINE_{name.upper()}"
            if text := environ.get(variable):
                try:
                    found[name] = float(text)
                except ValueError:
                    found[name] = 0.0
                if not found[name] > 0:
                    raise ValueError(f"{variable} must be a number of seconds above 0, not {text!r}")
        if text := environ.get("PACELINE_LINKS"):
            found["links"] = tuple(kind.strip() for kind in text.split(","))
        if text := environ.get("PACELINE_TCP_STREAMS"):
            if not text.isdecimal():
                raise ValueError(f"PACELINE_TCP_STREAMS must be a number from 1 to {MAX_STREAMS}, not {text!r}")
            found["tcp_streams"] = int(text)
        if text := environ.get("PACELINE_PINNED"):
            if not text.isdecimal():
                raise ValueError(f"PACELINE_PINNED must be a number of MiB from 1 on, not {text!r}")
            found["pinned"] = int(text)
        if text := environ.get("PACELINE_TUNING"):
            found["tuning"] = text
        if text := environ.get("PACELINE_ENGINE"):
            found["engine"] = text
        if text := environ.get("PACELINE_DRAIN_STRAGGLERS"):
            if text not in ("0", "1"):
                raise ValueError(f"PACELINE_DRAIN_STRAGGLERS must be 0 or 1, not {text!r}")
            found["drain_stragglers"] = text == "1"
        return replace(cls(), **found)

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between heartbeats."""
        return self.failure_timeout / 6

    @property
    def verdict_timeout(self) -> float:
        """Seconds to wait for the coordinator's verdict before a failure is raised as this member sees it."""
        return min(0.5, self.failure_timeout / 6)


def know_link(name: str, *, known: bool = True) -> None:
    """Makes a name valid, or invalid, in `Config.links`; `paceline._links.registry` calls this."""
    if known and name not in _known_links:
        _known_links.append(name)
    elif not known:
        _known_links.remove(name)


_SECONDS = tuple(field.name for field in fields(Config) if isinstance(field.default, float))

_LONGEST = 1e8  # three years; locks do not accept infinity


def checked_timeout(seconds: float) -> float:
    """Returns a timeout that every wait accepts: infinity becomes three years.

    Raises:
        ValueError: it is negative, or not a number.
    """
    if not seconds >= 0:
        raise ValueError(f"a timeout is a number of seconds from 0, not {seconds!r}")
    return min(seconds, _LONGEST)
