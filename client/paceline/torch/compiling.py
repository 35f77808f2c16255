"""What `torch.compile` sees of this package: nothing. Of a model in a wrapper it compiles the modules alone.

Dynamo would trace hooks, and with them NumPy and the code that sends, and it fails there. With
`torch.compiler.disable` each hook of each parameter would cost a few microseconds more in every pass, and what is
called inside is not compiled either, so FSDP's units would not be.
"""

from __future__ import annotations

import functools
import importlib
import logging

__all__ = ["stay_out_of_graphs"]

_log = logging.getLogger("paceline.torch")


@functools.cache
def stay_out_of_graphs() -> None:
    """From now on dynamo runs code of this package as it is. Imports dynamo, as the first torch optimizer does too."""
    rules = importlib.import_module("torch._dynamo.trace_rules")
    add = getattr(rules, "add", None)  # it is no public interface of torch's
    if add is None:
        _log.warning("this release of torch lacks torch._dynamo.trace_rules.add: do not compile what DDP or FSDP wraps")
        return
    add("paceline")
