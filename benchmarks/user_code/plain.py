"""The program that the others are made from: one process."""

import torch
from torch import nn

torch.manual_seed(0)
inputs = torch.randn(3000, 20)
targets = (inputs @ torch.randn(20, 5)).argmax(1)
dataset = torch.utils.data.TensorDataset(inputs, targets)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loader = torch.utils.data.DataLoader(dataset, batch_size=100, shuffle=True)
for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
print(f"accuracy {(model(inputs).argmax(1) == targets).float().mean():.3f}")
