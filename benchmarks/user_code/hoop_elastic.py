"""hoop.elastic: hoop run -np 2 --min-np 1 hoop_elastic.py"""

import torch
from torch import nn

import hoop.elastic

torch.manual_seed(0)
inputs = torch.randn(3000, 20)
targets = (inputs @ torch.randn(20, 5)).argmax(1)
dataset = torch.utils.data.TensorDataset(inputs, targets)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
run = hoop.elastic.Run(
    model=model, optimizer=optimizer, data=dataset, batch_size=100, epochs=3, out="hoop_elastic", resume="auto"
)
for step in run.steps():
    for x, y in step.shards():
        loss = nn.functional.cross_entropy(model(x), y)
        step.backward(loss, weight=len(y))
    step.update()
if run.rank == 0:
    print(f"accuracy {(model(inputs).argmax(1) == targets).float().mean():.3f}")
