"""Compression of what travels in a reduction: the codecs, and what they leave over from one call to the next."""

from paceline.compression.bf16 import Bf16
from paceline.compression.codec import PIECE, Codec, codec_of
from paceline.compression.int8 import Int8
from paceline.compression.memory import Memory
from paceline.compression.powersgd import PowerSGD

__all__ = ["Bf16", "Codec", "Int8", "Memory", "PIECE", "PowerSGD", "codec_of"]
