"""A training on Ray, from objects of this program: the model and the data travel by Ray, and nothing by file.

python examples/ray/train.py                          # on a Ray of its own, on this machine
python examples/ray/train.py --address 10.0.0.1:6379  # on a node of a cluster
ray job submit --working-dir examples/ray -- python train.py --devices 8 --elastic 4,16
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import hoop


def make_data(samples: int = 4_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in the plane, and whether they are inside of a ring."""
    points = torch.rand(samples, 2, generator=torch.Generator().manual_seed(1)) * 4 - 2
    return points, ((points.norm(dim=1) > 0.8) & (points.norm(dim=1) < 1.6)).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--address", help="Ray's head; otherwise RAY_ADDRESS, this machine's, or a new one")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1, help="that Ray reserves for a device")
    parser.add_argument("--elastic", help="least,most devices")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    elastic = None
    if options.elastic:
        least, most = map(int, options.elastic.split(","))
        elastic = (least, most)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    result = hoop.train(
        model,
        make_data(),
        on=hoop.Ray(devices=options.devices, cpus=options.cpus, elastic=elastic, address=options.address),
        epochs=options.epochs,
        batch_size=100,
        lr=0.01,
        memory="64MiB",
    )
    print(f"accuracy {result.accuracy:.2%}  weights sha256 {result.summary['weights_sha256']}")


if __name__ == "__main__":
    main()
