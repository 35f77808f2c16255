"""One function for each place where bytes from outside are taken apart: `target(data)` raises only over a real bug.

Each asserts what the decoder promises: the documented exception and no other, what was accepted survives a round trip,
memory in proportion to the input. `seeds(name)` are valid inputs, from which a fuzzer starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from fuzz import checkpoints, cli, collectives, coordinator, decoders, door, links, states

__all__ = ["TARGETS", "seeds"]

TARGETS: dict[str, Callable[[bytes], None]] = {
    "frame": decoders.frame,
    "signature": decoders.signature,
    "objects": decoders.objects,
    "messages": decoders.messages,
    "verdict": decoders.verdict,
    "status": decoders.status,
    "view": decoders.view,
    "tuning": decoders.tuning,
    "collective": collectives.collective,
    "receive": collectives.receive,
    "abort": door.abort,
    "hello": door.hello,
    "stream": door.stream,
    "knock": door.knock,
    "proof": door.proof,
    "slots": links.slots,
    "handover": links.handed_over,
    "tcp_hello": links.tcp_hello,
    "tcp_streams": links.tcp_streams,
    "answer": links.answer,
    "address": cli.address,
    "sizes": cli.sizes,
    "news": cli.news,
    "record": cli.record,
    "stacks": cli.stacks,
    "output": cli.output,
    "requests": coordinator.requests,
    "storage": coordinator.storage,
    "state_file": coordinator.state_file,
    "parts": checkpoints.parts,
    "skeleton": checkpoints.skeleton,
    "manifest": checkpoints.manifest,
    "description": states.description,
    "wanted_runs": states.wanted_runs,
    "line_manifest": states.line_manifest,
}

_SEEDS: dict[str, Callable[[], Sequence[bytes]]] = {
    **decoders.SEEDS,
    **collectives.SEEDS,
    **door.SEEDS,
    **links.SEEDS,
    **cli.SEEDS,
    **coordinator.SEEDS,
    **checkpoints.SEEDS,
    **states.SEEDS,
}


def seeds(name: str) -> dict[str, bytes]:
    """Valid inputs of a target, by the name of a file for each."""
    return {hashlib.sha256(data).hexdigest()[:16]: data for data in _SEEDS[name]()}
