"""DistributedDataParallel on the MLP: one process, two with Gloo, two with Hoop, in one run.

    python benchmarks/ddp/ddp.py --rounds 9 --steps 100

MLP 784-128-64-10, global batch 256, SGD; every process has one core (``OMP_NUM_THREADS=1``). All processes stay alive
and take turns, round by round, so that noise affects all contenders alike; the figure is the median of the rounds. At
the end every contender must have the same loss.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONTENDERS = {"one": 1, "gloo": 2, "hoop": 2}
"""The number of processes of each; the first has no process group."""
BATCH = 256
BATCHES = 32
WARM_UP = 20


def rank_main(contender: str, rank: int, ranks: int, store: str) -> None:
    """One process: reads numbers of steps from stdin, and writes the seconds that they took to stdout, line by line."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    images, labels = torch.rand(BATCHES, BATCH, 784), torch.randint(0, 10, (BATCHES, BATCH))
    own = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    if ranks > 1:
        dist.init_process_group(contender, init_method=f"file://{store}", rank=rank, world_size=ranks)
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss_of = nn.CrossEntropyLoss()
    done = 0
    for line in sys.stdin:
        steps = int(line)
        started = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model(images[done % BATCHES, own]), labels[done % BATCHES, own])
            loss.backward()
            optimizer.step()
            done += 1
        seconds = time.perf_counter() - started
        with torch.no_grad():
            total = float(loss_of(model(images[0]), labels[0]))
        sys.stdout.write(json.dumps({"seconds": seconds, "loss": total}) + "\n")
        sys.stdout.flush()
    if ranks > 1:
        dist.destroy_process_group()


class Team:
    """The processes of one contender."""

    def __init__(self, name: str, ranks: int, folder: str) -> None:
        self.name = name
        self.times: list[float] = []
        self.loss = 0.0
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", f"{name} {rank} {ranks} {Path(folder) / name}"],
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(ranks)
        ]

    def run(self, steps: int) -> float:
        """Seconds per step of the slowest rank."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers: list[dict[str, float]] = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{self.name}: rank {rank} ended with code {process.wait()}")
            answers.append(json.loads(line))
        losses = {answer["loss"] for answer in answers}
        assert len(losses) == 1, f"{self.name}: the ranks have different models: losses {sorted(losses)}"
        self.loss = losses.pop()
        return max(answer["seconds"] for answer in answers) / steps

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """Medians and ratios of all contenders."""
    with tempfile.TemporaryDirectory() as folder:
        teams = [Team(name, ranks, folder) for name, ranks in CONTENDERS.items()]
        try:
            for team in teams:
                team.run(WARM_UP)
            for _ in range(rounds):
                for team in teams:
                    team.times.append(team.run(steps))
        finally:
            for team in teams:
                team.close()
    for team in teams[1:]:
        assert abs(team.loss - teams[0].loss) < 1e-3, f"{team.name}: loss {team.loss}, one process {teams[0].loss}"
    median = {team.name: statistics.median(team.times) for team in teams}
    return {
        "seconds_a_step": median,
        "spread": {team.name: [min(team.times), max(team.times)] for team in teams},
        "hoop_over_one": median["one"] / median["hoop"],
        "hoop_over_gloo": median["gloo"] / median["hoop"],
        "loss": {team.name: team.loss for team in teams},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }


def as_table(results: dict[str, Any]) -> str:
    lines = ["| | us a step | fastest, slowest round | speed, one process = 1 |", "|---|---|---|---|"]
    names = {"one": "one process", "gloo": "two with Gloo", "hoop": "two with Hoop"}
    for name, seconds in results["seconds_a_step"].items():
        low, high = results["spread"][name]
        speed = results["seconds_a_step"]["one"] / seconds
        lines.append(f"| {names[name]} | {seconds * 1e6:.0f} | {low * 1e6:.0f}, {high * 1e6:.0f} | {speed:.2f}x |")
    lines.append(
        f"\nHoop is {results['hoop_over_one']:.2f}x one process and {results['hoop_over_gloo']:.2f}x Gloo; "
        f"{results['machine']}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100, help="steps a round")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        contender, rank, ranks, store = arguments.rank.split(" ", 3)
        rank_main(contender, int(rank), int(ranks), store)
        return
    results = measure(arguments.rounds, arguments.steps)
    sys.stdout.write((json.dumps(results) if arguments.json else as_table(results)) + "\n")


if __name__ == "__main__":
    main()
