"""A container's health check: python -m paceline.cli.health HOST:PORT.

Asks the standard grpc.health.v1 service whether the server serves, with exit code 0 for yes. It needs no token; where
the server has TLS, PACELINE_TLS_CA, and a certificate too if the server asks for one.
"""

from __future__ import annotations

import sys

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from paceline._grpc import grpc
from paceline.credentials import Credentials
from paceline.session.wire import CHANNEL_OPTIONS

__all__ = ["is_serving", "main"]

_TIMEOUT_S = 3.0


def is_serving(address: str, timeout: float = _TIMEOUT_S) -> bool:
    """True if the server at the address answers that it serves, False for any other answer and for none.

    Raises:
        ValueError: the PACELINE_* variables for TLS cannot be used.
    """
    with Credentials.tls_from_environment().probe_channel(address, CHANNEL_OPTIONS) as channel:
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError:
            return False
    return bool(answer.status == HealthCheckResponse.SERVING)


def main() -> None:
    """Exits with 0 or 1."""
    try:
        sys.exit(0 if is_serving(sys.argv[1]) else 1)
    except ValueError as error:
        sys.exit(f"paceline: {error}")


if __name__ == "__main__":
    main()
