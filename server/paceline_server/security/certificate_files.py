"""Certificates that change while the coordinator serves: new connections get the new one, those that are there stay.

grpc asks before each handshake, on a thread of its own, and must not wait there; so a daemon thread looks at the files
every `LOOK_S`, and has ready what has changed. One look that hangs, where a network is away, holds up the next only.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

from paceline_server._grpc import grpc
from paceline_server.apart import call_apart
from paceline_server.security.tls import Certificates, TlsPaths, TlsUnusable

__all__ = ["CertificateKeeper"]

_log = logging.getLogger(__name__)

LOOK_S = 10.0
"""Seconds between two looks at the files."""

FIRST_S = 10.0
"""For how long the first look is waited for, without which nothing can be served."""


class CertificateKeeper:
    """The certificates that are in force. What cannot be used leaves the last ones in force, with an error in the log.

    Args:
        paths: of the files.
        held: what was in them at the start.
    """

    def __init__(self, paths: TlsPaths, held: Certificates) -> None:
        self._paths = paths
        self._held = held
        self._changed: deque[Certificates] = deque(maxlen=1)
        self._trouble = ""
        self._closed = threading.Event()
        self.credentials = grpc.dynamic_ssl_server_credentials(
            held.configuration(),
            self._newer,  # type: ignore[arg-type]  # grpc-stubs lack the None that means no change
            require_client_authentication=held.ca is not None,
        )
        threading.Thread(target=self._watch, name="paceline-certificates", daemon=True).start()

    @classmethod
    async def open(cls, paths: TlsPaths) -> CertificateKeeper:
        """Reads the files.

        Raises:
            TlsUnusable: they cannot be used, or were not read within `FIRST_S`.
        """
        try:
            return cls(paths, await call_apart(paths.read, "paceline-first-certificates", FIRST_S))
        except TimeoutError:
            raise TlsUnusable(
                f"cannot read {paths}: nothing came of it in {FIRST_S:g} s. Is the network away that they are on?"
            ) from None

    def close(self) -> None:
        """No more looks."""
        self._closed.set()

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """For grpc: None if nothing has changed."""
        try:
            return self._changed.popleft().configuration()
        except IndexError:
            return None

    def _complain(self, error: Exception) -> None:
        """Once, not at every look."""
        trouble = f"{type(error).__name__}: {error}"
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if isinstance(error, (TlsUnusable, OSError)):  # OSError: there are too many open files
            _log.error("%s; the last certificate stays in force", error)
        else:
            _log.error("cannot read %s; the last certificate stays in force", self._paths, exc_info=error)

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                found = self._paths.read(self._held)
            except Exception as error:  # noqa: BLE001  # whatever it is, nobody else takes it, and the next look may be better
                self._complain(error)
                continue
            self._trouble = ""
            if found is not self._held:
                _log.info("the certificate %s has changed, and is in force", self._paths.cert)
                self._held = found
                self._changed.append(found)
