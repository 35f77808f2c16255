"""A container's health check: python -m paceline.cli.health HOST:PORT.

Asks the standard grpc.health.v1 service whether the server serves, with exit code 0 for yes; otherwise it says why not,
and Docker and Kubernetes show that beside the container. It needs no token; where the server has TLS, PACELINE_TLS_CA,
and a certificate too if the server asks for one.
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
    """Why the server at the address does not serve; empty if it answers that it does.

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
    """Exits with 0, or with 1 and why on stderr."""
    try:
        trouble = trouble_at(sys.argv[1])
    except ValueError as error:
        sys.exit(f"paceline: {error}")
    if trouble:
        sys.exit(f"paceline: {trouble}")


if __name__ == "__main__":
    main()
