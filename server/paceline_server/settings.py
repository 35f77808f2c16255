"""What an operator may choose: addresses, the state file, limits, and the few times that no job chooses for itself.

Everything that follows from a job's `failure_timeout` is computed where it is used, not set here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline_protocol import ProtocolSettings
from paceline_server.process_limits import usable_bytes
from pacelinepb.pieces import MESSAGE_BYTES

__all__ = ["ServerSettings", "token_settings"]


_MOST_MEMORY = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(ProtocolSettings):
    """Settings of a coordinator; checked at construction.

    Raises:
        ValueError: a number is not above 0, the address is not host:port, or settings do not go together; the text
            names the setting.
    """

    listen: str = "127.0.0.1:7400"
    """Where to listen, host:port. Loopback by default: a token and TLS are yours to set. Port 0 takes a free one."""

    state_path: Path | None = None
    """SQLite file for what must outlive the process; None keeps it in memory."""

    tls_cert: Path | None = None
    """Certificate (PEM) for the name or address that callers know the coordinator by; with it TLS is served alone."""

    tls_key: Path | None = None
    """The key of the certificate (PEM)."""

    tls_ca: Path | None = None
    """Authority (PEM): callers must have a certificate of it. None asks for none."""

    token: str | None = field(default=None, repr=False)
    """One token, good for all jobs; None and no `token_file`: nobody needs one."""

    token_file: Path | None = None
    """File of tokens, `TOKEN`, `TOKEN JOB` or `TOKEN role=ROLE JOB` on a line, read again when it changes."""

    restart_after: float | None = None
    """Seconds after which the members of a job's last generation are taken for dead, if none of them has had a stream
    and candidates wait; None for never: then an operator has to say so (`paceline restart`)."""

    max_jobs: int = 1_000
    """Jobs at one time that have sessions or a line."""

    max_resting_jobs: int = 10_000
    """Jobs besides of which only the number is left, and whether they are done: some 1 KB each. If there is one more,
    the one that has been over for longest is forgotten, and jobs that are not known begin above its number, for a job's
    numbers never fall. An answer to ListJobs has room for so many."""

    keep_numbers: bool = True
    """False where no job is taken up again under its name: nothing is left of one that is over."""

    max_sessions: int = 10_000
    """Sessions of all jobs together."""

    max_job_sessions: int = 5_000
    """Sessions of one job: no job takes the places of all others."""

    max_pending_messages: int = 256
    """Messages that may wait for one slow session; beyond that its stream is ended and it may resume."""

    max_name_bytes: int = 128
    """Bytes of a job's name, UTF-8."""

    max_barrier_name_bytes: int = 256
    """Bytes of a barrier's name, UTF-8."""

    max_text_bytes: int = 2_000
    """Bytes of a report's or a leaver's sentence, UTF-8; longer ones are cut."""

    max_address_bytes: int = 512
    """Bytes of an address or a host name, UTF-8."""

    max_keys: int = 100_000
    """Keys of one job."""

    max_key_bytes: int = 1_024
    """Bytes of a key, UTF-8."""

    max_value_bytes: int = 1 << 20
    """Bytes of a value."""

    memory_bytes: int = field(default_factory=lambda: min(usable_bytes(), _MOST_MEMORY))
    """Memory that callers may take, all together: of what the process may use, its cgroup's limit or the machine's, and
    at most 2 GiB. A half is for calls, a quarter for what jobs store. One job, or one address, takes at most as much of
    either as it leaves free."""

    max_wait_keys: int = 1_000
    """Keys in one Wait."""

    message_rate: float = 1_000
    """Messages a second of one session; beyond `message_burst` at once they are read no faster."""

    message_burst: float = 5_000
    """See `message_rate`."""

    call_rate: float = 2_000
    """Calls a second by tokens for one job, or from one address, streams among them, and those that are refused for
    want of a token; beyond `call_burst` at once they are served no faster."""

    call_burst: float = 10_000
    """See `call_rate`."""

    max_calls: int = 1_000
    """Calls of one connection that are open at one time; more of them wait with the caller."""

    first_message_time: float = 10.0
    """Seconds within which a session's stream must say who it is, and a connection must have been made."""

    page_members: int = 1_000
    """Members in one page of GetView: about 0.1 MB."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"{each.name} must be above 0, not {value!r}")
        if self.memory_bytes < (least := 48 * self.longest_request):
            raise ValueError(f"memory_bytes must be {least:,} at least for such values, not {self.memory_bytes:,}")
        host, colon, port = self.listen.rpartition(":")
        if not (colon and host and port.isdecimal() and int(port) <= 65_535):
            raise ValueError(f"listen must be host:port, not {self.listen!r}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both, or neither")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("tls_ca asks callers for certificates, which needs TLS: give tls_cert and tls_key too")
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file: give one of them")

    @property
    def call_bytes(self) -> int:
        """Bytes for calls that are open."""
        return self.memory_bytes // 2

    @property
    def longest_request(self) -> int:
        """Bytes of a request that comes as several messages: one with a value, or with the keys of a Wait."""
        return MESSAGE_BYTES + self.max_value_bytes

    @property
    def store_bytes(self) -> int:
        """Bytes for the keys and values of all jobs."""
        return self.memory_bytes // 4

    @property
    def wants_token(self) -> bool:
        """True if callers must show a token."""
        return self.token is not None or self.token_file is not None


def token_settings(token_file: Path | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """`token` or `token_file` of the settings: the file that was named, else PACELINE_TOKEN or PACELINE_TOKEN_FILE.

    Raises:
        ValueError: both variables are set, or one is empty: what was to fill it has failed, and nobody would be asked
            for a token.
    """
    if token_file is not None:
        return {"token_file": token_file}
    token, path = environ.get("PACELINE_TOKEN"), environ.get("PACELINE_TOKEN_FILE")
    for name, value in (("PACELINE_TOKEN", token), ("PACELINE_TOKEN_FILE", path)):
        if value is not None and not value.strip():
            raise ValueError(f"{name} is set, but empty: unset it if callers need no token")
    if token and path:
        raise ValueError("PACELINE_TOKEN and PACELINE_TOKEN_FILE are both set: which one holds?")
    if path:
        return {"token_file": Path(path)}
    return {"token": token} if token else {}
