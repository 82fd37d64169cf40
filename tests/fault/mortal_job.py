"""A job that ends one of its devices in the middle of a shard.

As soon as the folder of the run, ``$MORTAL_RUN``, has a checkpoint, the first device that finds the file
``$MORTAL_MARK`` renames it and sends itself SIGKILL. ``$MORTAL_ERROR`` selects an error instead: ``assert`` fails an
assertion in a kernel on the device's GPU, ``illegal`` lets a kernel write to an address that is not its own, and any
other text raises PyTorch's error for a GPU without memory, with this text.

With ``$MORTAL_RUN`` a rank goes on from a checkpoint only when its file is in the folder (``written_checkpoints``).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import hoop
from hoop.runs.checkpoint_store import listed

sys.path.append(str(Path(__file__).resolve().parents[1]))

from written_checkpoints import wait_for_files

MARK, ERROR, RUN = (os.environ.get(name, "") for name in ("MORTAL_MARK", "MORTAL_ERROR", "MORTAL_RUN"))

if RUN:
    wait_for_files(Path(RUN))

WILD = 'extern "C" __global__ void wild(long long address) { *(int *)address = 1; }'


class Mortal(nn.Module):
    """Identity, except in the process that finds the mark."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not os.path.exists(MARK) or not listed(Path(RUN)):
            return values
        try:
            os.rename(MARK, MARK + ".fired")
        except OSError:
            return values
        if ERROR == "assert":
            torch._assert_async(torch.zeros((), device=values.device))
            torch.cuda.synchronize(values.device)
        if ERROR == "illegal":
            kernel = torch.cuda._compile_kernel(WILD, "wild")
            kernel((1, 1, 1), (1, 1, 1), (64,))
            torch.cuda.synchronize(values.device)
        if ERROR:
            raise torch.OutOfMemoryError(ERROR)
        os.kill(os.getpid(), signal.SIGKILL)
        return values


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), Mortal(), nn.Tanh(), nn.Linear(16, 3))


def data() -> hoop.Splits:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(203, 6, generator=generator)
    dataset = hoop.TensorData(inputs, inputs.argmax(1) % 3)
    return hoop.Splits(dataset, dataset)


job = hoop.Job(
    model,
    data,
    settings={"epochs": 1_000_000, "batch_size": 8, "shards": 6, "evaluate_every": 0, "keep": 2},
)
