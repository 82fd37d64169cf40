"""Trains on a Ray cluster of several nodes on this machine, which loses or gains nodes in the middle.

Run by ``test_ray.py`` in a process of its own. Reads a scenario (JSON) from standard input; writes the result as a line
of JSON. The model is slow until the events of the scenario have happened, so that the training does not end before.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hoop

HURRY = "HOOP_TEST_HURRY"
"""Environment variable: the path of a file. While it does not exist, the model is slow."""
PACE_S = 0.2
DATA = torch.Generator().manual_seed(5)
INPUTS = torch.randn(203, 6, generator=DATA)
TARGETS = (INPUTS @ torch.randn(6, 3, generator=DATA)).argmax(1)
SETTINGS: dict[str, Any] = {
    "epochs": 1_000,
    "batch_size": 8,
    "shards": 4,
    "max_steps": 300,
    "evaluate_every": 0,
    "memory": "16MiB",
    "timeout_s": 300,
}


class Paced(nn.Module):
    """A small network. It is of ``__main__``, so that no node could import it: Ray must bring its code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not os.path.exists(os.environ[HURRY]):
            time.sleep(PACE_S)
        outputs: torch.Tensor = self.layers(values)
        return outputs


class Scenario:
    """Acts on the cluster when the training comes to the step of a script; hurries at the end of the script."""

    def __init__(self, cluster: Any, nodes: list[Any], script: list[str], hurry: Path) -> None:
        self._cluster, self._nodes, self._script, self._hurry = cluster, nodes, list(script), hurry
        self.seen: list[str] = []

    def note(self, event: dict[str, Any]) -> None:
        """``script`` alternates: a kind of event to wait for, and what to do then."""
        kind = str(event["kind"])
        if kind not in ("steps", "straggler", "balanced"):
            self.seen.append(kind)
            print(time.strftime("%T"), str(event)[:200], file=sys.stderr, flush=True)
        if self._script and kind == self._script[0]:
            _, action, *self._script = self._script
            print(time.strftime("%T"), f"{kind}: {action}", file=sys.stderr, flush=True)
            getattr(self, action)()

    def remove_node(self) -> None:
        self._cluster.remove_node(self._nodes.pop(), allow_graceful=False)

    def add_node(self) -> None:
        self._nodes.append(self._cluster.add_node(num_cpus=1, wait=False))

    def kill_coordinator(self) -> None:
        os.kill(coordinator_pid(), signal.SIGKILL)

    def hurry(self) -> None:
        self._hurry.touch()


def coordinator_pid() -> int:
    """The process of the coordinator's actor: Ray names a worker by its actor's class."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::CoordinatorActor") and os.getpid() != int(path.parent.name):
                environment = (path.parent / "environ").read_bytes()
                if f"HOOP_TEST_SESSION={os.environ.get('HOOP_TEST_SESSION', '')}".encode() in environment:
                    return int(path.parent.name)
        except OSError:
            continue
    raise AssertionError("there is no coordinator's actor")


def main() -> None:
    asked = json.load(sys.stdin)
    folder = tempfile.TemporaryDirectory(prefix="hoop-ray-test-")
    hurry = Path(folder.name) / "hurry"
    os.environ[HURRY] = str(hurry)
    hurry.touch()
    alone = hoop.train(Paced(), (INPUTS, TARGETS), devices=2, **SETTINGS)
    hurry.unlink()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(asked["nodes"])]
        elastic = asked.get("elastic")
        where = hoop.Ray(
            devices=asked["devices"],
            elastic=tuple(elastic) if elastic else None,
            placement="spread",
            address=cluster.address,
            runtime_env={"env_vars": {HURRY: str(hurry)}},
        )
        scenario = Scenario(cluster, nodes, asked["script"], hurry)
        out = Path(folder.name) / "run"
        trained = hoop.train(Paced(), (INPUTS, TARGETS), on=where, progress=scenario.note, out=out, **SETTINGS)
        report = {
            "alone": alone.summary["weights_sha256"],
            "ray": trained.summary["weights_sha256"],
            "steps": trained.summary["steps"],
            "devices": trained.summary["device_ids"],
            "seen": scenario.seen,
            "script_left": scenario._script,
            "files": sorted(path.name for path in out.iterdir()),
        }
    finally:
        cluster.shutdown()
        folder.cleanup()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
