"""Messages and stubs of Paceline's protocol, generated from the .proto files beside them."""

__all__ = ["ERROR_DOMAIN", "MOST_KINDS", "MOST_PIDS", "PROTOCOL_VERSION", "install_command"]

PROTOCOL_VERSION = 8
"""The version changes when an old worker and a new coordinator (or the reverse) could misunderstand each other."""

ERROR_DOMAIN = "paceline"
"""The `domain` of every `google.rpc.ErrorInfo` that Paceline sends."""

MOST_KINDS = 8
"""The most kinds of links in a heartbeat (`sent_bytes`), and of one job that are counted by name."""

MOST_PIDS = 64
"""The most processes of its host that a member is asked to signal at one time (`AskMembersRequest.pids`)."""


def install_command(extra: str) -> str:
    """Returns the command that installs Paceline with an extra, for errors that say that one is missing.

    Paceline is not on the package index yet, so it is installed from its repository, as README says.
    """
    return f'pip install "paceline[{extra}] @ git+https://github.com/paceline/paceline"'
