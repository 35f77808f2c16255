"""`paceline debug stacks`: where the code of each rank stands.

Members are asked first. One that does not answer, mostly because it holds the GIL, gets a signal: from this process if
it runs on this host, else from another member of its host.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline._base.terminal import printable
from paceline._session.identity import process_identity
from paceline._session.stack_file import stacks_by_signal
from paceline.cli.admin import ask_members, coordinator_of, get_job
from paceline.cli.debug.stuck import in_ranks
from paceline.cli.output import print_json
from paceline.errors import PacelineError
from pacelinepb.debug.folding import Process, by_trouble, fold, read_stacks
from pacelinepb.debug.gathered import Answered, without_members
from pacelinepb.debug.stack_answers import SIGNALLED_S, is_near, neighbours, process_of, processes_by, stacks_as_dict
from pacelinepb.v1.session_pb2 import QUESTION_STACKS

PATIENCE_S = 1.0
"""Seconds to wait for each member. One that does not hold the GIL answers within milliseconds."""


def show_stacks(job: str, coordinator: str | None, timeout: float, *, everything: bool, as_json: bool) -> None:
    """Prints the stacks of all members, those that are the same once; with `everything` all threads and frames."""
    address = coordinator_of(job, coordinator, timeout)
    answers = ask_members(address, job, QUESTION_STACKS, timeout, patience=PATIENCE_S)
    if not answers:
        raise PacelineError(without_members(get_job(address, job, timeout)))
    found = {each.member.member_id: process_of(each) for each in answers}
    here, far = process_identity(), []
    for each in answers:
        if each.trouble:
            by_signal = _signalled(each) if is_near(each.member.process, here) else None
            if by_signal is None:
                far.append(each)
            else:
                found[each.member.member_id] = by_signal
    for each, process in _by_neighbours(address, job, timeout, answers, far):
        found[each.member.member_id] = process
    processes = list(found.values())
    if as_json:
        by_id = {each.member.member_id: each for each in answers}
        print_json({"job": job, "processes": [stacks_as_dict(each, by_id[id_]) for id_, each in found.items()]})
        return
    _print(processes, everything=everything)


def _signalled(answer: Answered) -> Process | None:
    """Signals a process of this host; None if it has no file here: another user, or another TMPDIR."""
    try:
        text = stacks_by_signal(answer.member.process.pid)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Process(str(answer), answer.rank, trouble=f"{answer.trouble}; {error.strerror or error}")
    return Process(str(answer), answer.rank, read_stacks(text))


def _by_neighbours(
    address: str, job: str, timeout: float, answers: Sequence[Answered], far: Sequence[Answered]
) -> list[tuple[Answered, Process]]:
    """Has members on other hosts signal their silent neighbours, one member for each host."""
    found: list[tuple[Answered, Process]] = []
    for helper, silent in neighbours(far, [each.member for each in answers if not each.trouble]):
        said = None
        if helper is not None:
            (said,) = ask_members(
                address,
                job,
                QUESTION_STACKS,
                timeout,
                members=[helper.member_id],
                pids=[each.member.process.pid for each in silent],
                patience=SIGNALLED_S,
            )
        found += zip(silent, processes_by(job, silent, said), strict=True)
    return found


def _print(processes: Sequence[Process], *, everything: bool) -> None:
    groups = fold(processes, everything=everything)
    if groups:
        print("In each stack the newest call comes first.")
    for members, stacks, hidden in groups:
        print(printable(f"{_named(members)}:"))
        for stack, count in stacks:
            many = f"{count} threads" if count > 1 else "a thread"
            print(f"  {'main thread' if stack.is_main else many}:")
            for frame in stack.frames or ("runs no Python code",):
                print(printable(f"    {frame}"))
        if hidden:
            print(f"  and {hidden} threads of Paceline and grpc (--all shows them)")
    for trouble, members in by_trouble(processes).items():
        print(printable(f"{_named(members)}: no stacks: {trouble}"))


def _named(members: Sequence[Process]) -> str:
    ranks = [each.rank for each in members if each.rank is not None]
    if len(members) == 1 or len(ranks) < len(members):
        return ", ".join(each.label for each in members)
    places = {each.label.partition("(")[2].partition(",")[0] for each in members}
    return f"{in_ranks(ranks)} ({', '.join(sorted(places))})"
