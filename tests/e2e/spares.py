"""Jobs of `paceline run` whose spare processes leave marks: when one has done its imports, and what it ran."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from support.command import Command
from support.waiting import wait_for

__all__ = ["Job", "pids"]


class Job:
    """A script with an installed package, which leaves a mark of each process that has imported it.

    Args:
        folder: for all files.
        code: the script.
        package: more of the installed package, run before the mark is made; `first` is true in a worker that was no
            spare.
    """

    def __init__(self, folder: Path, code: str, package: str = "") -> None:
        self.folder = folder
        self.script = folder / "script.py"
        self.script.write_text(textwrap.dedent(code))
        self._marks, self._beside = folder / "marks", folder / "marks-beside"
        for each in (self._marks, self._beside, folder / "site-packages"):
            each.mkdir()
        mine = "f'{folder}/{os.getpid()}'"  # a spare whose import has failed begins anew under its pid
        text = (
            f"import os, sys\nfolder = os.environ['MARKS']\n"
            f"first = '--spare' not in sys.orig_argv and not os.path.exists({mine})\n{textwrap.dedent(package)}\n"
        )
        (folder / "site-packages" / "installed.py").write_text(f"{text}os.makedirs({mine})\n")
        (folder / "beside.py").write_text("import os\nMADE = os.mkdir(f\"{os.environ['BESIDE']}/{os.getpid()}\")\n")
        self.environment = {
            "PYTHONPATH": str(folder / "site-packages"),
            "MARKS": str(self._marks),
            "BESIDE": str(self._beside),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    @property
    def imported(self) -> set[int]:
        """Processes that have imported the package."""
        return {int(each.name) for each in self._marks.iterdir()}

    @property
    def ran_beside(self) -> set[int]:
        """Processes that have run the module beside the script."""
        return {int(each.name) for each in self._beside.iterdir()}

    def spare(self, others: set[int]) -> int:
        """Waits for a process that has imported the package and is none of the others; returns its id."""
        wait_for(lambda: self.imported - others)
        (pid,) = self.imported - others
        return pid


def pids(run: Command) -> list[int]:
    return [int(pid) for pid in re.findall(r"here (\d+)$", run.stdout, re.MULTILINE)]
