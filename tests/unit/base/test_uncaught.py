"""How an uncaught error of Paceline is shown."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from paceline._base.uncaught import in_short, users_place
from paceline.errors import InvalidRank, PacelineError, PeerLost, PeerRaised
from paceline.testing import local_groups

LAST = "  PeerLost in operation 12 of generation 3; PACELINE_TRACEBACK=1 shows the whole stack"


def run(code: str, file: Path, name: str = "__main__", **names: Any) -> tuple[PacelineError, TracebackType | None]:
    """Runs code as if it were in that file; returns the error that ends it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    with pytest.raises(PacelineError) as caught:
        exec(compile(code, str(file), "exec"), {"__name__": name, **names})
    return caught.value, caught.value.__traceback__


def test_message_comes_first_then_the_user_s_line_then_details(tmp_path: Path) -> None:
    (group,) = local_groups(1)
    script = tmp_path / "train.py"
    error, trace = run("def main():\n    group.send(x, 7)\nmain()\n", script, group=group, x=0)
    assert isinstance(error, InvalidRank)
    first, *rest = in_short(error, trace).splitlines()
    assert first == f"paceline: {error}"
    assert rest[:2] == [f'  File "{script}", line 2, in main', "    group.send(x, 7)"], "no frame of Paceline's own"
    assert rest[2].startswith("  InvalidRank")
    assert len(rest) == 3


def test_last_line_names_error_type_operation_and_generation() -> None:
    error = PeerLost("rank 2 (h, pid 5) was killed by SIGKILL", ranks=(2,), operation=12, generation=3)
    assert in_short(error, None).splitlines() == ["paceline: rank 2 (h, pid 5) was killed by SIGKILL", LAST]
    assert in_short(PeerLost("x"), None).splitlines()[1].startswith("  PeerLost; ")
    assert in_short(PeerLost(""), None).splitlines()[0] == "paceline: PeerLost"


@pytest.mark.parametrize("library", ["torch/_tensor.py", "numpy/core.py"])
def test_library_frames_between_user_and_paceline_are_omitted(tmp_path: Path, library: str) -> None:
    site = tmp_path / "site-packages"
    inner: dict[str, Any] = {"__name__": library.partition("/")[0], "PeerLost": PeerLost}
    exec(compile("def backward():\n    raise PeerLost('gone')\n", str(site / library), "exec"), inner)
    error, trace = run("loss.backward()\n", tmp_path / "train.py", loss=_Namespace(inner))
    assert f'  File "{tmp_path / "train.py"}", line 1, in <module>' in in_short(error, trace).splitlines()


def test_the_innermost_line_is_shown_if_all_code_is_installed(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "mine" / "loop.py"
    start = Path(str(sysconfig.get_path("scripts"))) / "mine-train"
    inner: dict[str, Any] = {"__name__": "mine.loop", "PeerLost": PeerLost}
    package.parent.mkdir(parents=True)
    package.write_text("def train():\n    raise PeerLost('gone')\n")
    exec(compile(package.read_text(), str(package), "exec"), inner)
    outer = {"__name__": "__main__", "train": inner["train"]}
    with pytest.raises(PeerLost) as caught:
        exec(compile("train()\n", str(start), "exec"), outer)
    # The first frame of the stack is this test's, which is the user's code to Paceline.
    assert caught.value.__traceback__ is not None
    trace = caught.value.__traceback__.tb_next
    assert in_short(caught.value, trace).splitlines()[1] == f'  File "{package}", line 2, in train'


def test_the_cause_of_an_error_is_shown_with_its_line(tmp_path: Path) -> None:
    code = "try:\n    int('x')\nexcept ValueError as error:\n    raise PeerRaised('rank 0 raised') from error\n"
    error, trace = run(code, tmp_path / "train.py", PeerRaised=PeerRaised)
    lines = in_short(error, trace).splitlines()
    assert lines[1:3] == [
        f'  File "{tmp_path / "train.py"}", line 4, in <module>',
        "    " + code.splitlines()[3].strip(),
    ]
    assert lines[3] == "  because of ValueError: invalid literal for int() with base 10: 'x'"
    assert lines[4:6] == [f'  File "{tmp_path / "train.py"}", line 2, in <module>', "    int('x')"]


def test_the_account_of_grpc_is_not_shown(tmp_path: Path) -> None:
    """Paceline's error says the same in one line."""

    class GrpcError(Exception):
        __module__ = "grpc.aio._call"

    code = "try:\n    raise GrpcError('six lines')\nexcept GrpcError as error:\n    raise PeerRaised('no') from error\n"
    error, trace = run(code, tmp_path / "train.py", PeerRaised=PeerRaised, GrpcError=GrpcError)
    assert "six lines" not in in_short(error, trace)
    assert "because of" not in in_short(error, trace)


def test_code_without_a_file_is_shown_without_source() -> None:
    with pytest.raises(PeerLost) as caught:
        exec(compile("raise PeerLost('x')", "<string>", "exec"), {"PeerLost": PeerLost, "__name__": "__main__"})
    lines = in_short(caught.value, caught.value.__traceback__).splitlines()
    assert lines[1] == '  File "<string>", line 1, in <module>'
    assert len(lines) == 3


class _Namespace:
    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__.update(names)


def test_users_place_has_the_file_name_without_its_folder(tmp_path: Path) -> None:
    """Other members are told of it: folders may have names that are no business of theirs."""
    script, places = tmp_path / "train.py", []
    code = "\n\ntake(here())"
    exec(compile(code, str(script), "exec"), {"take": places.append, "here": lambda: users_place(sys._getframe(1))})
    assert places == ["train.py:3"]
