"""A replica's state as torch.distributed.checkpoint (DCP) keeps it: its names, and how mates write it and read it.

Models and optimizers of torch have the names that torch itself gives them (`model.layers.0.weight`,
`optimizer.state.layers.0.weight.exp_avg`), so DCP alone loads them, in any other layout too. Everything else of a state
(sampler, schedulers, the user's own values) is kept for each rank by itself, encoded as bytes: `paceline.rank0`.

DCP's table of a checkpoint is a pickle. Here it is read with the few classes that such a table consists of, and values
other than tensors are read as torch reads weights, so nothing in a checkpoint is ever run (I9).
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle  # noqa: TID251  only the classes of `_TABLE` are found
import re
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from paceline._collectives.objects import decode_object, encode_object
from paceline._elastic.device_array import memory_of, on_host
from paceline._elastic.foreign import placement
from paceline._elastic.mates import Mates
from paceline._elastic.state import TrainState
from paceline._session.launcher_pipe import tell_once
from paceline.checkpoint.folder import MAX_MANIFEST_BYTES, SavedFile
from paceline.errors import CheckpointDamaged, CheckpointFailed, PacelineError, SizeMismatch, UnsupportedOp

_log = logging.getLogger("paceline.elastic")

_METADATA = ".metadata"
_OWN = "paceline.rank"

_PATIENCE = timedelta(hours=1)
"""Longest wait for a mate that writes its part."""

_MOST_NAMES = 8
"""Most names in an error."""

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")
"""What torch.compile and activation checkpointing add to the names of parameters."""

_TABLE = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(?:[A-Z]\w+|_MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo|torch\.serialization\._get_layout"
    r"|torch\.(?:Size|bool|u?int\d+|b?float\d+\w*|complex\d+)|pathlib(?:\._local)?\.(?:Pure)?PosixPath",
    re.ASCII,
)
"""The classes and values that a table consists of."""


class MateLine:
    """A group of all mates, whose calls come in one order on all of them."""

    def __init__(self, mates: Mates) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self.group = mates.new_group(_PATIENCE, "paceline checkpoints")
        self.position, self.size = mates.position, mates.size

    def gather(self, value: object) -> list[Any]:
        """Returns the values of all mates in the order of positions; raises RuntimeError if a mate has ended."""
        mine = encode_object(value)
        sizes = [self._torch.zeros(1, dtype=self._torch.int64) for _ in range(self.size)]
        self._dist.all_gather(sizes, self._torch.tensor([len(mine)]), self.group)
        most = max(int(size) for size in sizes)
        found = [self._torch.empty(most, dtype=self._torch.uint8) for _ in range(self.size)]
        self._dist.all_gather(found, self._bytes(mine.ljust(most)), self.group)
        return [decode_object(data.numpy()[: int(n)].tobytes()) for data, n in zip(found, sizes, strict=True)]

    def _bytes(self, data: bytes) -> Any:
        return self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)


class ReplicaContent:
    """What one rank holds of a replica's state, by the names of DCP.

    Raises:
        UnsupportedOp: an optimizer has a parameter that is in no model of the state, so it has no name.
    """

    def __init__(self, state: TrainState, position: int) -> None:
        import torch

        self._torch = torch
        self._state = state
        self._position = position
        self._models = {name: thing for name, thing in state.given.items() if isinstance(thing, torch.nn.Module)}
        self._optimizers = {
            name: thing for name, thing in state.given.items() if isinstance(thing, torch.optim.Optimizer)
        }
        self._names = {name: self._names_for(name, optimizer) for name, optimizer in self._optimizers.items()}

    def _names_for(self, name: str, optimizer: Any) -> dict[Any, str]:
        """Returns the name of each parameter of an optimizer; behind that of its model if there are several models."""
        found = {}
        for model_name, model in self._models.items():
            inner = model.module if isinstance(model, self._torch.nn.parallel.DistributedDataParallel) else model
            for path, parameter in inner.named_parameters():
                found[parameter] = model_name, _WRAPPERS.sub("", path)
        mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if odd := sum(parameter not in found for parameter in mine):
            raise UnsupportedOp(
                f"{odd} parameters of {name} are in no model of the training state, so they would have no name in a "
                "checkpoint: give TrainState their model too"
            )
        several = len({found[parameter][0] for parameter in mine}) > 1
        return {parameter: ".".join(found[parameter]) if several else found[parameter][1] for parameter in mine}

    def copied(self) -> dict[str, Any]:
        """Returns a copy of everything in main memory, as nested dicts for DCP."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        tree = {**self._live_models(), **{name: self._live_optimizer(name) for name in self._optimizers}}
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        staged: dict[str, Any] = DefaultStager(options).stage(tree)
        own = encode_object({"step": self._state.step, "parts": self._own_parts()})
        return {**staged, f"{_OWN}{self._position}": self._torch.frombuffer(bytearray(own), dtype=self._torch.uint8)}

    def _live_models(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return {name: get_model_state_dict(model) for name, model in self._models.items()}

    def _live_optimizer(self, name: str) -> dict[str, Any]:
        """Returns an optimizer's values, flat, as `get_optimizer_state_dict` of torch names them."""
        optimizer, found = self._optimizers[name], {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                path = self._names[name][parameter]
                for key, value in optimizer.state.get(parameter, {}).items():
                    found[f"state.{path}.{key}"] = value
                for key, value in group.items():
                    if key != "params":
                        found[f"param_groups.{path}.{key}"] = value
        return found

    def _own_parts(self) -> dict[str, Any]:
        return {
            name: {"arrays": {path: on_host(leaf) for path, leaf in part.arrays().items()}, "rest": part.rest()}
            for name, (_, part) in self._state.objects.items()
            if name not in self._models and name not in self._optimizers
        }

    @property
    def buffers(self) -> set[str]:
        """Names of what may differ between the ranks of a replica: statistics of the samples that each has seen."""
        return {f"{name}.{path}" for name, model in self._models.items() for path, _ in model.named_buffers()}

    def load(self, folder: Path) -> None:
        """Loads a checkpoint in place, of a replica of any size and layout.

        Raises:
            SizeMismatch: the checkpoint is of another model or state; nothing was loaded.
            CheckpointDamaged: it cannot be read; the state is incomplete.
        """
        from torch.distributed.checkpoint import CheckpointException

        try:
            self._load(folder, _read_table(folder))
        except PacelineError:
            raise
        except CheckpointException as error:
            raise CheckpointDamaged(f"{folder} cannot be read: {_causes(error)}") from error
        except Exception as error:  # torch says with many kinds of errors that bytes are not those that it wrote
            raise CheckpointDamaged(f"{folder} cannot be read: {type(error).__name__}: {error!s:.500}") from error

    def _load(self, folder: Path, table: Any) -> None:
        from torch.distributed.checkpoint import FileSystemReader, load
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        saved, live = table.state_dict_metadata, self._live_models()
        flat = {f"{name}.{path}": value for name, values in live.items() for path, value in values.items()}
        flat |= self._room_for_optimizers(saved)
        own = f"{_OWN}{self._position}"
        if own not in saved:
            own = f"{_OWN}0"  # a smaller replica wrote it
        flat[own] = self._torch.empty(saved[own].size if own in saved else 0, dtype=self._torch.uint8)
        _check_fit(folder, flat, saved)

        reader, planner = FileSystemReader(str(folder)), DefaultLoadPlanner(flatten_state_dict=False)

        def load_value(item: Any, data: Any) -> None:
            planner.original_state_dict[item.dest_index.fqn] = self._torch.load(data, weights_only=True)

        reader.read_metadata, planner.load_bytes = lambda *_, **__: table, load_value
        self._state.is_whole = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads what it needs
            load(flat, storage_reader=reader, planner=planner, no_dist=True)

        for name, model in self._models.items():
            set_model_state_dict(model, {path: flat[f"{name}.{path}"] for path in live[name]})
        of_parameters = _by_prefix(flat)
        for name, optimizer in self._optimizers.items():
            self._load_optimizer(name, optimizer, of_parameters)
        found, content = decode_object(flat[own].numpy().tobytes()), self._state.content()
        parts = {name: content["parts"][name] for name in (*self._models, *self._optimizers)}
        self._state.load_state_dict({"step": found["step"], "parts": {**parts, **found["parts"]}})

    def _room_for_optimizers(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Returns, by the names of what a checkpoint has of the optimizers, tensors, and None for other values.

        An optimizer that has made no update yet has no state, so the table says what there is.
        """
        stored = _by_prefix(saved)
        room: dict[str, Any] = {}
        for name, paths in self._names.items():
            for parameter, path in paths.items():
                for prefix in (f"{name}.state.{path}", f"{name}.param_groups.{path}"):
                    for key, entry in stored.get(prefix, {}).items():
                        room[f"{prefix}.{key}"] = self._empty(entry, parameter)
        return room

    def _empty(self, entry: Any, parameter: Any) -> Any:
        """Returns an uninitialised tensor, spread over the ranks as the parameter if it has the same shape."""
        if not hasattr(entry, "properties"):
            return None
        dtype = entry.properties.dtype
        if entry.size == parameter.shape:
            return self._torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return self._torch.empty(entry.size, dtype=dtype)

    def _load_optimizer(self, name: str, optimizer: Any, values: Mapping[str, dict[str, Any]]) -> None:
        saved = optimizer.state_dict()  # which numbers the parameters
        saved["state"] = {}
        for group, numbered in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            for n, parameter in enumerate(group["params"]):
                path = self._names[name][parameter]
                if state := values.get(f"{name}.state.{path}"):
                    saved["state"][numbered["params"][n]] = state
                settings = values.get(f"{name}.param_groups.{path}", {})
                if n and any(str(numbered[key]) != str(value) for key, value in settings.items()):
                    raise SizeMismatch(
                        f"{path} is in a group of {name} with parameters whose settings in the checkpoint are others"
                    )
                numbered |= settings
        optimizer.load_state_dict(saved)


def write(folder: Path, tree: Mapping[str, Any], buffers: set[str], line: MateLine) -> list[SavedFile]:
    """Writes the content of all mates into an empty folder; returns its files, which are durable. All mates call it.

    Raises:
        CheckpointFailed: a rank could not write, or mates hold different values under one name; raised on all of them.
        RuntimeError: a mate has ended.
    """
    from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, save

    _check_names(tree, buffers, line)
    try:
        save(dict(tree), storage_writer=FileSystemWriter(str(folder), sync_files=False), process_group=line.group)
    except CheckpointException as error:
        raise CheckpointFailed(_causes(error)) from error
    mine = [path for path in folder.iterdir() if path.name.startswith(f"__{line.position}_")]
    if line.position == 0:
        mine.append(folder / _METADATA)
    files, trouble = [], ""
    try:
        files = [SavedFile.of(path) for path in mine]
    except OSError as error:
        trouble = str(error)
    told = line.gather([trouble, [list(file) for file in files]])
    if troubles := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text]:
        raise CheckpointFailed("; ".join(troubles))
    return [SavedFile(*file) for _, files in told for file in files]


def _causes(error: Any) -> str:
    """Returns what DCP's error says of each rank."""
    found = [f"rank {rank}: {type(why).__name__}: {why!s:.300}" for rank, (why, _) in error.failures.items()]
    return "; ".join(found[:_MOST_NAMES])


def _check_names(tree: Mapping[str, Any], buffers: set[str], line: MateLine) -> None:
    """Checks that a plain tensor that several mates have is the same on all: a checkpoint keeps one of each name."""
    plain = {
        f"{name}.{path}": value
        for name, values in tree.items()
        if isinstance(values, dict)
        for path, value in values.items()
        if hasattr(value, "untyped_storage") and not placement(value)
    }
    told = line.gather({name: f"{value.dtype} {list(value.shape)}" for name, value in plain.items()})
    shared = {name for name in plain if sum(name in one for one in told) > 1}
    digests = {name: _digest(value) for name, value in sorted(plain.items()) if name in shared}
    heard = line.gather(digests)
    odd = sorted(
        name
        for name in set().union(*heard)
        if len({one[name] for one in heard if name in one} | {one[name] for one in told if name in one}) > 2
    )
    if not odd:
        return
    text = f"ranks of this replica hold different values of {', '.join(odd[:_MOST_NAMES])}"
    if not buffers.issuperset(odd):
        raise CheckpointFailed(
            f"{text}, and a checkpoint keeps one for each name: give the stages of a pipeline the names that they have "
            "in the entire model"
        )
    tell_once(_log, f"{text}; a checkpoint keeps those of one rank")


def _digest(tensor: Any) -> bytes:
    data = memory_of(tensor.detach().contiguous())
    return hashlib.blake2b(data.reshape(-1).view(np.uint8).data, digest_size=16).digest()


def _by_prefix(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns values by their names up to the last dot, and then by the rest."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        prefix, _, last = name.rpartition(".")
        found.setdefault(prefix, {})[last] = value
    return found


def _check_fit(folder: Path, wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Checks that a checkpoint has all that a rank needs; raises SizeMismatch with the differences."""
    odd = [f"{name} is missing" for name in wanted if name not in saved]
    for name, value in wanted.items():
        shape, stored = getattr(value, "shape", None), getattr(saved.get(name), "size", None)
        if shape is not None and stored is not None and shape != stored:
            odd.append(f"{name} has shape {list(stored)}, not {list(shape)}")
    if odd:
        raise SizeMismatch(f"{folder} does not fit: {'; '.join(odd[:_MOST_NAMES])}")


class _TableReader(pickle.Unpickler):
    """Reads DCP's table of a checkpoint, and nothing that a table does not consist of."""

    def find_class(self, module: str, name: str) -> Any:
        if not _TABLE.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's table")
        return super().find_class(module, name)


def _read_table(folder: Path) -> Any:
    """Returns DCP's `Metadata` of a checkpoint, whose files all lie in its folder."""
    from torch.distributed.checkpoint.metadata import Metadata

    path = folder / _METADATA
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise CheckpointDamaged(f"{path} has more than {MAX_MANIFEST_BYTES:,} bytes")
    with open(path, "rb") as file:
        table = _TableReader(file).load()
    if not isinstance(table, Metadata):
        raise CheckpointDamaged(f"{path} is no table of a checkpoint")
    if odd := {stored.relative_path for stored in table.storage_data.values()} - set(os.listdir(folder)):
        raise CheckpointDamaged(f"{path} names files that are not in its folder: {sorted(odd)!s:.200}")
    return table
