"""Elastic training, as a Horovod script: only the import names Hoop. It goes on when a rank is killed.

hoop run -np 3 --min-np 2 examples/horovod/elastic.py --kill-rank 1
"""

import argparse
import os
import signal

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hoop.horovod as hvd  # with Horovod: import horovod.torch as hvd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=8, help="of a rank")
parser.add_argument("--batches-per-commit", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--kill-rank", type=int, help="this rank kills itself in the second epoch, the first time only")


def main() -> None:
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(7)
    inputs = torch.randn(600, 4)
    dataset = TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]))
    sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True)

    model = nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr), named_parameters=model.named_parameters()
    )
    dies = args.kill_rank == hvd.rank() and os.environ.get("HOOP_RESTART_COUNT", "0") == "0"

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < args.epochs:
            loader = DataLoader(dataset, args.batch_size, sampler=state.sampler)  # the samples that are left
            loss = torch.zeros(())  # the ranks may have changed after the last batch of the epoch
            for number, (features, targets) in enumerate(loader):
                if dies and state.epoch == 1 and number == 10:
                    os.kill(os.getpid(), signal.SIGKILL)
                state.optimizer.zero_grad()
                loss = mse_loss(state.model(features), targets)
                loss.backward()
                state.optimizer.step()
                state.sampler.record_batch(number, args.batch_size)
                if (number + 1) % args.batches_per_commit == 0:
                    state.commit()
            total = hvd.allreduce(loss.detach())
            if hvd.rank() == 0:
                print(f"epoch {state.epoch + 1}: loss {total.item():.6f}, {hvd.size()} ranks", flush=True)
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    state.register_reset_callbacks([lambda: print(f"rank {hvd.rank()} of {hvd.size()} goes on", flush=True)])
    train(state)
    if hvd.rank() == 0:
        print(f"finished with {hvd.size()} ranks", flush=True)


if __name__ == "__main__":
    main()
