"""A plain torch loop that goes on when members die, by torch.distributed's own reconfiguration (torch 2.15 or newer).

    for rank in 0 1 2; do RANK=$rank WORLD_SIZE=3 PAUSE=0.05 python examples/torch_reconfigure.py & done; wait

Kill some: the others print the error, which names the lost ranks, and go on. At the end all print the same weights.
"""

import os
import time

import torch
import torch.distributed as dist

STEPS, BATCH = 300, 60
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29400"))

# For the handles; nobody needs it afterwards.
store = dist.TCPStore(host, port, is_master=rank == 0, wait_for_workers=False)
dist.init_process_group("paceline", store=store, rank=rank, world_size=world, enable_reconfigure=True)
store.set(f"handle/{rank}", dist._get_reconfigure_handle())
handles = [store.get(f"handle/{other}").decode() for other in range(world)]  # of those who train, in rank order

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
step = 0  # number of those that this member has applied
while True:
    try:
        # As many as are missing have died: all survivors count alike, and none uses a number twice.
        dist._reconfigure(world - len(handles), handles).wait()
        # One may have applied the step that another saw fail: all take the state of the newest.
        steps = [0] * dist.get_world_size()
        dist.all_gather_object(steps, step)
        state = [net.state_dict(), optimizer.state_dict()]
        dist.broadcast_object_list(state, src=steps.index(max(steps)))
        step = max(steps)
        net.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        model = torch.nn.parallel.DistributedDataParallel(net)
        while step < STEPS:
            batch = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))
            x = batch.tensor_split(dist.get_world_size())[dist.get_rank()]
            time.sleep(float(os.environ.get("PAUSE", "0")))  # seconds, as a larger model would take
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin())
            loss.backward()
            optimizer.step()
            step += 1
            if step % 50 == 0 and dist.get_rank() == 0:
                print(f"step {step}: loss {loss:.4f}, {dist.get_world_size()} members", flush=True)
        dist.barrier()  # before any leaves, all have the last step
        break
    except dist.DistBackendError as error:
        if not getattr(error, "ranks", ()):
            raise
        print(error, flush=True)  # every survivor has the same error with the same ranks
        handles = [handle for place, handle in enumerate(handles) if place not in error.ranks]

weights = torch.cat([p.detach().flatten() for p in net.parameters()])
print(f"done: step {step}, {dist.get_world_size()} members, weights {weights.norm():.9f}", flush=True)
dist.destroy_process_group()
