"""A container's health check: python -m paceline.cli.health HOST:PORT.

It asks the standard grpc.health.v1 service whether the server serves. The exit code is 0 for yes; otherwise it prints
the reason, which Docker and Kubernetes show beside the container. It needs no token. If the server has TLS, it needs
PACELINE_TLS_CA, and a certificate too if the server requires one.
"""

from __future__ import annotations

import sys

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from paceline._grpc import grpc
from paceline._rpc import call_options
from paceline.credentials import Credentials

__all__ = ["main", "trouble_at"]

_TIMEOUT_S = 3.0


def trouble_at(address: str, timeout: float = _TIMEOUT_S) -> str:
    """Says why the server at the address does not serve; empty if it answers that it does.

    Raises:
        ValueError: the PACELINE_* variables for TLS cannot be used.
    """
    with Credentials.tls_from_environment().probe_channel(address, call_options(timeout)) as channel:
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            return f"{address} does not answer: {error.details()}"
    if answer.status == HealthCheckResponse.SERVING:
        return ""
    return f"{address} answers {HealthCheckResponse.ServingStatus.Name(answer.status)}"


def main() -> None:
    """Exits with 0, or with 1 and the reason on stderr."""
    try:
        trouble = trouble_at(sys.argv[1])
    except ValueError as error:
        sys.exit(f"paceline: {error}")
    if trouble:
        sys.exit(f"paceline: {trouble}")


if __name__ == "__main__":
    main()
