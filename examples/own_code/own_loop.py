"""A training loop of your own with hoop.elastic: the same weights on one device and on several, if one is killed too.

python examples/own_code/own_loop.py                                   one device
hoop run -np 3 examples/own_code/own_loop.py                           three
hoop run -np 3 --min-np 1 examples/own_code/own_loop.py                goes on when one is lost
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn

import hoop.elastic

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
inputs = torch.randn(800, 6)
targets = (inputs @ torch.randn(6, 4)).argmax(1)

run = hoop.elastic.Run(
    model=model, optimizer=optimizer, scheduler=scheduler, data=(inputs, targets), batch_size=100, shards=6, epochs=8
)
for step in run.steps():
    for x, y in step.shards():
        step.backward(F.cross_entropy(model(x), y), weight=len(y))
    step.update()

weights = b"".join(one.detach().numpy().tobytes() for one in model.state_dict().values())
print(f"{step.number + 1} steps, loss {step.loss:.4f}, weights {hashlib.sha256(weights).hexdigest()[:16]}")
