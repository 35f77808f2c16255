"""The gRPC services: handlers that check, call, and answer. They decide nothing."""
