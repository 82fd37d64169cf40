"""The step of the same models and batches in PyTorch alone: one process, eager and as one CUDA graph."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hoop.models.catalog import build

WARM_UPS, ROUNDS = 5, 5


def make(name: str, channels_last: bool) -> tuple[nn.Module, torch.Tensor, torch.Tensor, torch.optim.Optimizer, float]:
    """Model, inputs, targets, optimizer and clipping norm, as in the recipes."""
    torch.manual_seed(0)
    on: dict[str, Any] = {"device": "cuda"}
    adam: dict[str, Any] = {"fused": True, "capturable": True}
    if name == "mlp":
        model = build("mlp", 0).cuda()
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(5e-3, **on), **adam)
        return model, torch.randn(256, 1, 28, 28, **on), torch.randint(0, 10, (256,), **on), optimizer, 0.0
    if name == "gpt":
        model = build("gpt", 0).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(2e-3, **on), weight_decay=0.1, **adam)
        tokens = torch.randint(0, 65, (2, 64, 128), **on)
        return model, tokens[0], tokens[1], optimizer, 1.0
    model, images = build("mobilenetv2", 0).cuda(), torch.randn(256, 3, 32, 32, **on)
    if channels_last:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    return model, images, torch.randint(0, 10, (256,), **on), optimizer, 0.0


def measure(name: str, graph: bool, tf32: bool, half: bool, channels_last: bool, steps: int) -> float:
    """Seconds of a step: the median of several rounds."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    model, inputs, targets, optimizer, clip = make(name, channels_last)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=half, cache_enabled=not graph):
            outputs = model(inputs)
        functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten()).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=True)
        optimizer.step()

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    launch: Callable[[], None] = step
    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            step()
        launch = recorded.replay
    rounds = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            launch()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - started) / steps)
    return statistics.median(rounds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50, help="steps of a round")
    options = parser.parse_args()
    for name, tf32, half in (
        ("mlp", False, False),
        ("mobilenet", True, False),
        ("mobilenet", False, True),
        ("gpt", False, False),
    ):
        for graph in (False, True):
            seconds = measure(name, graph, tf32, half, channels_last=half, steps=options.steps)
            print(
                json.dumps({"model": name, "tf32": tf32, "bfloat16": half, "graph": graph, "ms": 1e3 * seconds}),
                flush=True,
            )


if __name__ == "__main__":
    main()
