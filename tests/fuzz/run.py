"""Fuzzes targets, guided by coverage: `python tests/fuzz/run.py TARGET ... [--seconds N] [--corpus DIR]`.

It needs atheris. A finding ends it with an exit code other than 0, and its input is kept in `--findings`; from there
`python tests/fuzz/run.py TARGET --reproduce FILE` shows it again, without atheris.

Several targets run one after the other, each in a child of a process that has the code instrumented: that takes longer
than most targets need.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

HERE = Path(__file__).resolve().parent
MEMORY = 1 << 30
"""Bytes of address space beyond what the program itself takes: who believes an announced length finds none."""


def main() -> None:
    sys.path[:1] = [str(HERE.parent)]  # instead of this folder: modules here are `fuzz.*`
    parser = argparse.ArgumentParser(description="Fuzzes one decoder.")
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=60, help="for how long")
    parser.add_argument(
        "--corpus",
        type=Path,
        help="a folder for inputs, kept from run to run; tests/fuzz/corpus",
    )
    parser.add_argument("--findings", type=Path, default=HERE / "findings", help="where inputs that fail are kept")
    parser.add_argument("--reproduce", type=Path, help="run this input once, and nothing else")
    options = parser.parse_args()
    warnings.simplefilter("error")  # as in all tests
    if options.reproduce:
        from fuzz.targets import TARGETS

        _limit_memory()
        for target in options.targets:
            TARGETS[target](options.reproduce.read_bytes())
        return
    sys.exit(_fuzz_each(options.targets, options.seconds, options.corpus or HERE / "corpus", options.findings))


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def _fuzz_each(targets: Sequence[str], seconds: int, corpus: Path, findings: Path) -> int:
    """Returns the exit status: 1 if anything was found."""
    import atheris

    with atheris.instrument_imports(include=["fuzz", "paceline", "paceline_server"]):
        import fuzz.targets  # noqa: F401  the children have it

    status = 0
    for target in targets:
        sys.stdout.write(f"=== {target}\n")
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's threads are idle, and libFuzzer wants none
            child = os.fork()
        if child == 0:
            _fuzz(target, seconds, corpus / target, findings)
        _, ended = os.waitpid(child, 0)
        status |= ended != 0
    return status


def _watched(run: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Lets a run that hangs print where its threads are, before libFuzzer ends it."""
    armed = 0.0

    def watched(data: bytes) -> None:
        nonlocal armed
        if monotonic() - armed > 1.0:
            armed = monotonic()
            faulthandler.dump_traceback_later(8.0, file=sys.stdout)
        run(data)

    return watched


def _fuzz(target: str, seconds: int, corpus: Path, findings: Path) -> None:
    import atheris

    from fuzz.targets import TARGETS, seeds

    os.dup2(1, 2)  # libFuzzer writes there: it shall be in order
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    for name, data in seeds(target).items():
        (corpus / name).write_bytes(data)
    _limit_memory()
    arguments = [
        sys.argv[0],
        f"-max_total_time={seconds}",
        f"-artifact_prefix={findings / target}-",
        "-max_len=16384",
        "-timeout=10",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        "-verbosity=1",
        str(corpus),
    ]
    atheris.Setup(arguments, _watched(TARGETS[target]))
    atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main()
