"""What an operator may choose: addresses, the state file, limits, and the few times that no job chooses for itself.

Everything that follows from a job's `failure_timeout` is computed where it is used, not set here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

__all__ = ["ServerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of a coordinator; checked at construction.

    Raises:
        ValueError: a number is not above 0, or the address is not host:port; the text names the setting.
    """

    listen: str = "127.0.0.1:7400"
    """Where to listen, host:port. Loopback by default: nothing is authenticated yet. Port 0 takes a free one."""

    state_path: Path | None = None
    """SQLite file for what must outlive the process; None keeps it in memory."""

    restart_after: float | None = None
    """Seconds after which the members of a job's last generation are taken for dead, if none of them has had a stream
    and candidates wait; None for never: then an operator has to say so (`paceline restart`)."""

    settle_time: float = 0.2
    """Seconds without an arrival after which a view forms with fewer than `max_workers`."""

    gather_time: float = 0.02
    """Seconds for which reports gather before they are judged: neighbours of one death report within milliseconds."""

    doubt_time: float = 0.1
    """Seconds before a broken link between two members that both seem well is judged: the news that one of them died
    may be a little behind. Well below the 0.5 s (`failure_timeout` / 6) for which members wait for the verdict."""

    announce_interval: float = 0.5
    """Least seconds between two rounds of `Waiting` to all candidates of a job: W arrivals would send W^2 messages."""

    max_jobs: int = 1_000
    """Jobs that are known at one time. A job's generation number is kept for ever, so jobs do not go away."""

    max_sessions: int = 10_000
    """Sessions of all jobs together."""

    max_pending_messages: int = 256
    """Messages that may wait for one slow session; beyond that its stream is ended and it may resume."""

    max_name_bytes: int = 128
    """Bytes of a job's name, UTF-8."""

    max_barrier_name_bytes: int = 256
    """Bytes of a barrier's name, UTF-8."""

    max_open_barriers: int = 1_000
    """Named barriers that wait at one time in one job; as many passed names are remembered for repeats."""

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

    max_store_bytes: int = 256 << 20
    """Bytes of all keys and values of one job."""

    max_wait_keys: int = 1_000
    """Keys in one Wait."""

    max_waiters: int = 20_000
    """Store calls of all jobs that wait at one time."""

    page_members: int = 1_000
    """Members in one page of GetView: about 0.1 MB."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not value > 0:
                raise ValueError(f"{field.name} must be above 0, not {value!r}")
        host, colon, port = self.listen.rpartition(":")
        if not (colon and host and port.isdecimal() and int(port) <= 65_535):
            raise ValueError(f"listen must be host:port, not {self.listen!r}")
