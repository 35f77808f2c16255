"""Messages and stubs of Paceline's protocol, generated from the .proto files beside them."""

__all__ = ["ERROR_DOMAIN", "PROTOCOL_VERSION"]

PROTOCOL_VERSION = 5
"""The version changes when an old worker and a new coordinator (or the reverse) could misunderstand each other."""

ERROR_DOMAIN = "paceline"
"""The `domain` of every `google.rpc.ErrorInfo` that Paceline sends."""
