"""The gRPC services: handlers that check, call, and answer. Nothing is decided here."""
