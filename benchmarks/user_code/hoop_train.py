"""hoop.train: python hoop_train.py"""

import functools

import torch
from torch import nn

import hoop

torch.manual_seed(0)
inputs = torch.randn(3000, 20)
targets = (inputs @ torch.randn(20, 5)).argmax(1)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
hoop.train(
    model,
    (inputs, targets),
    optimizer=functools.partial(torch.optim.Adam, lr=3e-3),
    devices=2,
    batch_size=100,
    epochs=3,
    out="hoop_train",
)
print(f"accuracy {(model(inputs).argmax(1) == targets).float().mean():.3f}")
