"""The other contender: DDP over Gloo, started by ``torchrun`` elastic, which restarts every rank when one has died.

It is as fast as possible: the data is mapped, not read; the checkpoint holds the position in the data, so that a
restart continues with the right sample; and each round of the rendezvous gets a store of its own. By default (torch
2.13) the agent's store outlives a restart with the addresses of the dead ranks in it, new ranks read them, and Gloo
fails with "connectFullMesh … Connection refused" until no restart is left: always with 4 ranks, sometimes with 2.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tally import BATCH, SAMPLES, STEPS, STEPS_AN_EPOCH, Tally, until

from hoop.data.sampler import SampleOrder

FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **FRESH_STORE}
PIXELS = 784
FIRST_S, REST_S = 120.0, 600.0


def rank_main(folder: Path, every: int, timeout: float) -> None:
    """One rank; writes each finished step with its time to a file of its process."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layers = [nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    size = SAMPLES * PIXELS
    images = torch.from_file(str(folder / "images"), size=size, dtype=torch.uint8).view(SAMPLES, PIXELS)
    labels = torch.from_file(str(folder / "labels"), size=SAMPLES, dtype=torch.uint8)
    checkpoint, done = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    with open(folder / f"steps-{os.getpid()}", "a", buffering=1) as log:
        while done < STEPS:
            samples = _samples(done + 1, rank, ranks)
            optimizer.zero_grad()
            inputs = images[samples].to(torch.float32).div_(255)
            nn.functional.cross_entropy(model(inputs), labels[samples].long()).backward()
            optimizer.step()
            done += 1
            log.write(f"{rank} {done} {time.time()}\n")
            if rank == 0 and done % every == 0:
                fresh = checkpoint.with_suffix(".new")
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
                torch.save(state, fresh)
                fresh.replace(checkpoint)
    if rank == 0:
        weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
        (folder / "weights").write_text(hashlib.sha256(weights).hexdigest())
    dist.destroy_process_group()


def _samples(step: int, rank: int, ranks: int) -> Any:
    """A rank's samples of a step, as from a distributed sampler: an epoch is a permutation, nothing is dropped."""
    epoch, position = divmod(step - 1, STEPS_AN_EPOCH)
    return SampleOrder(1, SAMPLES).indices(epoch, position, BATCH)[rank::ranks].copy()


class FinishedStep(NamedTuple):
    """A step that a rank has finished."""

    rank: int
    step: int
    time: float


def _finished_steps(folder: Path) -> dict[int, list[FinishedStep]]:
    """The finished steps of each process, by pid."""
    found = {}
    for path in folder.glob("steps-*"):
        lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.name[6:])] = [FinishedStep(int(rank), int(step), float(at)) for rank, step, at in lines]
    return found


@contextmanager
def _launched(folder: Path, ranks: int, every: int, timeout: float) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--max-restarts=3"]
    command += [str(Path(__file__).with_name("recovery.py")), "--rank", str(folder)]
    command += ["--every", str(every), "--gloo-timeout", str(timeout)]
    with open(folder / "complaints", "wb") as stderr:
        process = subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            for pid in _finished_steps(folder):  # each rank has a session of its own
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()


def torchrun(ranks: int, fault: signal.Signals | None, timeout: float, options: Any) -> dict[str, Any]:
    """Inject the fault into the highest rank during training, then let the training finish."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in ("images", "labels"):
            (folder / name).symlink_to(Path(options.data) / name)
        with _launched(folder, ranks, options.every, options.gloo_timeout) as process:
            found = {} if fault is None else _inject_fault(folder, ranks, fault, timeout, options.every)

            def ended() -> bool | None:
                if process.poll():
                    raise TimeoutError(f"torchrun gave up:\n{(folder / 'complaints').read_text()[-500:]}")
                return process.poll() is not None or None

            until(ended, REST_S, "the end of the training")
        tally = Tally()
        done = _finished_steps(folder)
        for steps in done.values():
            for one in steps:
                tally.feed(one.step, _samples(one.step, one.rank, ranks))
        last = {one.rank: one for steps in done.values() for one in steps if one.step == STEPS}
        assert len(last) == ranks, "every rank finished the last step"
        weights = (folder / "weights").read_text()
        return {**found, "samples_lost": tally.lost, "samples_repeated": tally.repeated, "weights": weights}


def _inject_fault(folder: Path, ranks: int, fault: signal.Signals, timeout: float, every: int) -> dict[str, float]:
    """Inject after one and a half checkpoints, and wait for the first step that all restarted ranks finish."""

    def training() -> bool | None:
        steps = _finished_steps(folder)
        return (len(steps) == ranks and all(len(one) > 1.5 * every for one in steps.values())) or None

    until(training, FIRST_S, "first steps")
    before = _finished_steps(folder)
    victim = next(pid for pid, steps in before.items() if steps[-1].rank == ranks - 1)
    fault_time = time.time()
    os.kill(victim, fault)

    def restarted() -> list[FinishedStep] | None:
        first = [steps[0] for pid, steps in _finished_steps(folder).items() if pid not in before and steps]
        return first if len(first) == ranks else None

    first = until(restarted, timeout, "a step after the fault")
    last = max(steps[-1].step for pid, steps in _finished_steps(folder).items() if pid in before and steps)
    return {
        "seconds": max(one.time for one in first) - fault_time,
        "steps_repeated": max(0, last + 1 - first[0].step),
    }
