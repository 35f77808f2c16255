"""What `torch.compile` sees of this package: nothing. Of a model in a wrapper it compiles the modules alone.

Dynamo would trace hooks, and with them NumPy and the code that sends, and it fails there. With
`torch.compiler.disable` each hook of each parameter would cost a few microseconds more in every pass, and what is
called inside is not compiled either, so FSDP's units would not be.

C++ calls the backend while a compiled model runs (torch's DDP broadcasts buffers), and dynamo would trace that too. To
dynamo a process group is an opaque object, and reading an attribute that torch has not registered is an error. None of
the user's modules are called from there, so dynamo's hook into the interpreter is told to skip the backend's methods.
That does not import dynamo, which takes a second.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from types import FunctionType
from typing import TypeVar

__all__ = ["never_traced", "stay_out_of_graphs"]

_log = logging.getLogger("paceline.torch")

_Class = TypeVar("_Class", bound=type)


@functools.cache
def stay_out_of_graphs() -> None:
    """From now on dynamo runs code of this package as it is. Imports dynamo, as the first torch optimizer does too."""
    rules = importlib.import_module("torch._dynamo.trace_rules")
    add = getattr(rules, "add", None)  # it is no public interface of torch's
    if add is None:
        _log.warning("this release of torch lacks torch._dynamo.trace_rules.add: do not compile what DDP or FSDP wraps")
        return
    add("paceline")


def never_traced(cls: _Class) -> _Class:
    """A decorator of classes: dynamo runs their methods, and all that these call, as they are."""
    hook = importlib.import_module("torch._C._dynamo.eval_frame")
    if not hasattr(hook, "set_code_exec_strategy"):  # it is no public interface of torch's
        _log.warning("this release of torch lacks set_code_exec_strategy: do not compile what runs on the backend")
        return cls
    skip = hook._FrameExecStrategy(hook._FrameAction.SKIP, hook._FrameAction.SKIP)  # the frame itself; what it calls
    for member in vars(cls).values():
        if isinstance(member, FunctionType):
            own = inspect.unwrap(member)  # a decorator's code may serve functions of others, too
            hook.set_code_exec_strategy(own.__code__, skip)
    return cls
