"""Messages and stubs of Paceline's protocol, generated from the .proto files beside them."""

from pacelinepb._release import __version__

__all__ = [
    "ERROR_DOMAIN",
    "FRAMES_VERSION",
    "MOST_KINDS",
    "MOST_LOGGED",
    "MOST_NAME_BYTES",
    "MOST_PIDS",
    "OLDEST_PROTOCOL_VERSION",
    "PROTOCOL_VERSION",
    "RELEASE",
    "__version__",
    "install_command",
]

PROTOCOL_VERSION = 9
"""The version changes when programs of two releases could misunderstand each other.

docs/development/protocol-changes.md says what else changes with it.
"""

OLDEST_PROTOCOL_VERSION = 8
"""This release speaks all versions from this one on: that of the last release, and its own."""

FRAMES_VERSION = 8
"""The version that changed last what members of a generation send each other."""

ERROR_DOMAIN = "paceline"
"""The `domain` of every `google.rpc.ErrorInfo` that Paceline sends."""

MOST_KINDS = 8
"""The most kinds of links in a heartbeat (`sent_bytes`), and of one job that are counted by name."""

MOST_LOGGED, MOST_NAME_BYTES = 32, 64
"""The most values in a heartbeat that a script has logged (`logged`), and the longest name of one."""

MOST_PIDS = 64
"""The most processes of its host that a member is asked to signal at one time (`AskMembersRequest.pids`)."""

RELEASE = f"Paceline {__version__}"
"""Names this release in texts."""


def install_command(extra: str) -> str:
    """Returns the command that installs Paceline with an extra, for errors that say that one is missing.

    Paceline is not on the package index yet, so it is installed from its repository, as README says.
    """
    return f'pip install "paceline[{extra}] @ git+https://github.com/paceline/paceline"'
