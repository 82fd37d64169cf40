"""A job of which one device hangs in the middle of training, in forward.

As soon as the folder of the run, ``$HANG_RUN``, has a checkpoint, the first device that finds the file ``$HANG_MARK``
renames it and hangs, as ``$HANG_KIND`` says: it sleeps, computes for ever, waits for a lock, or holds the interpreter's
lock. A rank goes on from a checkpoint only when its file is in the folder (``written_checkpoints``).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

import hoop
from hoop.runs.checkpoint_store import listed

sys.path.append(str(Path(__file__).resolve().parents[1]))

from written_checkpoints import wait_for_files

MARK, KIND, RUN = (os.environ.get(name, "") for name in ("HANG_MARK", "HANG_KIND", "HANG_RUN"))
FOREVER_S = 1000

if RUN:
    wait_for_files(Path(RUN))


class Hanging(nn.Module):
    """Identity, except in the process that finds the mark."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not self.training or not os.path.exists(MARK) or not listed(Path(RUN)):
            return values
        try:
            os.rename(MARK, MARK + ".fired")
        except OSError:
            return values
        if KIND == "sleep":
            time.sleep(FOREVER_S)
        if KIND == "loop":
            while True:
                pass
        if KIND == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if KIND == "interpreter":
            ctypes.PyDLL(None).sleep(FOREVER_S)
        return values


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), Hanging(), nn.Linear(16, 16), nn.Linear(16, 3))


def data() -> hoop.Splits:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(203, 6, generator=generator)
    targets = (inputs @ torch.randn(6, 3, generator=generator)).argmax(1)
    return hoop.Splits(hoop.TensorData(inputs, targets), hoop.TensorData(inputs[:50], targets[:50]))


job = hoop.Job(model=model, data=data, settings={"batch_size": 32, "shards": 8, "epochs": 1000})
