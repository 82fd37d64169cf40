"""torchft: replicas of a model, each one process, sums over Gloo and a lighthouse that says who takes part.

The gradients are summed as one vector by ``Manager.allreduce``: torchft's DDP (0.2.0) raises an AssertionError in its
hook when a replica is lost during the sum, and the process ends.

A replica that is lost is left out of the next step; its part of the samples is not trained, as with torchft's own
``DistributedSampler``, which gives each replica a fixed part.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tally import BATCH, SAMPLES, STEPS, STEPS_AN_EPOCH, Tally, until

REPLICAS, PIXELS = 3, 784
TURN_S = 1_500.0


def replica_main(replica: int, lighthouse: str, folder: Path) -> None:
    """One replica, in a process of its own.

    It writes each step that it has committed to a file, and the hash of its weights at the end.
    """
    import torch
    import torchft
    from torch import nn
    from torch.distributed import TCPStore

    from hoop.data.sampler import SampleOrder

    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers = [nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
    model: Any = nn.Sequential(*layers)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=REPLICAS - 1,
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica_{replica}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        timeout=timedelta(seconds=30),
    )
    optimizer, parameters = torchft.Optimizer(manager, inner), list(model.parameters())
    images = torch.from_file(str(folder / "images"), size=SAMPLES * PIXELS, dtype=torch.uint8).view(SAMPLES, PIXELS)
    labels = torch.from_file(str(folder / "labels"), size=SAMPLES, dtype=torch.uint8)
    order = SampleOrder(1, SAMPLES)
    with open(folder / f"steps-{replica}", "a", buffering=1) as log:
        while (done := manager.current_step()) < STEPS:
            mine = order.indices(*divmod(done, STEPS_AN_EPOCH), BATCH)[replica::REPLICAS].copy()
            optimizer.zero_grad()
            inputs = images[mine].to(torch.float32).div_(255)
            nn.functional.cross_entropy(model(inputs), labels[mine].long()).backward()
            total = nn.utils.parameters_to_vector([one.grad for one in parameters])
            manager.allreduce(total).wait()
            nn.utils.vector_to_parameters(total, [one.grad for one in parameters])
            optimizer.step()
            if manager.current_step() > done:
                log.write(f"{manager.current_step()} {time.time()}\n")
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    (folder / f"weights-{replica}").write_text(hashlib.sha256(weights).hexdigest())
    manager.shutdown(wait=False)


def _finished(folder: Path, replica: int) -> list[tuple[int, float]]:
    path = folder / f"steps-{replica}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [(int(line.split()[0]), float(line.split()[1])) for line in lines if line.endswith("\n")]


def torchft(folder: Path, disturb: bool, fault_step: int, join_timeout_ms: int) -> dict[str, Any]:
    """Trains; with ``disturb`` the last replica is killed after ``fault_step`` steps."""
    from torchft.coordination import LighthouseServer

    from hoop.data.sampler import SampleOrder

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=REPLICAS - 1, join_timeout_ms=join_timeout_ms)
    command = [sys.executable, str(Path(__file__).with_name("recovery.py")), "--replica"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    replicas = [
        subprocess.Popen(
            [*command, str(number), lighthouse.address(), str(folder)],
            env=environment,
            stderr=open(folder / f"errors-{number}", "wb"),  # noqa: SIM115 - the process has it
        )
        for number in range(REPLICAS)
    ]
    found: dict[str, Any] = {}
    victim, survivors = REPLICAS - 1, range(REPLICAS - 1)
    try:
        if disturb:
            until(lambda: len(_finished(folder, victim)) > fault_step or None, TURN_S, "the first steps")
            fault_time = time.time()
            replicas[victim].send_signal(signal.SIGKILL)
        for replica in replicas[:victim] if disturb else replicas:
            if replica.wait(TURN_S):
                raise RuntimeError((folder / "errors-0").read_text()[-2000:])
    finally:
        for replica in replicas:
            replica.kill()
            replica.wait()
        lighthouse.shutdown()
    if disturb:
        found["seconds"] = max(_pause_end(_finished(folder, one), fault_time) for one in survivors) - fault_time
        steps = [[step for step, _ in _finished(folder, one)] for one in survivors]
        found["steps_repeated"] = max(len(one) - len(set(one)) for one in steps)
    tally, order = Tally(), SampleOrder(1, SAMPLES)
    for number in range(REPLICAS):
        for step, _ in _finished(folder, number):
            tally.feed(step, order.indices(*divmod(step - 1, STEPS_AN_EPOCH), BATCH)[number::REPLICAS])
    weights = (folder / "weights-0").read_text()
    return {**found, "samples_lost": tally.lost, "samples_repeated": tally.repeated, "weights": weights}


def _pause_end(steps: list[tuple[int, float]], fault_time: float) -> float:
    """The end of the longest time between two steps of a survivor, of those that end after the fault."""
    pairs = [(one[1], other[1]) for one, other in itertools.pairwise(steps) if other[1] > fault_time]
    return max(pairs, key=lambda pair: pair[1] - pair[0])[1]
