"""A job of one rank: training with DDP, and collectives of each kind, over NCCL on a GPU, over gloo on the host."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

device = os.environ.get("GPU_CHECK_DEVICE", "cuda")
if device == "cuda":
    torch.cuda.set_device(0)
dist.init_process_group("nccl" if device == "cuda" else "gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).to(device)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
x = torch.randn(32, 256, device=device)
for _ in range(3):
    optimizer.zero_grad()
    loss = (ddp(x) - x).square().mean()
    loss.backward()
    optimizer.step()
world = dist.get_world_size()
given, gathered = torch.arange(64.0, device=device), torch.empty(64 * world, device=device)
pending = dist.all_reduce(given, async_op=True)
other = x @ x.T
pending.wait()
dist.all_gather_into_tensor(gathered, given)
dist.broadcast(other, 0)
scattered = torch.empty(64 * world, device=device)
dist.all_to_all_single(scattered, gathered)
if device == "cuda":  # what a stream of its own computes is sent, and used where the wait is
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        doubled = given * 2
        pending = dist.all_reduce(doubled, async_op=True)
    pending.wait()
    other = other + doubled.sum()
print("loss", loss.item(), "sum", (gathered + scattered).sum().item() + other.sum().item())
dist.destroy_process_group()
