"""What MobileNetV2 costs a GPU, launching left out: forward and backward of a shard, recorded and played back.

    python layouts.py

By samples, order of channels and precision; only kernels that give the same bits each time.
"""

from __future__ import annotations

import argparse
import time

import torch

from hoop.engine.stage.gpu import Accelerator
from hoop.models.mobilenet import mobilenetv2

WAYS = {
    "float32": (False, False, False),
    "float32, channels last": (True, False, False),
    "TF32": (False, True, False),
    "TF32, channels last": (True, True, False),
    "bfloat16, channels last": (True, False, True),
}


def replayed(rows: int, channels_last: bool, tf32: bool, half: bool, repeats: int = 10) -> float:
    """Milliseconds."""
    accelerator = Accelerator(torch.device("cuda", 0), tf32)
    model = mobilenetv2(0).to(accelerator.device)
    order = torch.channels_last if channels_last else torch.contiguous_format
    inputs = torch.randn(rows, 3, 32, 32, device=accelerator.device).contiguous(memory_format=order)
    parameters = list(model.parameters())

    def compute() -> tuple[torch.Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16, enabled=half, cache_enabled=False):
            outputs = model(inputs)
        return torch.autograd.grad(outputs.float().sum(), parameters)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        compute()
        compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    graph.replay()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        graph.replay()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[32, 64, 256])
    given = parser.parse_args()
    print("| samples | " + " | ".join(WAYS) + " |")
    print("|---" * (1 + len(WAYS)) + "|")
    for rows in given.samples:
        print(f"| {rows} | " + " | ".join(f"{replayed(rows, *way):.2f}" for way in WAYS.values()) + " |")


if __name__ == "__main__":
    main()
