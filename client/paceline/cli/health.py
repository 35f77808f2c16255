"""A container's health check: python -m paceline.cli.health HOST:PORT.

It asks the standard grpc.health.v1 service whether the server serves. The exit code is 0 for yes; otherwise it prints
the reason, which Docker and Kubernetes show beside the container. It needs no token. If the server has TLS, it needs
PACELINE_TLS_CA, and a certificate too if the server requires one.
"""

from __future__ import annotations

import sys
import time

from paceline._base.rpc import call_options, grpc
from paceline.credentials import Credentials

# isort: split
# It imports grpc itself, so `paceline._base.rpc` comes first.
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

_TIMEOUT_S = 3.0
_AGAIN_S = 0.1
"""Seconds between a call that an overloaded server has cancelled and the next one."""


def trouble_at(address: str, timeout: float = _TIMEOUT_S) -> str:
    """Says why the server at the address does not serve; empty if it answers that it does."""
    with Credentials.tls_from_environment().probe_channel(address, call_options(timeout)) as channel:
        try:
            status = _status(HealthStub(channel), time.monotonic() + timeout)
        except grpc.RpcError as error:
            return f"{address} does not answer: {error.details()}"
    if status == HealthCheckResponse.SERVING:
        return ""
    return f"{address} answers {HealthCheckResponse.ServingStatus.Name(status)}"


def _status(server: HealthStub, until: float) -> HealthCheckResponse.ServingStatus.ValueType:
    """Asks the server, and asks again if it is too busy to take the call; raises RpcError without an answer."""
    while True:
        try:
            return server.Check(HealthCheckRequest(), timeout=until - time.monotonic()).status
        except grpc.RpcError as error:
            # While a thousand calls wait, grpc's server cancels new ones at random. The server is busy, but well.
            if error.code() is not grpc.StatusCode.CANCELLED or time.monotonic() > until - _AGAIN_S:
                raise
            time.sleep(_AGAIN_S)


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
