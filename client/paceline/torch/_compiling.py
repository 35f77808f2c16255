"""Keeps `torch.compile` out of this package, so that in a wrapped model it compiles only the user's modules.

Otherwise dynamo would trace our hooks, and with them NumPy and the code that sends, and fail there.
`torch.compiler.disable` would cost each hook of each parameter a few microseconds in every pass. It also excludes all
code called inside, so FSDP's units would not be compiled.

C++ calls the backend while a compiled model runs (torch's DDP broadcasts buffers), and dynamo would trace those calls
too. To dynamo a process group is an opaque object, and reading an attribute that torch has not registered is an error.
The backend does not call the user's modules, so `never_traced` tells dynamo's hook into the interpreter to skip its
methods. That does not import dynamo, which takes a second.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from types import FunctionType
from typing import TypeVar

_log = logging.getLogger("paceline.torch")

_Class = TypeVar("_Class", bound=type)


@functools.cache
def stay_out_of_graphs() -> None:
    """Makes dynamo run this package's code untraced. Imports dynamo, as the first torch optimizer does too."""
    rules = importlib.import_module("torch._dynamo.trace_rules")
    add = getattr(rules, "add", None)  # not a public API of torch
    if add is None:
        _log.warning(
            "this release of torch lacks torch._dynamo.trace_rules.add: do not compile modules that DDP or FSDP wraps"
        )
        return
    add("paceline")


def never_traced(cls: _Class) -> _Class:
    """Decorates a class so that dynamo runs its methods, and everything they call, untraced."""
    hook = importlib.import_module("torch._C._dynamo.eval_frame")
    if not hasattr(hook, "set_code_exec_strategy"):  # not a public API of torch
        _log.warning("this release of torch lacks set_code_exec_strategy: do not compile code that uses the backend")
        return cls
    skip = hook._FrameExecStrategy(hook._FrameAction.SKIP, hook._FrameAction.SKIP)  # the frame, its callees
    for member in vars(cls).values():
        if isinstance(member, FunctionType):
            own = inspect.unwrap(member)  # not the decorator's code, which other functions may share
            hook.set_code_exec_strategy(own.__code__, skip)
    return cls
