"""Compression of gradients and other values in a reduction: codecs, and the rounding errors kept between calls."""

from paceline.compression.bf16 import Bf16
from paceline.compression.codec import PIECE, Codec, words_of
from paceline.compression.int8 import Int8
from paceline.compression.memory import Memory
from paceline.compression.powersgd import PowerSGD
from paceline.errors import UnsupportedOp

__all__ = ["Bf16", "Codec", "Int8", "Memory", "PIECE", "PowerSGD", "codec_of"]


def codec_of(compression: str | Codec) -> Codec:
    """Returns the codec that a user asks for.

    Args:
        compression: "bf16", "int8", or a codec.

    Raises:
        UnsupportedOp: there is no such codec.
    """
    given: object = compression
    if isinstance(given, str):
        if given == "bf16":
            return Bf16()
        if given == "int8":
            return Int8()
    elif isinstance(given, Codec) and not isinstance(given, type):
        words_of(given)
        return given
    raise UnsupportedOp(f"compression is 'bf16', 'int8' or a paceline.compression.Codec, not {given!r:.80}")
