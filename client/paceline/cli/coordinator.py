"""`paceline coordinator`: runs the server in the foreground until a signal ends it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline._base.terminal import UsageError, say
from paceline.cli.access import endpoint

if TYPE_CHECKING:
    from paceline_server.settings import ServerSettings

DEFAULT_HTTP_PORT = 7401


def run_coordinator(
    listen: str,
    state: str | None,
    restart_after: float | None = None,
    settle_time: float | None = None,
    *,
    max_silence: float | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    tls_ca: Path | None = None,
    token_file: Path | None = None,
    insecure: bool = False,
    http: str | None = None,
    advertise: str | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM, after which the exit code is 0."""
    from paceline_server.security.tls import TlsUnusable
    from paceline_server.security.tokens import TokensUnusable
    from paceline_server.serving import serve
    from paceline_server.settings import HttpUnusable, ServerSettings, check_http, state_settings, token_settings

    where = endpoint(listen)
    page = None if http is None else endpoint(http or "127.0.0.1", default_port=DEFAULT_HTTP_PORT)
    if restart_after is not None and not restart_after > 0:
        raise UsageError(f"--restart-after must be above 0, not {restart_after:g}")
    if settle_time is not None and not settle_time > 0:
        raise UsageError(f"--settle-time must be above 0, not {settle_time:g}")
    if max_silence is not None and not max_silence > 0:
        raise UsageError(f"--max-silence must be above 0, not {max_silence:g}")
    try:
        settings = ServerSettings(
            listen=str(where),
            http=None if page is None else str(page),
            advertise=None if advertise is None else str(endpoint(advertise)),
            **state_settings(state),
            restart_after=restart_after,
            settle_time=ServerSettings().settle_time if settle_time is None else settle_time,
            max_silence=ServerSettings().max_silence if max_silence is None else max_silence,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_ca=tls_ca,
            **token_settings(token_file, os.environ),
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    if page is not None:
        try:
            check_http()
        except HttpUnusable as error:
            raise UsageError(str(error)) from None
    if not (settings.wants_token or settings.tls_ca or insecure or page is None or page.is_loopback):
        raise UsageError(
            f"anyone who can reach {page} can view every job, and stop it: give --token-file, PACELINE_TOKEN "
            "(openssl rand -hex 32) or --tls-ca (paceline certs); --insecure is for a network where everybody is "
            "trusted"
        )
    if not (where.is_loopback or settings.wants_token or settings.tls_ca or insecure):
        raise UsageError(
            f"everyone who can reach {where} could join, read and stop every job: give --token-file, PACELINE_TOKEN "
            "(openssl rand -hex 32) or --tls-ca (paceline certs); use --insecure only on a network where you trust "
            "everybody"
        )
    # Shows the operator jobs, views and losses as they happen.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("paceline_server.app").setLevel(logging.WARNING)  # `say` reports start and stop below

    def announce(address: str, url: str) -> None:
        say(f"the coordinator listens on {address}{_terms(settings)}")
        if settings.etcd is not None:
            say(f"its state is in {settings.etcd}; it leads, or stands by while another coordinator leads")
        if url:
            say(f"the page is at {url}; metrics are at {url}metrics")
        if where.is_loopback:
            needs = "" if settings.wants_token or settings.tls_ca else ", and needs a token or certificates"
            say(f"only this machine can reach it; --listen 0.0.0.0:{where.port} lets other machines in{needs}")

    try:
        serve(settings, announce)
    except (TlsUnusable, TokensUnusable) as error:
        raise UsageError(str(error)) from None
    say("the coordinator has stopped")


def _terms(settings: ServerSettings) -> str:
    """Says in words what callers of the coordinator need."""
    wants = []
    if settings.tls_ca is not None:
        wants.append("a certificate")
    if settings.wants_token:
        wants.append("a token")
    tls = " with TLS" if settings.tls_cert is not None else ""
    return tls + (f"; callers need {' and '.join(wants)}" if wants else "")
