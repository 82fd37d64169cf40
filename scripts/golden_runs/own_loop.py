"""A program of scripts/golden: a training loop of its own with ``hoop.elastic``; started by ``hoop run`` or alone.

own_loop.py OUT [RANK STEP]: kills this rank in this step, once. Rank 0 writes the weights' hash and the losses to OUT.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import golden_job
import torch
from torch import nn

import hoop.elastic


def main(out: str, killed_rank: str = "", killed_step: str = "") -> None:
    torch.set_num_threads(1)
    model = golden_job.mixed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    run = hoop.elastic.Run(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=golden_job.samples(),
        batch_size=16,
        shards=4,
        epochs=2,
        clip=1.0,
        out=out,
    )
    losses: dict[int, float] = {}
    folder = Path(out).parent
    for step in run.steps():
        if str(step.number) == killed_step and str(run.rank) == killed_rank and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        for inputs, targets in step.shards():
            step.backward(nn.functional.cross_entropy(model(inputs), targets), weight=len(targets))
        step.update()
        if step.loss is not None:
            losses[step.number] = step.loss
    weights = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
    report = {"weights_sha256": hashlib.sha256(weights).hexdigest(), "losses": sorted(losses.items())}
    part = folder / f"result.{os.getpid()}"
    part.write_text(json.dumps(report))
    part.rename(folder / f"result-{run.rank}.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
