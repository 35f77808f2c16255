"""The settings of an operator: addresses, the state file, limits, and the few times that no job chooses for itself.

Times that follow from a job's `failure_timeout` are computed where they are used, not set here.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline_protocol import ProtocolSettings
from paceline_server.process_limits import usable_bytes
from paceline_server.storage.checks import MOST_SILENCE_S
from paceline_server.storage.etcd_address import EtcdAddress, is_etcd
from pacelinepb import install_command
from pacelinepb.bounds import MOST
from pacelinepb.pieces import MESSAGE_BYTES
from pacelinepb.token_lines import token_flaw

_MOST_MEMORY = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(ProtocolSettings):
    """Settings of a coordinator, which the constructor checks.

    Raises:
        ValueError: a number is not above 0, the address is not host:port, or settings do not go together; the text
            names the setting.
    """

    listen: str = "127.0.0.1:7400"
    """Where to listen, host:port. Loopback by default, since a token and TLS are for you to set. Port 0 takes a free
    port."""

    http: str | None = None
    """Where to serve the page, metrics and jobs over HTTP, host:port; None for nowhere. Needs the extra `http`."""

    state_path: Path | None = None
    """SQLite file for the state that must outlive the process; None keeps the state in memory."""

    etcd: EtcdAddress | None = None
    """Cluster for that state, which several coordinators share: one of them leads, the others stand by."""

    advertise: str | None = None
    """Where callers and other coordinators reach this one, host:port; None for `listen`, or for this host's name if
    `listen` means all addresses. Needed with `etcd` only."""

    tls_cert: Path | None = None
    """Certificate (PEM) for the name or address at which callers reach the coordinator. If set, only TLS is served."""

    tls_key: Path | None = None
    """The key of the certificate (PEM)."""

    tls_ca: Path | None = None
    """Authority (PEM) that must have signed the callers' certificates. None: callers need no certificate."""

    token: str | None = field(default=None, repr=False)
    """One token, good for all jobs. If this and `token_file` are None, callers need no token."""

    token_file: Path | None = None
    """File of tokens, one `TOKEN`, `TOKEN JOB` or `TOKEN role=ROLE JOB` on a line; read again when it changes."""

    restart_after: float | None = None
    """Seconds after which the coordinator declares the members of a job's last generation dead, if none of them has had
    a stream and candidates wait. None: never, so an operator has to declare them dead (`paceline restart`)."""

    max_jobs: int = 1_000
    """The most jobs that have sessions or a line at one time."""

    max_resting_jobs: int = 10_000
    """The most jobs at rest, of which only the number is left, and whether they are done: some 1 KB each. If there is
    one more, the coordinator forgets the job that ended first, and unknown jobs begin above its number, because a
    job's numbers never fall. An answer to ListJobs has room for so many."""

    keep_numbers: bool = True
    """False if no job is ever started again under its name: then nothing is kept of a job that is over."""

    max_sessions: int = 12_000
    """The most sessions of all jobs together. One job, or the token of several, takes at most as many as it leaves
    free: alone 6,000, so `max_job_sessions` workers and their launchers."""

    max_job_sessions: int = 5_000
    """The most sessions of one job."""

    max_pending_messages: int = 256
    """Messages that may wait for one slow session; if there are more, its stream ends and the member may resume."""

    max_name_bytes: int = 128
    """The most bytes of a job's name, UTF-8; 128 at most, because no message but the first has room for more."""

    max_barrier_name_bytes: int = 256
    """The most bytes of a barrier's name, UTF-8."""

    max_text_bytes: int = 2_000
    """The most bytes of the sentence in a report or of a leaving member, UTF-8; longer ones are cut."""

    max_address_bytes: int = 512
    """The most bytes of an address or a host name, UTF-8."""

    max_keys: int = 100_000
    """The most keys of one job."""

    max_key_bytes: int = 1_024
    """The most bytes of a key, UTF-8."""

    max_value_bytes: int = 1 << 20
    """The most bytes of a value."""

    memory_bytes: int = field(default_factory=lambda: min(usable_bytes(), _MOST_MEMORY))
    """Bytes of memory that all callers together may take: by default what the process may use (its cgroup's limit, or
    the machine's), but at most 2 GiB. A half is for calls, a quarter for what jobs store. One job, or one address,
    takes at most as much of either as it leaves free."""

    max_wait_keys: int = 1_000
    """The most keys in one Wait."""

    message_rate: float = 1_000
    """Messages a second that are read from one session, after `message_burst` at once."""

    message_burst: float = 5_000
    """Messages of one session that may come at once; see `message_rate`."""

    call_rate: float = 2_000
    """Calls a second that are served to the tokens of one job, or to one address, after `call_burst` at once. Streams
    count, and so do calls that are refused because they have no token."""

    call_burst: float = 10_000
    """Calls of one payer that may come at once; see `call_rate`."""

    max_calls: int = 1_000
    """The most calls of one connection that are open at one time; further ones wait at the caller."""

    first_message_time: float = 10.0
    """Seconds within which a session's stream must send its first message, and a connection must have been made."""

    page_members: int = 1_000
    """Members in one page of GetView: about 0.1 MB."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"{each.name} must be above 0, not {value!r}")
        if self.max_silence > MOST_SILENCE_S:
            raise ValueError(f"max_silence must be at most {MOST_SILENCE_S:g} s, a day, not {self.max_silence:g}")
        if self.max_name_bytes > (most := MOST["Resume.job"]):
            raise ValueError(f"max_name_bytes must be at most {most}, as in all messages, not {self.max_name_bytes}")
        if self.memory_bytes < (least := 48 * self.longest_request):
            raise ValueError(
                f"memory_bytes must be at least {least:,} with this max_value_bytes, not {self.memory_bytes:,}"
            )
        for name, address in (("listen", self.listen), ("http", self.http), ("advertise", self.advertise)):
            host, colon, port = (address or "any:0").rpartition(":")
            if not (colon and host and port.isdecimal() and int(port) <= 65_535):
                raise ValueError(f"{name} must be host:port, not {address!r}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both, or neither")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("tls_ca asks callers for certificates, which needs TLS: give tls_cert and tls_key too")
        if self.etcd is not None and self.state_path is not None:
            raise ValueError("the state is in a file or in etcd, not in both: give state_path or etcd")
        if self.token is not None and self.token_file is not None:
            raise ValueError("give token or token_file, not both")

    @property
    def call_bytes(self) -> int:
        """Bytes for calls that are open."""
        return self.memory_bytes // 2

    @property
    def longest_request(self) -> int:
        """The most bytes of a request that comes as several messages: one with a value, or with the keys of a Wait."""
        return MESSAGE_BYTES + self.max_value_bytes

    @property
    def store_bytes(self) -> int:
        """Bytes for the keys and values of all jobs."""
        return self.memory_bytes // 4

    @property
    def reached_at(self) -> str:
        """The address at which callers reach this coordinator."""
        if self.advertise is not None:
            return self.advertise
        host, _, port = self.listen.rpartition(":")
        is_all = host.strip("[]") in ("0.0.0.0", "::")  # noqa: S104
        return f"{socket.gethostname()}:{port}" if is_all else self.listen

    @property
    def wants_token(self) -> bool:
        """True if callers need a token."""
        return self.token is not None or self.token_file is not None


class HttpUnusable(ValueError):
    """HTTP cannot be served, because a package is missing; the text says what to install."""


def check_http() -> None:
    """Checks that the packages are there which serving HTTP takes."""
    missing = [name for name in ("aiohttp", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise HttpUnusable(f"the page and the metrics (--http) need {' and '.join(missing)}: {install_command('http')}")


def state_settings(state: str | None) -> dict[str, Any]:
    """Returns `state_path` or `etcd` for the settings, from a value of `--state`."""
    if state is None:
        return {}
    return {"etcd": EtcdAddress.parse(state)} if is_etcd(state) else {"state_path": Path(state)}


def token_settings(token_file: Path | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns `token` or `token_file` for the settings: `token_file`, else PACELINE_TOKEN or PACELINE_TOKEN_FILE.

    An empty variable is an error: the command which should fill it has failed, and no caller would be asked for a
    token.
    """
    if token_file is not None:
        return {"token_file": token_file}
    token, path = environ.get("PACELINE_TOKEN"), environ.get("PACELINE_TOKEN_FILE")
    for name, value in (("PACELINE_TOKEN", token), ("PACELINE_TOKEN_FILE", path)):
        if value is not None and not value.strip():
            raise ValueError(f"{name} is set, but empty: unset it if callers need no token")
    if token and path:
        raise ValueError("PACELINE_TOKEN and PACELINE_TOKEN_FILE are both set: unset one of them")
    if token and (flaw := token_flaw(token)):
        raise ValueError(f"PACELINE_TOKEN {flaw}")
    if path:
        return {"token_file": Path(path)}
    return {"token": token} if token else {}
