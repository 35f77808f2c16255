"""The workers of the experiments on a GPU: `python bench/gpu/roles.py ROLE ...`; `run.py` beside it starts them.

A worker prints a line of JSON for each event. SIGUSR1 writes the stacks of all its threads to stderr.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import json
import signal
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from time import monotonic, perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import paceline
import paceline.torch
from paceline._links.base import Peer
from paceline.engines import DataEngine, EngineFailed, EngineTimeout, OnDevice, Ticket
from paceline.engines._catalogue import make_engine

BATCH = 64
QUEUED = (1, 2, 8)
"""Numbers of sums that are under way when the engine is aborted."""

PROFILED = 10
"""Steps in which the profiler says when the device runs."""

GENERATIONS = 20
"""Engines that are opened, used, aborted and thrown away one after the other, to see whether memory comes back."""


def tell(event: str, **facts: Any) -> None:
    """Prints a line for the parent."""
    sys.stdout.write(json.dumps({"event": event, "at": monotonic(), **facts}) + "\n")
    sys.stdout.flush()


def finish(device: torch.device) -> None:
    """Waits until the device is idle, so that the clock counts its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def used_memory(device: torch.device) -> int:
    """Returns the bytes of the device that all processes use; 0 on the CPU."""
    if device.type == "cpu":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def digest(model: Any) -> str:
    """Returns a hash of all parameters and buffers; a collective if they are sharded."""
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()


# Models --------------------------------------------------------------------------------------------------------------


def mlp(width: int) -> torch.nn.Module:
    """Returns 8 linear layers: 8.4 M parameters if they are 1,024 wide."""
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))


def normed(width: int) -> torch.nn.Module:
    """Returns an MLP with batch normalisation, which has buffers."""
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


class Gpt(torch.nn.Module):
    """A transformer of GPT-2's shape: 12 layers of width 768 have 124 M parameters. Input int64[B, T] of tokens."""

    def __init__(self, layers: int = 12, width: int = 768, tokens: int = 50_304, length: int = 512) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(tokens, width)
        self.places = torch.nn.Embedding(length, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                width, max(1, width // 64), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = torch.nn.LayerNorm(width)
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits[B, T, tokens]; the last layer shares the embedding's weights."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.norm(hidden) @ self.words.weight.T


def gpt(width: int) -> Gpt:
    """Returns GPT-2 small; a tiny one if the width is below 1,024, to try the script on a CPU."""
    return Gpt() if width >= 1024 else Gpt(2, 64, 512, 32)


MODELS: dict[str, Callable[[int], torch.nn.Module]] = {"mlp": mlp, "normed": normed, "gpt": gpt}


def made(options: argparse.Namespace) -> torch.nn.Module:
    """Returns the model on its device, with the same values in all workers."""
    torch.manual_seed(0)
    model = MODELS[options.model](options.width).to(options.device)
    return model.bfloat16() if options.bf16 else model


def loss_of(options: argparse.Namespace, model: torch.nn.Module, rows: int, bare: torch.nn.Module) -> torch.Tensor:
    """Returns the loss of some rows, computed in 16 bits where the options say so."""
    if isinstance(bare, Gpt):
        tokens = bare.words.num_embeddings
        x = torch.arange(rows * bare.length, device=options.device).reshape(rows, bare.length) * 7 % tokens
        with _autocast(options):
            logits = model(x)
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), x.roll(-1, 1).flatten())
    x = torch.linspace(-1, 1, rows * options.width, device=options.device).reshape(rows, options.width)
    with _autocast(options):
        return model(x.bfloat16() if options.bf16 else x).float().square().mean()


def _autocast(options: argparse.Namespace) -> Any:
    if not options.autocast:
        return nullcontext()
    return torch.autocast(options.device.type, dtype=getattr(torch, options.autocast))


# Roles ---------------------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Trains in `session.steps`; tells how long each step and its update take, and what ends a step."""
    device = options.device
    with paceline.join() as session:
        tell("joined")
        bare = made(options)
        wrap: Any = paceline.torch.FSDP if options.sharded else paceline.torch.DDP
        model = wrap(bare, session.group, auto_wrap=torch.nn.Linear) if options.sharded else wrap(bare, session.group)
        if options.compiled:
            model.compile()
        flags = dict.fromkeys(options.optimizer_flag, True)
        optimizer = getattr(torch.optim, options.optimizer)(model.parameters(), lr=1e-4, **flags)
        scaler = torch.amp.GradScaler(device.type, enabled=options.scaled, init_scale=2.0**10)
        sampler = paceline.ElasticSampler(1 << 16, global_batch=options.batch, microbatches=options.microbatches)
        state = paceline.TrainState(model=model, optimizer=optimizer, scaler=scaler, sampler=sampler)
        total = options.total
        for step in session.steps(state, total=total):
            began = perf_counter()
            tell("begins", step=step.number)
            with step:
                optimizer.zero_grad()
                try:
                    for indices in _passes(step, options.microbatches):
                        scaler.scale(loss_of(options, model, max(1, len(indices)), bare)).backward()
                except paceline.PacelineError as error:
                    tell("raised", step=step.number, type=type(error).__name__)
                    raise
                tell("gradients", step=step.number)
                before = perf_counter()
                scaler.step(optimizer)
                update = perf_counter() - before
                scaler.update()
            finish(device)
            ended = "applied" if step.applied else "undone"
            tell(ended, step=step.number, world=step.world, seconds=perf_counter() - began, update=update)
        tell("done", digest=digest(model), memory=used_memory(device))


def _passes(step: Any, microbatches: int) -> Iterator[Any]:
    """Yields the indices of each backward pass of a step."""
    if microbatches:
        for micro in step.microbatches:
            with micro:
                yield micro.indices
    else:
        yield step.indices


def replica(options: argparse.Namespace) -> None:
    """Trains as one rank of a replica, with FSDP2 inside; tells each step, and a digest of what the rank has."""
    device = options.device
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    model: Any = made(options)
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    with paceline.join(replica=dist.group.WORLD) as session:
        paceline.torch.replicate(model, session)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        sampler = paceline.ElasticSampler(1 << 16, global_batch=options.batch, microbatches=options.microbatches)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        for step in session.steps(state, total=options.total):
            with step:
                optimizer.zero_grad()
                for indices in _passes(step, options.microbatches):
                    mine = torch.from_numpy(indices[rank::ranks]).to(device)
                    x = mine[:, None].expand(-1, options.width) / (1 << 16)
                    (model(x.float()).square().sum() * ranks / len(indices)).backward()
                tell("gradients", step=step.number)
                optimizer.step()
            tell("applied" if step.applied else "undone", step=step.number, world=session.replicas)
        parts = [parameter.to_local().detach().cpu().numpy().tobytes() for parameter in model.parameters()]
        tell("done", digest=hashlib.sha256(b"".join(parts)).hexdigest(), rank=rank)
    dist.destroy_process_group()


def carry(options: argparse.Namespace) -> None:
    """Sums gradients of 256 MB on the device over links; tells the time, and that of its parts alone."""
    device, count = options.device, 64 << 20
    if device.type == "cpu":
        count = 1 << 20
    module = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(count // 16, device=device)) for _ in range(16))
    host = torch.empty(count, pin_memory=device.type != "cpu")
    here = torch.ones(count, device=device)
    times: dict[str, list[float]] = {}
    with paceline.join() as session:
        group = session.group
        model = paceline.torch.DDP(module, group, bucket_mb=16)
        model.prepare()
        array = host.numpy()
        array[:] = 1

        def passed() -> None:
            model.backward(sum(parameter.sum() for parameter in module))

        def copied() -> None:
            host.copy_(here, non_blocking=True)
            here.copy_(host, non_blocking=True)

        ways = {"sum": passed, "copies": copied, "links": lambda: group.all_reduce(array, out=array)}
        for way, work in ways.items():
            for number in range(options.total):
                finish(device)
                group.barrier()
                began = perf_counter()
                work()
                finish(device)
                if number >= 3:
                    times.setdefault(way, []).append(perf_counter() - began)
                array[:] = 1
    tell("times", times=times, bytes=4 * count)


def compare(options: argparse.Namespace) -> None:
    """Takes steps of torch's DDP in turns with steps of Paceline's, outside of `session.steps` and without its gate."""
    device = options.device
    with paceline.join() as session:
        group = session.group
        where = f"tcp://127.0.0.1:{options.port}"
        dist.init_process_group(options.engine, init_method=where, rank=group.rank, world_size=group.size)
        torchs, ours = made(options), made(options)
        ways = {
            "torch": (torch.nn.parallel.DistributedDataParallel(torchs), torchs),
            "paceline": (paceline.torch.DDP(ours, group), ours),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(options.total + 3):  # the first ones open connections and plan buckets
            for way, (model, bare) in ways.items():
                group.barrier()
                began = perf_counter()
                model.zero_grad()
                loss_of(options, model, options.batch // group.size, bare).backward()
                finish(device)
                if number >= 3:
                    times[way].append(perf_counter() - began)
        dist.destroy_process_group()
        tell("times", times=times)


def gate(options: argparse.Namespace) -> None:
    """Takes the same steps with one worker in a bare loop, with the wrapper, and in `session.steps` with either."""
    device = options.device

    def fresh(wrap: Callable[[torch.nn.Module], Any]) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer]:
        bare = made(options)
        model = wrap(bare)
        return model, bare, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def compute(model: Any, bare: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss_of(options, model, options.batch, bare).backward()
        optimizer.step()

    times: dict[str, list[float]] = {}
    idle: dict[str, float | None] = {}

    def timed(way: str, begun: float) -> None:
        finish(device)
        times.setdefault(way, []).append(perf_counter() - begun)

    with paceline.join() as session:
        wrappers: dict[str, Callable[[torch.nn.Module], Any]] = {
            "bare": lambda module: module,
            "wrapper": lambda module: paceline.torch.DDP(module, session.group),
        }
        for way, wrap in wrappers.items():
            taken = fresh(wrap)
            for _ in range(options.total):
                began = perf_counter()
                compute(*taken)
                timed(way, began)
            with idle_share(device, idle, way):
                for _ in range(PROFILED):
                    compute(*taken)
        model, bare, optimizer = fresh(wrappers[options.way])
        sampler = paceline.ElasticSampler(1 << 16, global_batch=options.batch)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        with ExitStack() as profiled:
            for step in session.steps(state, total=options.total + PROFILED):
                if step.number == options.total + 1:
                    profiled.enter_context(idle_share(device, idle, f"session.steps, {options.way}"))
                began = perf_counter()
                with step:
                    compute(model, bare, optimizer)
                if step.number <= options.total:
                    timed(f"session.steps, {options.way}", began)
    tell("times", times={way: each[3:] for way, each in times.items()}, idle=idle)


@contextmanager
def idle_share(device: torch.device, found: dict[str, float | None], way: str) -> Iterator[None]:
    """Notes in which share of the block's time the device runs nothing; None if the profiler does not see it."""
    found[way] = None
    if device.type == "cpu":
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        began = perf_counter()
        yield
        finish(device)
        seconds = perf_counter() - began
    busy, until = 0.0, 0.0
    kernels = [
        each.time_range
        for each in seen.events()
        if each.device_type != torch.autograd.DeviceType.CPU and not each.is_user_annotation
    ]
    for begin, end in sorted((each.start, each.end) for each in kernels):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    if busy:
        found[way] = 1 - busy * 1e-6 / seconds


@contextmanager
def opened(options: argparse.Namespace, group: Any) -> Iterator[DataEngine]:
    """Yields an engine of a group that has made its first sum."""
    engine = make_engine(options.engine)
    engine.open(group.rank, group.members, 10.0)
    try:
        mine = engine.contact(monotonic() + 30)
        engine.connect(group.all_gather_object(mine))
        engine.await_ready(monotonic() + 30)
        yield engine
    finally:
        engine.abort()
        engine.close(monotonic() + 5)


def _outcome(ticket: Ticket, seconds: float) -> str:
    """Returns what became of a sum within a time."""
    try:
        ticket.wait(monotonic() + seconds)
    except EngineFailed as error:
        return f"EngineFailed: {error}"
    except EngineTimeout:
        return "no end"
    return "summed"


def sums(options: argparse.Namespace) -> None:
    """Sums arrays of all dtypes and several sizes, several at once; tells the first that is wrong, and all digests."""
    device, found = options.device, hashlib.sha256()
    with paceline.join() as session:
        group = session.group
        with opened(options, group) as engine:
            ranks = range(1, group.size + 1)
            for name in sorted(engine.traits.dtypes - {"int32", "int64"}):
                dtype = getattr(torch, name)
                for size in (1, 3, 1000, options.width << 12):
                    x = torch.full((size,), float(group.rank + 1), dtype=dtype, device=device)
                    finish(device)
                    result = _outcome(engine.all_reduce(OnDevice(x)), 20)
                    if result != "summed" or not bool((x == sum(ranks)).all()):
                        tell("wrong", dtype=name, size=size, result=result, value=float(x[0]))
            generator = torch.Generator().manual_seed(group.rank)
            several = [torch.randn(100_003, generator=generator).to(device) for _ in range(4)]
            finish(device)
            for ticket in [engine.all_reduce(OnDevice(x)) for x in several]:
                _outcome(ticket, 20)
            for x in several:
                found.update(x.cpu().numpy().tobytes())
            group.barrier()
        tell("done", digest=found.hexdigest())


def abort(options: argparse.Namespace) -> None:
    """Aborts an engine with sums under way that rank 1 has not begun; tells how long it takes until memory is free.

    Afterwards opens, uses and aborts engines one after the other, and tells the memory in use before and after.
    """
    device = options.device
    with paceline.join() as session:
        group = session.group
        for queued in QUEUED:
            with opened(options, group) as engine:
                warm = OnDevice(torch.ones(1 << 20, device=device))
                engine.all_reduce(warm).wait(monotonic() + 30)
                group.barrier()
                if group.rank != 1:
                    tensors = [torch.ones(4 << 20, device=device) for _ in range(queued)]
                    finish(device)
                    tickets = [engine.all_reduce(OnDevice(tensor)) for tensor in tensors]
                    threading.Event().wait(0.1)  # kernels begin; how many do is part of the question
                    began = monotonic()
                    engine.abort()
                    returned = monotonic() - began
                    for ticket in tickets:
                        _outcome(ticket, 30)
                    free = engine.drained(monotonic() + 30)
                    tell("aborted", queued=queued, returned=returned, drained=monotonic() - began if free else None)
                group.barrier()
        memory, seconds = [], []
        for _ in range(GENERATIONS):
            began = monotonic()
            with opened(options, group) as engine:
                seconds.append(monotonic() - began)
                _outcome(engine.all_reduce(OnDevice(torch.ones(1 << 20, device=device))), 30)
                group.barrier()
            group.barrier()
            memory.append(used_memory(device))
            group.barrier()
        tell("generations", memory=memory, opened=statistics.median(seconds), threads=threading.active_count())
        tell("done")


def broken(options: argparse.Namespace) -> None:
    """Ends one rank's communicator without a word to the others, while all live; tells what each rank's sum becomes."""
    with paceline.join() as session:
        group = session.group
        with opened(options, group) as engine:
            x = OnDevice(torch.ones(1 << 20, device=options.device))
            _outcome(engine.all_reduce(x), 30)
            group.barrier()
            began = monotonic()
            if group.rank == 1:
                engine.abort()
            else:
                result = _outcome(engine.all_reduce(x), 15)
                tell("outcome", result=result, seconds=monotonic() - began)
            group.barrier()
        tell("done")


ROLES: dict[str, Callable[[argparse.Namespace], None]] = {
    role.__name__: role for role in (train, replica, carry, compare, gate, sums, abort, broken)
}


def main() -> None:
    """Runs one role, once the parent says so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--optimizer-flag", choices=("fused", "capturable"), nargs="*", default=())
    parser.add_argument("--autocast", choices=("bfloat16", "float16"))
    parser.add_argument("--bf16", action="store_true", help="parameters and gradients have 16 bits")
    parser.add_argument("--scaled", action="store_true", help="with a GradScaler")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--batch", type=int, default=BATCH, help="rows of all ranks together")
    parser.add_argument("--sharded", action="store_true", help="with FSDP, each linear layer a unit")
    parser.add_argument("--microbatches", type=int, default=0, help="of each step")
    parser.add_argument("--total", type=int, default=50)
    parser.add_argument("--port", type=int)
    parser.add_argument("--way", choices=("bare", "wrapper"), default="wrapper", help="of steps in session.steps")
    parser.add_argument("--warm", action="store_true", help="opens an engine of one rank before it joins")
    parser.add_argument("--blocking", type=int, help="NCCL's config.blocking, in place of the engine's choice")
    options = parser.parse_args()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if options.device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(options.device)
        torch.ones(1, device=options.device)  # the device's context takes seconds: it is there before the clock starts
    if options.blocking is not None:
        _choose_blocking(options.blocking)
    if options.warm and options.engine == "nccl":
        warm_up(options)
    tell("ready")
    sys.stdin.readline()
    ROLES[options.role](options)


def warm_up(options: argparse.Namespace) -> None:
    """Does what only the first engine, and the first matrix product, of a process has to do."""
    began = monotonic()
    engine = make_engine(options.engine)
    engine.open(0, [Peer(0, "0", "localhost", "127.0.0.1:1")], 10.0)
    engine.connect([engine.contact(monotonic() + 30)])
    engine.await_ready(monotonic() + 30)
    engine.close(monotonic() + 5)
    opened_at = monotonic()
    model = made(options)
    loss_of(options, model, 2, model).backward()
    finish(options.device)
    tell("warm", engine=opened_at - began, model=monotonic() - opened_at)


def _choose_blocking(value: int) -> None:
    from paceline.torch._device_engine import DeviceEngine

    chosen = DeviceEngine._options

    def options(engine: Any) -> Any:
        found = chosen(engine)
        found.config.blocking = value
        return found

    DeviceEngine._options = options  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
