"""Images a second of a network on made-up images, as a Horovod script: only the import names Hoop.

hoop run -np 2 examples/horovod/synthetic_benchmark.py --num-iters 3
"""

import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hoop.horovod as hvd  # with Horovod: import horovod.torch as hvd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--batch-size", type=int, default=16, help="of a rank")
parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
parser.add_argument("--image-size", type=int, default=32)
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=5)
parser.add_argument("--num-iters", type=int, default=5)
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")


def block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def main() -> None:
    args = parser.parse_args()
    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    device = "cuda" if torch.cuda.is_available() else "cpu"

    width = args.width
    model = nn.Sequential(
        block(3, width),
        block(width, 2 * width),
        block(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 1000),
    ).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(1000, (args.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    for _ in range(args.num_warmup_batches):
        step()
    rates = []
    for number in range(args.num_iters):
        began = time.perf_counter()
        for _ in range(args.num_batches_per_iter):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        rates.append(args.batch_size * args.num_batches_per_iter / (time.perf_counter() - began))
        if hvd.rank() == 0:
            print(f"iteration {number}: {rates[-1]:.1f} images/s a rank", flush=True)
    mean = hvd.allreduce(torch.tensor(statistics.fmean(rates))).item()
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks: {mean:.1f} images/s a rank, {hvd.size() * mean:.1f} in all", flush=True)


if __name__ == "__main__":
    main()
