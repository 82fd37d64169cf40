"""PyTorch DDP: torchrun --nproc-per-node 2 ddp.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

torch.manual_seed(0)
inputs = torch.randn(3000, 20)
targets = (inputs @ torch.randn(20, 5)).argmax(1)
dataset = torch.utils.data.TensorDataset(inputs, targets)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
sampler = DistributedSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=100 // dist.get_world_size(), sampler=sampler)
first = 0
if os.path.exists("ddp.pt"):
    saved = torch.load("ddp.pt")
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"]
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save(state, "ddp.pt")
if dist.get_rank() == 0:
    print(f"accuracy {(model(inputs).argmax(1) == targets).float().mean():.3f}")
dist.destroy_process_group()
