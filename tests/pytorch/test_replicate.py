"""`replicate` between two replicas gives the gradients of one process, whatever parallelism is inside."""

from __future__ import annotations

import pytest
from pytorch.replica_ranks import run_replicas

pytestmark = pytest.mark.needs(what="torch")

TENSOR_PARALLEL = """
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

def in_tensors(model, mesh=inner):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model

def in_sequences(model, mesh=inner):
    for block in model.blocks:
        parallelize_module(block, mesh, {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        })
    parallelize_module(model, mesh, {"head": SequenceParallel()})
    return model
"""


@pytest.mark.parametrize(
    ("settings", "device", "engine"),
    [
        ("", False, "links"),
        ("", False, "gloo"),
        ("", True, "links"),
        ("", True, "gloo"),
        ("reshard_after_forward=False", False, "links"),
        ("reshard_after_forward=True", False, "links"),
        ("offload_policy=CPUOffloadPolicy(pin_memory=False)", False, "links"),
    ],
)
def test_fsdp_inside_gives_the_gradients_of_one_process(settings: str, device: bool, engine: str) -> None:
    code = f"""
from torch.distributed.tensor import Replicate, distribute_tensor
assert group._core.engine_name == {engine!r}
reference = built()
model = sharded(built(seed=replica), {settings})  # replica 1 takes the values of replica 0
model.register_buffer("of_replica_0", distribute_tensor(torch.full((3,), float(replica)), inner, [Replicate()]))
paceline.torch.replicate(model, group).prepare()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
theirs = torch.optim.AdamW(reference.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    theirs.zero_grad()
    loss_of(model, mine).backward()
    loss_of(reference, X).backward()
    check(model, reference)
    ours_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    their_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(whole(ours_norm), their_norm)
    optimizer.step()
    theirs.step()
for p, q in zip(model.parameters(), reference.parameters(), strict=True):
    torch.testing.assert_close(whole(p.detach()), q.detach())
assert model.of_replica_0.full_tensor().tolist() == [0.0] * 3
"""
    run_replicas(code, device=device, engine=engine)


def test_fsdp_with_mixed_precision_gives_all_replicas_the_same_bits() -> None:
    run_replicas("""
model = sharded(built(dtype=torch.float32), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
reference = built(dtype=torch.float32)
paceline.torch.replicate(model, group)
for step in range(2):
    model.zero_grad()
    loss_of(model, mine.float()).backward()
loss_of(reference, X.float()).backward()
check(model, reference, rtol=0.1, atol=0.02)
""")


def test_parameters_of_bfloat16_are_averaged() -> None:
    run_replicas("""
model, reference = sharded(built(dtype=torch.bfloat16)), built(dtype=torch.float32)
paceline.torch.replicate(model, group)
loss_of(model, mine.bfloat16()).backward()
loss_of(reference, X.float()).backward()
check(model, reference, rtol=0.1, atol=0.05)
""")


def test_compressed_gradients_have_the_same_bits_in_all_replicas() -> None:
    run_replicas("""
model, reference = sharded(built()), built()
paceline.torch.replicate(model, group, compression="bf16", error_feedback=False)
loss_of(model, mine).backward()
loss_of(reference, X).backward()
check(model, reference, rtol=0.02, atol=0.005)
""")


def test_frozen_and_tied_parameters_are_left_and_shared() -> None:
    run_replicas("""
def tied():
    net = Net(6)
    net.again = nn.Linear(6, 6)
    net.again.weight = net.head.weight
    net.blocks[0].up.weight.requires_grad_(False)
    return net
model, reference = built(make=tied), built(make=tied)
for net in (model, reference):
    net.forward = lambda x, net=net: net.again(Net.forward(net, x))
fully_shard(model, mesh=inner)
paceline.torch.replicate(model, group)
for step in range(2):
    model.zero_grad()
    loss_of(model, mine).backward()
loss_of(reference, X).backward()
check(model, reference)
""")


def test_tensor_parallelism_inside_gives_the_gradients_of_one_process() -> None:
    run_replicas(
        TENSOR_PARALLEL
        + """
model, reference = in_tensors(built(seed=replica)), built()
dist.barrier()
paceline.torch.replicate(model, group).prepare()
for step in range(2):
    model.zero_grad()
    loss_of(model, ours).backward()
loss_of(reference, X).backward()
check(model, reference)
"""
    )


def test_sequence_parallelism_inside_gives_the_gradients_of_one_process() -> None:
    run_replicas(
        TENSOR_PARALLEL
        + """
model, reference = in_sequences(built()), built()
paceline.torch.replicate(model, group)
for step in range(2):
    model.zero_grad()
    x = DTensor.from_local(ours.chunk(2, 1)[position], inner, [Shard(1)])
    loss_of(model, x).full_tensor().backward()
loss_of(reference, X).backward()
check(model, reference)
"""
    )


def test_fsdp_and_tensor_parallelism_inside_give_the_gradients_of_one_process() -> None:
    run_replicas(
        TENSOR_PARALLEL
        + """
both = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("outer", "shard", "tp"))
model, reference = in_tensors(built(), both["tp"]), built()
sharded(model, both["shard"])
paceline.torch.replicate(model, group)
here = X[rank // 2 * 4:][: 4]
for step in range(2):
    model.zero_grad()
    loss_of(model, here).backward()
loss_of(reference, X).backward()
check(model, reference)
""",
        size=4,
    )


def test_ddp_of_torch_inside_gives_the_gradients_of_one_process() -> None:
    run_replicas("""
model = nn.parallel.DistributedDataParallel(built(), process_group=inner.get_group())
reference = built()
replicated = paceline.torch.replicate(model, group)
for step in range(3):
    model.zero_grad()
    loss_of(model, mine).backward()
loss_of(reference, X).backward()
check(model, reference)
""")


@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_a_pipeline_inside_gives_the_gradients_of_one_process(schedule: str) -> None:
    stages = 1 if schedule == "Schedule1F1B" else 2
    run_replicas(f"""
from torch.distributed.pipelining import PipelineStage, {schedule}

parts = {stages} * k
chain = nn.Sequential(*(built(seed, make=Block) for seed in range(parts)))
reference = copy.deepcopy(chain)
held = nn.ModuleList(chain[i] for i in range(position, parts, k))
stages = [
    PipelineStage(stage, position + i * k, parts, torch.device("cpu"), group=inner.get_group())
    for i, stage in enumerate(held)
]
loss = lambda out, target: (out - target).square().mean()
schedule = {schedule}(stages if {stages} > 1 else stages[0], n_microbatches=4, loss_fn=loss)
replicated = paceline.torch.replicate(held, group)
for step in range(2):
    held.zero_grad()
    with replicated.no_sync():
        schedule.step(*([ours] if position == 0 else []), **(dict(target=ours.flip(0)) if position == k - 1 else {{}}))
    replicated.sync_gradients()
loss(reference(X), torch.cat([X[:8].flip(0), X[8:].flip(0)])).backward()
check(held, nn.ModuleList(reference[i] for i in range(position, parts, k)))
""")


def test_checkpointed_blocks_are_averaged() -> None:
    run_replicas("""
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

model, reference = built(), built()
for i, block in enumerate(model.blocks):
    model.blocks[i] = checkpoint_wrapper(block)
sharded(model)
paceline.torch.replicate(model, group)
for step in range(2):
    model.zero_grad()
    loss_of(model, mine).backward()
loss_of(reference, X).backward()
check(model, reference)
""")


def test_compiled_blocks_are_averaged() -> None:
    run_replicas(
        """
model, reference = built(), built()
for block in model.blocks:
    block.compile(backend="aot_eager")
sharded(model)
paceline.torch.replicate(model, group)
for step in range(2):
    model.zero_grad()
    loss_of(model, mine).backward()
loss_of(reference, X).backward()
check(model, reference)
""",
        timeout=120.0,
    )
