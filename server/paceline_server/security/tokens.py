"""Reads the file of tokens, says what a caller with a token may do, and warns if others can reach an address. Pure.

Tokens are kept only as SHA-256 digests. A caller's token is compared with every one of them in constant time: the time
reveals neither which one matches nor its length.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline_server.errors import PermissionDenied, Unauthenticated
from paceline_server.settings import ServerSettings
from pacelinepb.token_lines import MIN_TOKEN_CHARACTERS, token_flaw, token_lines

MAX_TOKENS = 1_000
"""The most tokens: each call's token is compared with all of them, at about 0.5 microseconds each."""

_SCHEME = "bearer"

_ROLE = "role="

_OF_RUN = re.compile(r"(.+)/(?:nodes|[0-9]+(?:\.[0-9]+)?)", re.ASCII | re.DOTALL)
"""Jobs of a run: RUN/nodes, in which torchrun's agents are members, and its workers' jobs: RUN/3 in the third round,
and RUN/3.1 for the backend of torch.distributed."""


class TokensUnusable(ValueError):
    """The tokens cannot be used; the text says where and why, and shows none of them."""


class Role(enum.IntEnum):
    """The rights of a caller; each role includes those before it."""

    READ = 0
    """Sees jobs and their members."""
    WORKER = 1
    """Is a member of a job, uses its store, and reports how a worker ended."""
    OPERATOR = 2
    """Makes members leave, ends a job's line, forgets a job."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The jobs that a token is good for, and its role there.

    `jobs` also stands for those of runs with these names; None for all jobs, and for calls about no job. `line` is the
    first one of the token file that has the token; 0 if it is in no file.
    """

    jobs: frozenset[str] | None = None
    role: Role = Role.OPERATOR
    line: int = field(default=0, compare=False)

    def allows(self, job: str) -> bool:
        """Returns True if the token is good for the job."""
        return self.jobs is None or job in self.jobs or run_of(job) in self.jobs

    def check_role(self, needed: Role) -> None:
        """Lets a call through that needs this role."""
        if self.role < needed:
            raise PermissionDenied(
                f"the token has the role {self.role.name.lower()!r}, and this call needs {needed.name.lower()!r}: "
                "use a token with that role"
            )

    def check(self, job: str) -> None:
        """Lets a call for the job through."""
        if not self.allows(job):
            raise PermissionDenied("the token is valid for another job: use one that is valid for this job")


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that are in force: what each is good for, by its SHA-256 digest."""

    grants: Mapping[bytes, Grant]

    @classmethod
    def single(cls, token: str) -> Tokens:
        """Makes tokens of a single one, good for all jobs."""
        _check(token, "the token")
        return cls({_digest(token): Grant()})

    @classmethod
    def parse(cls, text: str) -> Tokens:
        """Reads a file of tokens: on a line `TOKEN`, `TOKEN JOB`, `TOKEN role=ROLE` or `TOKEN role=ROLE JOB`.

        A token without a role is an operator's, and one without a job is good for all jobs. `#` begins a comment
        line. A token on several lines is good for the jobs of all these lines, in one role.
        """
        jobs: dict[bytes, set[str] | None] = {}
        roles: dict[bytes, Role] = {}
        first: dict[bytes, int] = {}
        try:
            lines = list(token_lines(text))
        except ValueError as error:
            raise TokensUnusable(str(error)) from None
        for number, token, rest in lines:
            _check(token, f"the token in line {number}")
            digest = _digest(token)
            first.setdefault(digest, number)
            role, job = _read_rest(rest, number)
            if roles.setdefault(digest, role) is not role:
                raise TokensUnusable(
                    f"the token in line {number} has another role in a line above: a token has one role"
                )
            if not job:
                jobs[digest] = None
            elif (known := jobs.setdefault(digest, set())) is not None:
                known.add(job)
        if not jobs:
            raise TokensUnusable("there is no token in it; a line is TOKEN, TOKEN JOB or TOKEN role=ROLE JOB")
        if len(jobs) > MAX_TOKENS:
            raise TokensUnusable(f"there are {len(jobs)} tokens in it, but at most {MAX_TOKENS} are allowed")
        return cls(
            {
                digest: Grant(None if of is None else frozenset(of), roles[digest], first[digest])
                for digest, of in jobs.items()
            }
        )

    def grant(self, authorization: str | None) -> Grant:
        """Returns what a caller may do, from "Bearer TOKEN" or None; else raises `Unauthenticated`."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != _SCHEME or not token.strip():
            raise Unauthenticated("it wants a token: set PACELINE_TOKEN or PACELINE_TOKEN_FILE")
        shown = _digest(token.strip())
        found: Grant | None = None
        for digest, grant in self.grants.items():  # all of them, even after a match
            if hmac.compare_digest(digest, shown):
                found = grant
        if found is None:
            raise Unauthenticated(
                "it does not know this token; if tokens were changed, set PACELINE_TOKEN or PACELINE_TOKEN_FILE to one "
                "that is valid now"
            )
        return found


def run_of(job: str) -> str:
    """Returns the run's name if this is one of a run's jobs, else the job itself."""
    found = _OF_RUN.fullmatch(job)
    return job if found is None else found[1]


def _read_rest(text: str, number: int) -> tuple[Role, str]:
    """Reads what follows a token on a line: its role, and its job, which is empty for all jobs."""
    if not text.startswith(_ROLE):
        return Role.OPERATOR, text.strip()
    name, _, job = text.removeprefix(_ROLE).strip().partition(" ")
    role = next((each for each in Role if each.name.lower() == name), None)
    if role is None:
        names = ", ".join(each.name.lower() for each in Role)
        raise TokensUnusable(f"line {number} has an unknown role: {_ROLE} must be followed by one of {names}")
    return role, job.strip()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _check(token: str, what: str) -> None:
    if flaw := token_flaw(token):
        raise TokensUnusable(f"{what} {flaw}")
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise TokensUnusable(
            f"{what} has {len(token)} characters, but needs at least {MIN_TOKEN_CHARACTERS}: openssl rand -hex 32 "
            "makes one"
        )


def exposure(settings: ServerSettings) -> str | None:
    """Returns a warning if others can reach this coordinator without a token or can read its traffic, else None."""
    address = next((each for each in (settings.listen, settings.http) if each and not is_loopback(each)), None)
    if address is None:
        return None
    if not settings.wants_token and settings.tls_ca is None:
        return (
            f"everyone who can reach {address} can join, read and stop every job: callers are not "
            "authenticated. Set PACELINE_TOKEN or --token-file, and --tls-cert and --tls-key (paceline certs makes "
            "them)"
        )
    if settings.tls_cert is None:
        return (
            f"the token can be read on the wire to {address}: nothing is encrypted. Set --tls-cert and "
            "--tls-key (paceline certs makes them)"
        )
    return None


def is_loopback(address: str) -> bool:
    """Returns True if only this machine reaches host:port."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
