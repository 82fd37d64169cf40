"""The cost of MobileNetV2 on a GPU without launches: forward and backward of a shard, replayed as a CUDA graph.

    python layouts.py

By number of samples, memory format and precision; deterministic kernels only.
"""

from __future__ import annotations

import argparse
import time

import torch

from hoop.engine.stage.accelerator import Accelerator
from hoop.models.vision import mobilenetv2

CONFIGURATIONS = {
    "float32": (False, False, False),
    "float32, channels last": (True, False, False),
    "TF32": (False, True, False),
    "TF32, channels last": (True, True, False),
    "bfloat16, channels last": (True, False, True),
}


def replay_ms(rows: int, channels_last: bool, tf32: bool, half: bool, repeats: int = 10) -> float:
    """Milliseconds per replay."""
    accelerator = Accelerator(torch.device("cuda", 0), tf32)
    model = mobilenetv2(0).to(accelerator.device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    inputs = torch.randn(rows, 3, 32, 32, device=accelerator.device).contiguous(memory_format=layout)
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
    options = parser.parse_args()
    print("| samples | " + " | ".join(CONFIGURATIONS) + " |")
    print("|---" * (1 + len(CONFIGURATIONS)) + "|")
    for rows in options.samples:
        print(
            f"| {rows} | "
            + " | ".join(f"{replay_ms(rows, *configuration):.2f}" for configuration in CONFIGURATIONS.values())
            + " |"
        )


if __name__ == "__main__":
    main()
