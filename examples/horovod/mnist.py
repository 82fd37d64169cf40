"""A convolutional network on digits, as a Horovod script: only the import names Hoop.

hoop run -np 2 examples/horovod/mnist.py --epochs 2
"""

import argparse
import gzip
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, nll_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hoop.horovod as hvd  # with Horovod: import horovod.torch as hvd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=32, help="of a rank")
parser.add_argument("--lr", type=float, default=0.01, help="of one rank; it is multiplied by the number of ranks")
parser.add_argument("--samples", type=int, default=4096, help="made up, if there is no --data-dir")
parser.add_argument("--data-dir", type=Path, help="folder with the four files of MNIST, as IDX or IDX.gz")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
parser.add_argument("--seed", type=int, default=42)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten()
        )
        self.classifier = nn.Sequential(nn.Linear(16 * 5 * 5, 64), nn.ReLU(), nn.Linear(64, 10), nn.LogSoftmax(dim=1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


def read_idx(folder: Path, name: str) -> torch.Tensor:
    """A file of MNIST: a header with the sizes of its dimensions, then bytes."""
    path = folder / name
    data = path.read_bytes() if path.exists() else gzip.decompress((folder / f"{name}.gz").read_bytes())
    sizes = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(data[3])]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)


def datasets(args: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    """The training and the test set."""
    if args.data_dir is not None:
        found = []
        for part in ("train", "t10k"):
            images = read_idx(args.data_dir, f"{part}-images-idx3-ubyte").float().unsqueeze(1) / 255
            labels = read_idx(args.data_dir, f"{part}-labels-idx1-ubyte").long()
            found.append(TensorDataset((images - 0.13) / 0.31, labels))
        return found[0], found[1]
    generator = torch.Generator().manual_seed(0)
    digits = torch.randn(10, 1, 28, 28, generator=generator)  # ten patterns; a sample is one of them with noise
    labels = torch.randint(10, (args.samples + 1024,), generator=generator)
    images = digits[labels] + 0.5 * torch.randn(len(labels), 1, 28, 28, generator=generator)
    split = args.samples
    return TensorDataset(images[:split], labels[:split]), TensorDataset(images[split:], labels[split:])


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


def main() -> None:
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    device = "cuda" if torch.cuda.is_available() else "cpu"

    train_set, test_set = datasets(args)
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler)
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    test_loader = DataLoader(test_set, 256, sampler=test_sampler)

    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
    )

    for epoch in range(1, args.epochs + 1):
        model.train()
        train_sampler.set_epoch(epoch)
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = nll_loss(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()

        model.eval()
        test_loss = correct = 0.0
        with torch.no_grad():
            for images, labels in test_loader:
                output = model(images.to(device))
                test_loss += cross_entropy(output, labels.to(device), reduction="sum").item()
                correct += (output.argmax(1) == labels.to(device)).sum().item()
        test_loss = metric_average(test_loss / len(test_sampler), "avg_loss")
        accuracy = metric_average(correct / len(test_sampler), "avg_accuracy")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: test loss {test_loss:.4f}, accuracy {100 * accuracy:.2f}%", flush=True)


if __name__ == "__main__":
    main()
