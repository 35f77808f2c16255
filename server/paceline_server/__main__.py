"""`python -m paceline_server` runs a coordinator in the foreground; `paceline coordinator` does so with more colour."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from paceline_server.serving import serve
from paceline_server.settings import ServerSettings, state_settings, token_settings


def main() -> int:
    """Parses the arguments and serves; returns the exit code."""
    parser = argparse.ArgumentParser(prog="paceline_server", description="Paceline's coordinator.")
    parser.add_argument("--listen", default=ServerSettings().listen, metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument("--http", metavar="HOST:PORT", help="serve the page, metrics and jobs here; default: nowhere")
    parser.add_argument(
        "--state",
        metavar="FILE",
        help="keep the state of jobs in this SQLite file; or, shared with other coordinators, in etcd: "
        "etcd://HOST:PORT,HOST:PORT/PREFIX",
    )
    parser.add_argument(
        "--advertise", metavar="HOST:PORT", help="with etcd: where workers and other coordinators reach this one"
    )
    parser.add_argument(
        "--restart-after",
        type=float,
        metavar="SECONDS",
        help="declare the members of a generation dead if none of them has been connected for this long and new "
        "workers wait; default: never",
    )
    parser.add_argument(
        "--settle-time",
        type=float,
        default=ServerSettings().settle_time,
        metavar="SECONDS",
        help="start with fewer workers than the maximum if no worker has joined for this long; default: %(default)s",
    )
    parser.add_argument(
        "--max-silence",
        type=float,
        default=ServerSettings().max_silence,
        metavar="SECONDS",
        help="refuse jobs with a longer PACELINE_FAILURE_TIMEOUT, and end a worker's session once it has had no "
        "connection for this long; default: %(default)s",
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE.pem", help="serve TLS with this certificate")
    parser.add_argument("--tls-key", type=Path, metavar="FILE.key", help="the key of the certificate")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE.pem", help="callers need a certificate of this authority")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="callers need a token from this file: TOKEN, TOKEN JOB or TOKEN role=ROLE JOB on each line, where ROLE is "
        "read, worker or operator (the default); default: PACELINE_TOKEN_FILE, or the token in PACELINE_TOKEN",
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = ServerSettings(
            listen=arguments.listen,
            http=arguments.http,
            advertise=arguments.advertise,
            **state_settings(arguments.state),
            restart_after=arguments.restart_after,
            settle_time=arguments.settle_time,
            max_silence=arguments.max_silence,
            tls_cert=arguments.tls_cert,
            tls_key=arguments.tls_key,
            tls_ca=arguments.tls_ca,
            **token_settings(arguments.token_file, os.environ),
        )
        serve(settings, announce=_announce)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 1
    return 0


def _announce(address: str, url: str) -> None:
    # One line on standard output, so that the process that started us can read the port.
    sys.stdout.write(f"listening on {address}\n")
    if url:
        sys.stdout.write(f"the page is at {url}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
