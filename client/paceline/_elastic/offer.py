"""The state that a member offers to others, which fetch it in chunks and check the chunks by hashes.

The giver reads its live arrays while it trains. They cannot change meanwhile: a change needs the word of the step, and
the word needs the taker to enter the step. If the taker is declared dead and the step goes on without it, the giver
withdraws the offer before anything changes, and does not send a chunk that it was reading.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline._base.arrays import MAX_ARRAY_BYTES, MAX_DIMENSIONS, dtype_name, dtype_named
from paceline._elastic.device_array import DeviceArray, DeviceBytes
from paceline._elastic.parcel import Parcel
from paceline._elastic.reshard_plan import ElementRun, checksum
from paceline.checkpoint.pieces import Shard
from paceline.checkpoint.tree import Skeleton, join, split_shards
from paceline.errors import PacelineError, SizeMismatch
from paceline_protocol import Tag

CHUNK_BYTES = 1 << 20
HASH_BYTES = 16

_AT_ONCE = 8
"""Most chunks that are hashed at a time, each by a thread: one thread hashes 1 GB a second."""

T = TypeVar("T")


class Content:
    """A state as bytes: a skeleton and a sequence of arrays; shards are kept separately.

    Args:
        skeleton: made by `tree.split_shards`.
        arrays: by name, the arrays that every member has whole; referred to, not copied. Those on a device can be read,
            not written.
        shards: by name, this member's shards of sharded arrays.
        chunk_bytes: the size of a chunk.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        arrays: Mapping[str, Any],
        shards: Mapping[str, Sequence[Shard]] | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.skeleton = skeleton
        self.arrays = arrays
        self.shards = shards or {}
        self.chunk_bytes = chunk_bytes
        self._flat = [_bytes_of(array) for array in arrays.values()]
        self._starts = np.cumsum([0, *(flat.size for flat in self._flat)]).tolist()

    @classmethod
    def of(
        cls,
        tree: Any,
        more: Sequence[Mapping[str, Shard]] = (),
        on_device: Mapping[int, DeviceArray] | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Content:
        """Makes the content of nested values, with `Shard`s in place of sharded arrays.

        `more` are other shards of the same arrays. `on_device` gives, by the id of an array in the tree that only shows
        shape and dtype, the array in its place.
        """
        skeleton, leaves = split_shards(tree)
        places = on_device or {}
        arrays = {name: places.get(id(leaf), leaf) for name, leaf in leaves.items() if not isinstance(leaf, Shard)}
        shards = {
            name: [leaf, *(held[name] for held in more if name in held)]
            for name, leaf in leaves.items()
            if isinstance(leaf, Shard)
        }
        return cls(skeleton, arrays, shards, chunk_bytes=chunk_bytes)

    def select(self, runs: Sequence[ElementRun], most_bytes: int) -> list[NDArray[Any]]:
        """Returns views of some runs of the sharded arrays, shape [count] each."""
        found = [self._find(run) for run in runs]
        if (size := sum(array.nbytes for array in found)) > most_bytes:
            raise PacelineError(f"{size} bytes were requested; at most {most_bytes} are sent at a time")
        return found

    def _find(self, run: ElementRun) -> NDArray[Any]:
        for shard in self.shards.get(run.name, ()):
            first = run.start - shard.start
            if first >= 0 and 0 <= run.count <= shard.values.size - first:
                return shard.values.reshape(-1)[first : first + run.count]
        raise PacelineError(f"this member does not have {run!s:.200}")

    @property
    def size(self) -> int:
        """Bytes of all arrays."""
        return int(self._starts[-1])

    @property
    def chunks(self) -> int:
        """Number of chunks; the last one may be shorter."""
        return -(-self.size // self.chunk_bytes)

    def read(self, chunk: int) -> bytes:
        """Returns a copy of a chunk."""
        return b"".join(bytes(piece) for piece in self._pieces(chunk))

    def write(self, chunk: int, data: bytes) -> None:
        """Replaces a chunk."""
        start = 0
        for piece in self._pieces(chunk):
            if start + piece.size > len(data):
                raise SizeMismatch(f"chunk {chunk} of a state has {len(data)} bytes only")
            piece[...] = np.frombuffer(data, np.uint8, piece.size, start)
            start += piece.size
        if start != len(data):
            raise SizeMismatch(f"chunk {chunk} of a state has {len(data)} bytes, not {start}")

    def hash(self, chunk: int) -> bytes:
        """Returns the BLAKE2b hash of a chunk."""
        return hash_of(*(piece.data for piece in self._pieces(chunk)))

    def of_each(self, work: Callable[[int], T]) -> list[T]:
        """Returns what a function returns for each chunk; threads call it, as hashlib lets others run meanwhile."""
        with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1), "paceline-hash") as pool:
            return list(pool.map(work, range(self.chunks)))

    def tree(self) -> Any:
        """Returns the nested values, with None in place of sharded arrays."""
        return join(self.skeleton, {**dict.fromkeys(self.shards), **self.arrays})

    def finish(self) -> None:
        """Waits until devices have written the arrays, so that other threads may read them."""
        for array in self.arrays.values():
            if isinstance(array, DeviceArray):
                array.finish()

    def _pieces(self, chunk: int) -> Iterator[NDArray[np.uint8]]:
        low, high = chunk * self.chunk_bytes, min((chunk + 1) * self.chunk_bytes, self.size)
        first = int(np.searchsorted(self._starts, low, side="right")) - 1
        for start, flat in zip(self._starts[first:], self._flat[first:], strict=False):
            if start >= high:
                return
            yield flat[max(low - start, 0) : high - start]


def hash_of(*pieces: bytes | memoryview) -> bytes:
    """Returns the BLAKE2b hash of a chunk that consists of these bytes."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _bytes_of(array: Any) -> Any:
    """Returns an array's bytes in C order: a view, or on a device something that copies what is asked for."""
    if isinstance(array, DeviceArray):
        return DeviceBytes(array)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Description:
    """The contents of a state without the bytes.

    Attributes:
        skeleton: made by `tree.split_shards`.
        spread: names of the sharded arrays; the coordinator says who holds which shard.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        arrays: Sequence[tuple[str, str, tuple[int, ...]]],
        hashes: bytes,
        spread: Sequence[str] = (),
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.skeleton = skeleton
        self.arrays = list(arrays)
        self.hashes = hashes
        self.spread = list(spread)
        self._chunk_bytes = chunk_bytes

    @classmethod
    def of(cls, content: Content) -> Description:
        """Makes the description of a content."""
        arrays = [(name, dtype_name(array.dtype), array.shape) for name, array in content.arrays.items()]
        hashes = b"".join(content.of_each(content.hash))
        return cls(content.skeleton, arrays, hashes, list(content.shards), chunk_bytes=content.chunk_bytes)

    def to_json(self) -> bytes:
        """Returns everything except the hashes."""
        fields = {"skeleton": self.skeleton, "arrays": self.arrays, "spread": self.spread}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes, hashes: bytes, most_bytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> Description:
        """Reads another member's description; never evaluates it (I9). ValueError if it is malformed or too big."""
        try:
            fields = json.loads(data)
            skeleton, arrays = fields["skeleton"], [_array_from(entry) for entry in fields["arrays"]]
            spread = _names_from(fields["spread"])
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"malformed description of a state: {type(error).__name__}: {error!s:.200}") from error
        names = [*(name for name, *_ in arrays), *spread]
        if len(set(names)) < len(names):
            raise ValueError("malformed description of a state: two arrays have the same name")
        size = sum(prod(dims) * dtype_named(dtype).itemsize for _, dtype, dims in arrays)
        if size > most_bytes:
            raise ValueError(f"the state has {size} bytes, which is implausible for this model")
        if len(hashes) != -(-size // chunk_bytes) * HASH_BYTES:
            raise ValueError(f"{len(hashes)} bytes of hashes for a state of {size} bytes")
        join(skeleton, dict.fromkeys(names, np.empty(0)))  # a malformed skeleton fails here, not later
        return cls(skeleton, arrays, hashes, spread, chunk_bytes=chunk_bytes)

    def hash(self, chunk: int) -> bytes:
        """Returns the hash of a chunk."""
        return self.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]

    def allocate(self, own: Mapping[str, Any]) -> tuple[Content, list[int]]:
        """Allocates the state, and fills in the chunks that this member has already in `own`, its arrays by name.

        Returns the state, and the numbers of the chunks that it lacks.
        """
        like = {name: np.empty(shape, dtype_named(dtype)) for name, dtype, shape in self.arrays}
        content = Content(self.skeleton, like, dict.fromkeys(self.spread, ()), chunk_bytes=self._chunk_bytes)
        mine = {
            name: own[name]
            if name in own and own[name].shape == new.shape and own[name].dtype == new.dtype
            else np.zeros(new.shape, new.dtype)
            for name, new in like.items()
        }
        held = Content(self.skeleton, mine, chunk_bytes=self._chunk_bytes)

        def lacks(chunk: int) -> bool:
            data = held.read(chunk)
            if hash_of(data) == self.hash(chunk):
                content.write(chunk, data)
                return False
            return True

        return content, [chunk for chunk, is_lacking in enumerate(content.of_each(lacks)) if is_lacking]


def _names_from(told: Any) -> list[str]:
    """Checks the names of arrays that another member sent."""
    if type(told) is not list or not all(type(name) is str for name in told):
        raise ValueError(f"malformed names of arrays: {told!r:.80}")
    return told


def _array_from(entry: Any) -> tuple[str, str, tuple[int, ...]]:
    """Checks the name, dtype and shape of an array that another member sent."""
    name, dtype, dims = entry
    if type(name) is not str or type(dtype) is not str or type(dims) is not list or len(dims) > MAX_DIMENSIONS:
        raise ValueError(f"malformed description of an array: {name!r:.80} {dtype!r:.80} {dims!r:.80}")
    if not all(type(n) is int and 0 <= n <= MAX_ARRAY_BYTES for n in dims):
        raise ValueError(f"malformed shape of an array: {dims!r:.80}")
    # NumPy has limits for the other dimensions of an empty array too.
    if prod(filter(None, dims)) * dtype_named(dtype).itemsize > MAX_ARRAY_BYTES:
        raise ValueError(f"the shape of an array is too large: {dims!r:.80}")
    return name, dtype, tuple(dims)


class OfferedState:
    """The state that this member offers to others now, if any. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tag: Tag | None = None
        self._content: Content | None = None
        self._description: Description | None = None
        self._epoch = 0  # grows when the bits of the offer may change; offering the same tag again keeps it
        self.manifest = b""

    def offer(self, tag: Tag, content: Content) -> None:
        """Offers a state to others."""
        content.finish()
        with self._lock:
            self._epoch += tag != self._tag
            self._tag, self._content, self._description = tag, content, None

    def withdraw(self) -> None:
        """Withdraws the offer before the state changes; chunks that are being read are not sent."""
        with self._lock:
            self._epoch += 1
            self._tag = self._content = self._description = None

    def describe(self, tag: Tag) -> Description:
        """Returns the description of the offered state, which must have this tag; the first call computes hashes."""
        content, epoch = self._get(tag)
        with self._lock:
            known = self._description if self._content is content else None
        if known is None:
            known = Description.of(content)
            self._check(epoch, tag)
            with self._lock:
                if self._content is content:
                    self._description = known
        return known

    def read(self, tag: Tag, chunk: int) -> bytes:
        """Returns a chunk of the offered state, which must have this tag."""
        content, epoch = self._get(tag)
        if not 0 <= chunk < content.chunks:
            raise PacelineError(f"the state has {content.chunks} chunks; there is no chunk {chunk}")
        data = content.read(chunk)
        self._check(epoch, tag)
        return data

    def pack(self, tag: Tag, runs: Sequence[tuple[str, int, int]], most_bytes: int) -> Parcel:
        """Copies some runs of sharded arrays: each given by name, first element and count."""
        content, epoch = self._get(tag)
        asked = [ElementRun(*run) for run in runs]
        parcel = Parcel(content.select(asked, most_bytes), checksum(asked))
        self._check(epoch, tag)
        return parcel

    def _get(self, tag: Tag) -> tuple[Content, int]:
        with self._lock:
            if self._content is None or self._tag != tag:
                raise PacelineError(f"this member does not hold the state {tag} now")
            return self._content, self._epoch

    def _check(self, epoch: int, tag: Tag) -> None:
        with self._lock:
            if self._epoch != epoch:
                raise PacelineError(f"the state {tag} is no longer offered")
