"""Credentials by which this process and others identify each other: certificates for TLS, a token for the coordinator.

TLS is all or nothing (decision 23): with an authority everything uses TLS: calls to the coordinator, calls to the
doors of members, and this worker's own door. A coordinator's certificate is checked for its host name, a member's for
MEMBER_NAME, whatever its address. The token is shown to the coordinator only.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from paceline._base.proofs import DoorKey, TokenSource, proving
from paceline._base.rpc import aio, grpc, untyped
from paceline._base.tls import TlsFiles, check_member, make_context
from pacelinepb.private_files import FileTooOpen, read_private
from pacelinepb.token_lines import token_flaw

__all__ = ["IN_THE_CLEAR", "MEMBER_NAME", "Credentials"]

MEMBER_NAME = "member.paceline"
"""The name in every member's certificate, which callers of a member's door expect."""

_CA, _CERT, _KEY = "PACELINE_TLS_CA", "PACELINE_TLS_CERT", "PACELINE_TLS_KEY"

_Options = Sequence[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Credentials:
    """Certificates in PEM, and a token. The `repr` contains no secret.

    Args:
        ca: certificate of the authority by which others are checked; None for no TLS.
        cert: this worker's certificate, for MEMBER_NAME. Workers need it for their doors; the command line does not.
        key: the certificate's key.
        token: the token, or the path of a file that is read again when the token is shown, at most once a second.
        door_key: the key that this member proves to have at others' doors, and callers at its own; None for no proof.

    Raises:
        ValueError: arguments do not go together, the token's file cannot be read, or a certificate cannot be used.
    """

    ca: bytes | None = None
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    token: str | Path | TokenSource | None = field(default=None, repr=False)
    door_key: DoorKey | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_together({"ca": self.ca, "cert": self.cert, "key": self.key}, ("ca", "cert", "key"))
        if isinstance(self.token, (str, Path)):
            object.__setattr__(self, "token", TokenSource(self.token))
        if (files := self.files) is not None:
            make_context(files)  # checks them

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Reads PACELINE_TLS_CA, _CERT and _KEY, and PACELINE_TOKEN or _TOKEN_FILE.

        Args:
            environ: the variables; None for those of this process.

        Raises:
            ValueError: a variable that another one needs is missing, one is set but empty, or a file cannot be read or
                used; the text says which. `FileTooOpen` if other users may read the key or the token.
        """
        environ = os.environ if environ is None else environ
        token, token_file = (
            _filled(environ, name, "you use no token") for name in ("PACELINE_TOKEN", "PACELINE_TOKEN_FILE")
        )
        if token and token_file:
            raise ValueError("PACELINE_TOKEN and PACELINE_TOKEN_FILE are both set: unset one of them")
        if token and (flaw := token_flaw(token)):
            raise ValueError(f"PACELINE_TOKEN {flaw}")
        return cls._from_environment(environ, Path(token_file) if token_file else token)

    @classmethod
    def tls_from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Reads PACELINE_TLS_CA, _CERT and _KEY; for calls that show no token.

        Args:
            environ: the variables; None for those of this process.

        Raises:
            ValueError: as for `from_environment`.
        """
        return cls._from_environment(os.environ if environ is None else environ, None)

    @classmethod
    def _from_environment(cls, environ: Mapping[str, str], token: str | Path | None) -> Self:
        paths = {name: _filled(environ, name, "you use no TLS") for name in (_CA, _CERT, _KEY)}
        _check_together(paths, (_CA, _CERT, _KEY))
        ca, cert, key = _read(_CA, paths[_CA]), _read(_CERT, paths[_CERT]), _read(_KEY, paths[_KEY], secret=True)
        try:
            return cls(ca, cert, key, token)
        except ValueError as error:
            names = ", ".join(f"{name}={path}" for name, path in paths.items() if path)
            raise ValueError(f"{error}{f' ({names})' if names else ''}") from None

    def __repr__(self) -> str:
        tls = "none" if self.ca is None else "mutual" if self.cert is not None else "authority only"
        return f"Credentials(tls={tls!r}, token={self.token!r})"

    @property
    def files(self) -> TlsFiles | None:
        """The certificates and key for TLS; None for no TLS."""
        return None if self.ca is None else TlsFiles(self.ca, self.cert, self.key)

    def for_worker(self) -> Self:
        """Returns these credentials, if a worker can use them.

        Raises:
            ValueError: the worker's door would not use TLS although the rest does, or other members would refuse its
                certificate; the text says what is missing or wrong.
        """
        if self.ca is not None and self.cert is None:
            raise ValueError(
                f"{_CA} is set, but {_CERT} and {_KEY} are not: connections from other members would not be encrypted. "
                "paceline certs makes a certificate for members"
            )
        if self.files is not None:
            check_member(self.files, MEMBER_NAME)
        return self

    def coordinator_channel(self, address: str, options: _Options) -> aio.Channel:
        """Opens a channel to the coordinator. Calls with one answer show the token; session streams need `metadata`.

        Streams have no interceptor: grpc.aio would put a queue between their writer and the wire.
        """
        shows: Any = None
        if self._source is not None:  # two objects: grpc would call only one method of one
            shows = [_ShowsToken(self._source.current), _ShowsTokenOfStream(self._source.current)]
        target = _target(address)
        if self.ca is None:
            return aio.insecure_channel(target, options=options, interceptors=shows)
        return aio.secure_channel(target, self._channel_credentials(), options=options, interceptors=shows)

    def member_channel(self, address: str, options: _Options) -> aio.Channel:
        """Opens a channel to a member's door. It shows no token; unary calls prove that this member has `door_key`."""
        target = _target(address)
        proves: Any = None if self.door_key is None else proving(self.door_key)
        if self.ca is None:
            return aio.insecure_channel(target, options=options, interceptors=proves)
        named = [*options, ("grpc.ssl_target_name_override", MEMBER_NAME)]
        return aio.secure_channel(target, self._channel_credentials(), options=named, interceptors=proves)

    def probe_channel(self, address: str, options: _Options) -> grpc.Channel:
        """Opens a channel for blocking calls to the coordinator's health service, which needs no token."""
        target = _target(address)
        if self.ca is None:
            return grpc.insecure_channel(target, options=options)
        return grpc.secure_channel(target, self._channel_credentials(), options=options)

    def add_port(self, server: aio.Server, where: str) -> int:
        """Makes a worker's door listen; with TLS every caller needs a certificate of the same authority.

        Returns:
            The port.

        Raises:
            RuntimeError: the address cannot be bound.
        """
        if self.ca is None:
            return server.add_insecure_port(where)
        assert self.cert is not None, "a worker's credentials are checked by for_worker"
        credentials = untyped(grpc).ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=True)
        return server.add_secure_port(where, credentials)

    async def metadata(self) -> aio.Metadata:
        """Returns the metadata that a stream to the coordinator shows; empty without a token."""
        return aio.Metadata() if self._source is None else await _bearer(self._source.current)

    @property
    def _source(self) -> TokenSource | None:
        assert not isinstance(self.token, (str, Path))
        return self.token

    def _channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


def _target(address: str) -> str:
    """Returns grpc's target for "host:port": it would take hosts such as "dns" in "dns:7400" for a scheme."""
    return f"dns:///{quote(address, safe=':')}"


class _ShowsToken(aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Adds the token to the metadata of each unary call."""

    def __init__(self, token: Callable[[], Awaitable[str]]) -> None:
        self._token = token

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """See `grpc.aio`."""
        return await continuation(await _shown(self._token, client_call_details), request)


class _ShowsTokenOfStream(aio.StreamUnaryClientInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Adds the token to the metadata of each call whose request takes several messages."""

    def __init__(self, token: Callable[[], Awaitable[str]]) -> None:
        self._token = token

    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """See `grpc.aio`."""
        return await continuation(await _shown(self._token, client_call_details), request_iterator)


async def _shown(token: Callable[[], Awaitable[str]], details: Any) -> Any:
    metadata = await _bearer(token)
    for name, value in details.metadata or ():
        metadata.add(name, value)
    return details._replace(metadata=metadata)


async def _bearer(token: Callable[[], Awaitable[str]]) -> aio.Metadata:
    return aio.Metadata(("authorization", f"Bearer {await token()}"))


def _filled(environ: Mapping[str, str], name: str, unless: str) -> str | None:
    """Returns the value of a variable; None if it is unset.

    Raises:
        ValueError: the variable is empty, probably because a command failed; ignoring it would leave the job open.
    """
    value = environ.get(name)
    if value is not None and not value.strip():
        raise ValueError(f"{name} is set, but empty: unset it if {unless}")
    return value


def _check_together(given: Mapping[str, object], names: tuple[str, str, str]) -> None:
    """Checks that a certificate has its key, and that both come with an authority."""
    ca, cert, key = names
    if (given[cert] is None) != (given[key] is None):
        there, missing = (cert, key) if given[key] is None else (key, cert)
        raise ValueError(f"{there} is set, but {missing} is not: a certificate and its key go together")
    if given[cert] is not None and given[ca] is None:
        raise ValueError(
            f"{cert} and {key} are set, but {ca} is not: without the authority, others' certificates cannot be checked"
        )


def _read(name: str, path: str | None, *, secret: bool = False) -> bytes | None:
    if path is None:
        return None
    try:
        return read_private(Path(path)) if secret else Path(path).read_bytes()
    except FileTooOpen as error:
        raise FileTooOpen(f"{name}: {error}") from None
    except OSError as error:
        raise ValueError(f"{name}: cannot read {path}: {error.strerror or error}") from None


IN_THE_CLEAR = Credentials()
"""No TLS and no token."""
