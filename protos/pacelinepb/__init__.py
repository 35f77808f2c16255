"""Messages and stubs of the Paceline protocol, generated from the .proto files beside them."""

__all__ = ["ERROR_DOMAIN", "PROTOCOL_VERSION"]

PROTOCOL_VERSION = 5
"""Changes when an old worker and a new coordinator (or the reverse) could misunderstand each other."""

ERROR_DOMAIN = "paceline"
"""`domain` of every `google.rpc.ErrorInfo` that Paceline sends."""
