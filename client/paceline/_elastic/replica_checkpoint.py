"""A replica's state as torch.distributed.checkpoint (DCP) keeps it: its names, and how mates write it and read it.

Models and optimizers of torch have the names that torch itself gives them (`model.layers.0.weight`,
`optimizer.state.layers.0.weight.exp_avg`), so DCP alone loads them, in any other layout too. Everything else of a state
(sampler, schedulers, which parameters are frozen, the user's own values) is kept for each rank by itself, encoded as
bytes: `paceline.rank0`.

DCP's own table of a checkpoint is a pickle, which is not read here: the same table lies beside it as JSON. Values other
than tensors are read as torch reads weights. So nothing in a checkpoint is ever run (I9).
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from paceline._collectives.objects import decode_object, encode_object
from paceline._elastic.device_array import memory_of, on_host
from paceline._elastic.foreign import local_of, placement
from paceline._elastic.mates import Mates
from paceline._elastic.parts import check_fit, trains
from paceline._elastic.saver import warning_of_frozen
from paceline._elastic.state import StateCore
from paceline._microbatch.receipts import checked_lines
from paceline._session.launcher_pipe import tell_once
from paceline.checkpoint.folder import MAX_MANIFEST_BYTES, SavedFile, write_file
from paceline.errors import CheckpointDamaged, CheckpointFailed, PacelineError, SizeMismatch, UnsupportedOp

_log = logging.getLogger("paceline.elastic")

_METADATA, _TABLE = ".metadata", "paceline.json"
_OWN = "paceline.rank"

_PATIENCE = timedelta(hours=1)
"""Longest wait for a mate that writes its part."""

_MOST_NAMES = 8
"""Most names in an error."""

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")
"""The parts of parameters' names that torch.compile and activation checkpointing add."""


class MateLine:
    """A group of all mates, whose calls come in one order on all of them. Raises ReplicaLost if a mate has ended."""

    def __init__(self, mates: Mates) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._mates = torch, dist, mates
        self.group = mates.new_group(_PATIENCE, "paceline checkpoints")
        self.position, self.size = mates.position, mates.size

    def gather(self, value: object) -> list[Any]:
        """Returns the values of all mates in the order of positions."""
        mine = encode_object(value)
        sizes = [self._torch.zeros(1, dtype=self._torch.int64) for _ in range(self.size)]
        try:
            self._dist.all_gather(sizes, self._torch.tensor([len(mine)]), self.group)
            most = max(int(size) for size in sizes)
            found = [self._torch.empty(most, dtype=self._torch.uint8) for _ in range(self.size)]
            self._dist.all_gather(found, _bytes(mine.ljust(most)), self.group)
        except RuntimeError as error:
            raise self._mates.lost(error) from error
        return [decode_object(data.numpy()[: int(n)].tobytes()) for data, n in zip(found, sizes, strict=True)]

    def each(self, work: Callable[[], object]) -> list[Any]:
        """Returns what `work` has returned on each mate; raises CheckpointFailed on all of them if it failed on one."""
        try:
            mine = ["", work()]
        except Exception as error:  # noqa: BLE001  mates wait for this one's result
            mine = [f"{type(error).__name__}: {error!s:.500}", None]
        told = self.gather(mine)
        if troubles := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text]:
            raise CheckpointFailed("; ".join(troubles[:_MOST_NAMES]))
        return [value for _, value in told]

    def save(self, folder: Path, tree: Mapping[str, Any]) -> Any:
        """Writes what all mates hold into a folder, by DCP; returns its table."""
        from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, save

        try:
            return save(dict(tree), storage_writer=FileSystemWriter(folder, sync_files=False), process_group=self.group)
        except CheckpointException as error:
            raise CheckpointFailed(_causes(error)) from error
        except RuntimeError as error:
            raise self._mates.lost(error) from error


class ReplicaContent:
    """One rank's part of a replica's state, by the names of DCP.

    Raises:
        UnsupportedOp: an optimizer has a parameter that is in no model of the state, so it has no name, or a setting
            that could not be read again.
    """

    def __init__(self, state: StateCore, position: int) -> None:
        import torch
        from torch.distributed.fsdp import FSDPModule

        self._torch = torch
        self._state = state
        self._position = position
        self._models = {name: thing for name, thing in state.given.items() if isinstance(thing, torch.nn.Module)}
        self._optimizers = {
            name: thing for name, thing in state.given.items() if isinstance(thing, torch.optim.Optimizer)
        }
        for model in self._models.values():
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # a forward pass alone leaves other parameters than the optimizer's
        self._names = {name: self._names_for(name, optimizer) for name, optimizer in self._optimizers.items()}

    def _names_for(self, name: str, optimizer: Any) -> dict[Any, str]:
        """Returns the name of each parameter of an optimizer; behind its model's name if there are several models."""
        found = {}
        for model_name, model in self._models.items():
            for path, parameter in self._named(model).named_parameters():
                found[parameter] = model_name, _path(path)
        mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if odd := sum(parameter not in found for parameter in mine):
            raise UnsupportedOp(
                f"{odd} parameters of {name} are in no model of the training state, so they would have no name in a "
                "checkpoint: give TrainState their model too"
            )
        several = len({found[parameter][0] for parameter in mine}) > 1
        return {parameter: ".".join(found[parameter]) if several else found[parameter][1] for parameter in mine}

    def _named(self, model: Any) -> Any:
        """Returns the module within the wrappers of DDP and torch.compile, which add to names."""
        while True:
            if isinstance(model, self._torch.nn.parallel.DistributedDataParallel):
                model = model.module
            elif hasattr(model, "_orig_mod"):
                model = model._orig_mod
            else:
                return model

    def check(self) -> None:
        """Checks that all settings of the optimizers can be read again.

        Raises:
            UnsupportedOp: one cannot.
        """
        for name, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                for key, value in group.items():
                    data = io.BytesIO()
                    try:
                        if key != "params":
                            self._torch.save(_plain(value), data)
                            self._torch.load(io.BytesIO(data.getvalue()), weights_only=True)
                    except Exception as error:
                        raise UnsupportedOp(
                            f"{key} of {name} is a {type(value).__name__}, which torch.load(weights_only=True) refuses "
                            "to read from a checkpoint: make it a number, a text or a tensor"
                        ) from error

    def copied(self) -> dict[str, Any]:
        """Returns a copy of everything in main memory, as nested dicts for DCP."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        tree = {**self._live_models(), **{name: self._live_optimizer(name) for name in self._optimizers}}
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        staged: dict[str, Any] = DefaultStager(options).stage(tree)
        own = {
            "step": self._state.step,
            "receipts": list(self._state.receipts),
            "parts": self._own_parts(),
            "trained": {
                name: {_path(path): trains(parameter) for path, parameter in self._named(model).named_parameters()}
                for name, model in self._models.items()
            },
        }
        return {**staged, f"{_OWN}{self._position}": _bytes(encode_object(own))}

    def _live_models(self) -> dict[str, Any]:
        """Returns the values of each model, by their names in it: hooks of `state_dict` may rename and gather them."""
        return {name: dict(_values_of(self._named(model))) for name, model in self._models.items()}

    def _live_optimizer(self, name: str) -> dict[str, Any]:
        """Returns an optimizer's values, flat, as `get_optimizer_state_dict` of torch names them."""
        optimizer, found = self._optimizers[name], {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                path = self._names[name][parameter]
                for key, value in optimizer.state.get(parameter, {}).items():
                    found[f"state.{path}.{key}"] = _plain(value)
                for key, value in group.items():
                    if key != "params":
                        found[f"param_groups.{path}.{key}"] = _plain(value)
        return found

    def _own_parts(self) -> dict[str, Any]:
        return {
            name: {"arrays": {path: on_host(leaf) for path, leaf in part.arrays().items()}, "rest": part.rest()}
            for name, (_, part) in self._state.objects.items()
            if name in self._own_names()
        }

    @property
    def buffers(self) -> set[str]:
        """Names of what may differ between the ranks of a replica: statistics of the samples that each has seen."""
        return {
            f"{name}.{_path(path)}"
            for name, model in self._models.items()
            for path, _ in self._named(model).named_buffers()
        }

    def load(self, folder: Path, files: Collection[str]) -> None:
        """Loads a checkpoint of these files in place, of a replica of any size and layout.

        Raises:
            SizeMismatch: the checkpoint is of another model or state. If only a setting or a value of the user's own
                is another one, the state is incomplete then.
            CheckpointDamaged: it cannot be read; the state is incomplete.
        """
        from torch.distributed.checkpoint import CheckpointException

        try:
            self._load(folder, _read_table(folder, files))
        except (PacelineError, MemoryError):
            raise
        except CheckpointException as error:
            raise CheckpointDamaged(f"{folder} cannot be read: {_causes(error)}") from error
        except Exception as error:  # torch says with many kinds of errors that bytes are not those that it wrote
            raise CheckpointDamaged(f"{folder} cannot be read: {type(error).__name__}: {error!s:.500}") from error

    def _load(self, folder: Path, table: Any) -> None:
        from torch.distributed.checkpoint import FileSystemReader, load
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        saved = table.state_dict_metadata
        flat = {
            f"{name}.{path}": value for name, values in self._live_models().items() for path, value in values.items()
        }
        flat |= self._room_for_optimizers(saved)
        own = f"{_OWN}{self._position}"
        if own not in saved:
            own = f"{_OWN}0"  # a smaller replica wrote it
        flat[own] = self._torch.empty(saved[own].size if own in saved else 0, dtype=self._torch.uint8)
        _check_fit(folder, flat, saved)

        reader, planner = FileSystemReader(folder), DefaultLoadPlanner(flatten_state_dict=False)

        def load_value(item: Any, data: Any) -> None:
            planner.original_state_dict[item.dest_index.fqn] = self._torch.load(data, weights_only=True)

        planner.load_bytes = load_value  # torch's own runs what it reads
        reader.read_metadata = lambda *_, **__: table
        self._state.is_whole = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads what it needs
            load(flat, storage_reader=reader, planner=planner, no_dist=True)

        of_parameters = _by_prefix(flat)
        for name, optimizer in self._optimizers.items():
            self._load_optimizer(name, optimizer, of_parameters)
        self._load_own(decode_object(flat[own].numpy().tobytes()))

    def _load_own(self, saved: Any) -> None:
        parts = {name: part for name, (_, part) in self._state.objects.items() if name in self._own_names()}
        if odd := sorted(parts.keys() ^ saved["parts"].keys()):
            raise SizeMismatch(f"the state does not fit: {', '.join(odd)} on one side only")
        for name, part in parts.items():
            arrays, rest = saved["parts"][name]["arrays"], saved["parts"][name]["rest"]
            check_fit(part.arrays(), arrays)
            part.back_to((arrays, rest))
        with warning_of_frozen(self._state, saved["step"]):
            for name, model in self._models.items():
                was_trained = saved["trained"].get(name, {})
                for path, parameter in self._named(model).named_parameters():
                    if trains(parameter) != was_trained.get(_path(path), trains(parameter)):
                        parameter.requires_grad = not trains(parameter)
        self._state.step, self._state.receipts = saved["step"], checked_lines(saved["receipts"])
        self._state.is_whole = True

    def _own_names(self) -> list[str]:
        return [name for name in self._state.objects if name not in self._models and name not in self._optimizers]

    def _room_for_optimizers(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Returns, by the names of what a checkpoint has of the optimizers, tensors, and None for other values.

        An optimizer that has made no update yet has no state, so the table says what there is.
        """
        stored = _by_prefix(saved)
        room: dict[str, Any] = {}
        for name, paths in self._names.items():
            for parameter, path in paths.items():
                settings = f"{name}.param_groups.{path}"
                if settings not in stored:
                    raise SizeMismatch(
                        f"the checkpoint has no {settings}: {name} was not given or named so, or had others"
                    )
                for prefix in (f"{name}.state.{path}", settings):
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
                if n and any(str(numbered.get(key)) != str(value) for key, value in settings.items()):
                    raise SizeMismatch(
                        f"{path} is in a group of {name} with parameters whose settings in the checkpoint are others"
                    )
                numbered |= settings
        optimizer.load_state_dict(saved)


def _values_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a checkpoint has of a model: parameters, and buffers that are not marked as left out, with names."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                yield _WRAPPERS.sub("", f"{path}.{name}".removeprefix(".")), tensor.detach()


def write(folder: Path, tree: Mapping[str, Any], buffers: set[str], line: MateLine) -> list[SavedFile]:
    """Writes the content of all mates into an empty folder; returns its files, which are durable. All mates call it.

    Raises:
        CheckpointFailed: a rank could not write, or mates hold different values under one name; raised on all of them.
        ReplicaLost: a mate has ended.
    """
    _check_names(tree, buffers, line)
    table = line.save(folder, tree)

    def written() -> list[list[Any]]:
        mine = [path for path in folder.iterdir() if path.name.startswith(f"__{line.position}_")]
        if line.position == 0:
            write_file(folder / _TABLE, [memoryview(_table_text(table))])
            mine += [folder / _METADATA, folder / _TABLE]
        return [list(SavedFile.of(path)) for path in mine]

    return [SavedFile(*file) for files in line.each(written) for file in files]


def _causes(error: Any) -> str:
    """Returns what DCP's error says of each rank."""
    found = [f"rank {rank}: {type(why).__name__}: {why!s:.300}" for rank, (why, _) in error.failures.items()]
    return "; ".join(found[:_MOST_NAMES])


def _check_names(tree: Mapping[str, Any], buffers: set[str], line: MateLine) -> None:
    """Checks that a name means the same on all mates: a checkpoint keeps one tensor of each name.

    Plain tensors must be equal, and so must shards at one place that different meshes have.
    """
    tensors = {
        f"{name}.{path}": value
        for name, values in tree.items()
        if isinstance(values, dict)
        for path, value in values.items()
        if hasattr(value, "untyped_storage")
    }
    told = line.each(lambda: {name: [_described(value), _ranks_of(value)] for name, value in tensors.items()})
    again = {  # on several mates, which are not in one mesh
        name
        for name, value in tensors.items()
        if len(found := [one[name][1] for one in told if name in one]) > 1
        and (not _ranks_of(value) or min(found) != max(found))
    }
    heard = line.each(lambda: {name: [_place_of(tensors[name]), _digest(tensors[name])] for name in again})
    odd = sorted(
        name
        for name in set().union(*told)
        if len({one[name][0] for one in told if name in one}) > 1
        or len({tuple(one[name]) for one in heard if name in one}) > len({one[name][0] for one in heard if name in one})
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


def _described(tensor: Any) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} {tensor.placements if placement(tensor) else ''}"


def _ranks_of(tensor: Any) -> list[int]:
    """Returns the ranks over which a tensor is spread; none for a plain one."""
    return tensor.device_mesh.mesh.flatten().tolist() if placement(tensor) else []


def _place_of(tensor: Any) -> str:
    """Says which shard of a tensor this rank has."""
    return str(tensor.device_mesh.get_coordinate()) if placement(tensor) else ""


def _digest(tensor: Any) -> bytes:
    data = memory_of(local_of(tensor.detach()).contiguous())
    return hashlib.blake2b(data.reshape(-1).view(np.uint8).data, digest_size=16).digest()


def _bytes(data: bytes) -> Any:
    """Returns a tensor of bytes."""
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _path(path: str) -> str:
    """Returns the name of a parameter or buffer without the names of wrappers."""
    return _WRAPPERS.sub("", path)


def _plain(value: Any) -> Any:
    """Returns a Python number for one of NumPy, which `torch.load(weights_only=True)` refuses."""
    return value.item() if isinstance(value, np.generic) else value


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


def _table_text(table: Any) -> bytes:
    """Returns DCP's `Metadata` of a checkpoint as JSON."""
    tensors = {
        name: [
            str(entry.properties.dtype).removeprefix("torch."),
            list(entry.size),
            [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks],
        ]
        for name, entry in table.state_dict_metadata.items()
        if hasattr(entry, "chunks")
    }
    values = [name for name in table.state_dict_metadata if name not in tensors]
    places = [
        [index.fqn, index.offset and list(index.offset), index.index, place.relative_path, place.offset, place.length]
        for index, place in table.storage_data.items()
    ]
    return json.dumps({"tensors": tensors, "values": values, "places": places}, separators=(",", ":")).encode()


def _read_table(folder: Path, files: Collection[str]) -> Any:
    """Returns DCP's `Metadata` of a checkpoint, all of whose data must be in its files."""
    import torch
    from torch.distributed.checkpoint import filesystem, metadata

    path = folder / _TABLE
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise CheckpointDamaged(f"{path} has more than {MAX_MANIFEST_BYTES:,} bytes")
    found = json.loads(path.read_bytes())
    described: dict[str, Any] = {name: metadata.BytesStorageMetadata() for name in found["values"]}
    for name, (kind, shape, chunks) in found["tensors"].items():
        dtype = getattr(torch, kind)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointDamaged(f"{path} has no dtype for {name}")
        described[name] = metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype=dtype),
            torch.Size(shape),
            [metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks],
        )
    places = {}
    for name, offset, index, file, start, length in found["places"]:
        if file not in files:
            raise CheckpointDamaged(f"{path} names a file that is not of this checkpoint: {file!r:.200}")
        key = metadata.MetadataIndex(name, None if offset is None else torch.Size(offset), index)
        places[key] = filesystem._StorageInfo(file, start, length)
    return metadata.Metadata(described, storage_data=places)
