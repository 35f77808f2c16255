"""Stacks as faulthandler writes them: taken apart, and folded."""

from __future__ import annotations

from pacelinepb.debug.folding import Process, Stack, by_trouble, fold, read_stacks, shorten

DUMP = """Thread 0x00007fd86a7fc6c0 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select
  File "/usr/lib/python3.11/asyncio/base_events.py", line 1884 in _run_once
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007fd86affd6c0 [loader] (most recent call first):
  File "/home/me/data.py", line 12 in fetch
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007fd875c46b80 (most recent call first):
  File "/home/me/paceline_models/train.py", line 40 in step
  File "/home/me/paceline_models/train.py", line ??? in <module>
"""


def test_a_faulthandler_dump_is_split_into_stacks() -> None:
    library, loader, main = read_stacks(DUMP)
    assert (library.is_library, library.is_main) == (True, False)
    assert loader.frames == ("/home/me/data.py:12 in fetch", "/usr/lib/python3.11/threading.py:982 in run")
    assert (loader.is_library, loader.is_main) == (False, False)
    assert main.is_main
    assert main.frames[0] == "/home/me/paceline_models/train.py:40 in step"
    assert not read_stacks('Fatal Python error: nothing\n  File "x", line 1 in y')


def test_ranks_with_equal_stacks_are_folded_in_any_thread_order() -> None:
    library, loader, main = read_stacks(DUMP)
    other = Stack(("x.py:1 in wait",), is_main=True, is_library=False)
    processes = [
        Process("rank 0", 0, (library, loader, main)),
        Process("rank 1", 1, (loader, library, loader, main)),
        Process("rank 2", 2, (loader, main)),
        Process("rank 3", 3, (library, other)),
        Process("rank 4", 4, trouble="is stopped"),
    ]
    folded = [([each.rank for each in members], stacks, hidden) for members, stacks, hidden in fold(processes)]
    assert folded == [
        ([0, 2], [(main, 1), (loader, 1)], 1),
        ([1], [(main, 1), (loader, 2)], 1),
        ([3], [(other, 1)], 1),
    ]
    assert [len(stacks) for _, stacks, _ in fold(processes, everything=True)] == [3, 3, 2, 2]
    assert {text: [each.rank for each in members] for text, members in by_trouble(processes).items()} == {
        "is stopped": [4]
    }


def test_paceline_frames_are_shortened_and_user_frames_are_kept() -> None:
    package = "/venv/lib/python3.12/site-packages/paceline"
    ours = (f"{package}/_links/bell.py:141 in _wait", f"{package}/_group/calls.py:133 in all_reduce")
    launching = ("<frozen runpy>:88 in _run_code", f"{package}/cli/launcher/shim.py:129 in <module>")
    users = ("hang.py:10 in step", "/home/me/paceline/train.py:40 in <module>")
    stack = Stack((*ours, users[0], ours[0], *users, *launching), is_main=True, is_library=False)
    folded = ("in paceline: all_reduce ... _wait (2 frames)", users[0], ours[0], *users)
    assert shorten(stack).frames == folded
    of_a_checkout = Stack(tuple(f.replace(package, "/src/client/paceline") for f in stack.frames), True, False)
    assert shorten(of_a_checkout).frames[:2] == folded[:2]
    assert shorten(Stack(launching, True, False)).frames == launching[:1], "something remains"
    process = Process("rank 0", 0, (stack,))
    assert fold([process]) == [([process], [(shorten(stack), 1)], 0)]
    assert fold([process], everything=True) == [([process], [(stack, 1)], 0)]
