"""Horovod with elastic training: horovodrun -np 2 --min-np 1 horovod_elastic.py"""

import horovod.torch as hvd
import torch
from torch import nn

torch.manual_seed(0)
inputs = torch.randn(3000, 20)
targets = (inputs @ torch.randn(20, 5)).argmax(1)
dataset = torch.utils.data.TensorDataset(inputs, targets)
hvd.init()
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=100 // hvd.size(), sampler=sampler)


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 3):  # noqa: B020 - as in the examples of Horovod
        state.sampler.set_epoch(state.epoch)
        for batch, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            state.sampler.record_batch(batch, 100 // hvd.size())
            if batch % 10 == 9:
                state.commit()
        state.commit()


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0))
if hvd.rank() == 0:
    print(f"accuracy {(model(inputs).argmax(1) == targets).float().mean():.3f}")
