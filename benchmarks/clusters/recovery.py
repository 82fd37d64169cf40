"""A node is lost during training: Hoop on Ray beside Ray Train's own elastic training, and torchft.

    python benchmarks/clusters/recovery.py --turns 3
    python benchmarks/clusters/recovery.py --turns 1 --epochs 1 --contenders 'hoop, local;torchft'

hoop, ray-train    a Ray cluster of a head and four nodes with one CPU each, on this machine, of which one is removed
                   without notice: by ``hoop.train(on=hoop.Ray(devices=4))``, and by a ``TorchTrainer``,
                   ``num_workers=(2, 4)``, DDP over Gloo and a checkpoint every ``--every`` steps
hoop, local        three devices of this machine without Ray, of which one is killed
torchft            three replicas of this machine, DDP over Gloo and a lighthouse, of which one is killed

MNIST by the MLP 784-128-64-10, global batch 256, SGD, 4 epochs. The fault comes after 150 steps (hoop, local: 100), and
the training goes on to its end on what is left. Samples are counted from each contender's own record of finished steps;
the final weights are compared with those of the same contender without the fault.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECOVERY = Path(__file__).resolve().parent.parent / "recovery"
sys.path.insert(0, str(RECOVERY))

from tally import BATCH, EPOCHS, SAMPLES, STEPS, STEPS_AN_EPOCH, Tally, until  # noqa: E402

NODES, FAULT_STEP, PIXELS = 4, 150, 784
LEAST = 2
STARTS = 5
TURN_S = 1_500.0
Result = dict[str, Any]


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _retried(start: Callable[[], Any]) -> Any:
    """Ray gives a node 30 s to start, which is short on a busy machine."""
    for attempt in range(STARTS):
        try:
            return start()
        except Exception as error:  # Ray raises nothing more special
            if "timed out during startup" not in str(error) or attempt == STARTS - 1:
                raise
    raise AssertionError("it returns or raises")


def write_data(folder: Path) -> None:
    """MNIST as two files, which the processes of a contender map."""
    from hoop.data.catalog import load

    train: Any = load("mnist").train
    (folder / "images").write_bytes(train.images.tobytes())
    (folder / "labels").write_bytes(train.labels.astype("uint8").tobytes())


class Nodes:
    """A Ray cluster on this machine whose last node can be removed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False}
        self.cluster = _retried(lambda: Cluster(initialize_head=True, head_node_args=head))
        self._nodes = [_retried(lambda: self.cluster.add_node(num_cpus=1)) for _ in range(NODES)]

    def remove_one(self) -> None:
        self.cluster.remove_node(self._nodes.pop(), allow_graceful=False)


# ---- Hoop


def hoop(nodes: Nodes, folder: Path, disturb: bool, options: argparse.Namespace) -> Result:
    """``recovered`` says at which step the others went on; the next step's time is in the event that has it."""
    from on_hoop import _count_samples

    import hoop as package

    del options
    found: Result = {}
    fault: dict[str, float] = {}
    recovered: dict[str, float] = {}

    def note(event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "steps":
            last = event["first"] + len(event["loss"])
            if recovered and "seconds" not in found and last > recovered["step"]:
                index = max(0, int(recovered["step"]) - event["first"])
                found["seconds"] = recovered["time"] + event["seconds"][index] - fault["time"]
                found["steps_repeated"] = max(0, int(fault["last"]) - int(recovered["step"]))
            if not fault and disturb and last > FAULT_STEP:
                fault.update(time=time.time(), last=last)
                threading.Thread(target=nodes.remove_one).start()
            elif fault and not recovered:
                fault["last"] = last
        if kind == "recovered" and fault:
            recovered.update(step=event["step"], time=event["time"])

    where = package.Ray(devices=NODES, placement="spread", address=nodes.cluster.address)
    run = {"batch_size": BATCH, "optimizer": "sgd", "lr": 0.05, "epochs": EPOCHS, "evaluate_every": 0}
    out = folder / "run"
    trained = package.train("mnist", on=where, out=out, progress=note, memory="64MiB", **run)
    return {**found, **_count_samples(out), "weights": trained.summary["weights_sha256"]}


# ---- Ray Train


def worker(config: dict[str, Any]) -> None:
    """A worker of Ray Train: DDP over Gloo. It writes each finished step to a file of its process."""
    import ray.train
    import torch
    from ray.train.torch import prepare_model
    from torch import nn

    from hoop.data.sampler import SampleOrder

    torch.set_num_threads(1)
    folder = Path(config["folder"])
    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(1)
    layers = [nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
    model = prepare_model(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images = torch.from_file(str(folder / "images"), size=SAMPLES * PIXELS, dtype=torch.uint8).view(SAMPLES, PIXELS)
    labels = torch.from_file(str(folder / "labels"), size=SAMPLES, dtype=torch.uint8)
    done, order = 0, SampleOrder(1, SAMPLES)
    if (start := ray.train.get_checkpoint()) is not None:
        with start.as_directory() as kept:
            state = torch.load(Path(kept) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    with open(folder / f"steps-{os.getpid()}", "a", buffering=1) as log:
        while done < STEPS:
            epoch, position = divmod(done, STEPS_AN_EPOCH)
            mine = order.indices(epoch, position, BATCH)[rank::ranks].copy()
            optimizer.zero_grad()
            inputs = images[mine].to(torch.float32).div_(255)
            nn.functional.cross_entropy(model(inputs), labels[mine].long()).backward()
            optimizer.step()
            done += 1
            log.write(f"{rank} {ranks} {done} {time.time()}\n")
            if done % config["every"] == 0 or done == STEPS:
                _report(ray.train, model, optimizer, done, rank)
    if rank == 0:
        weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
        (folder / "weights").write_text(hashlib.sha256(weights).hexdigest())


def _report(train: Any, model: Any, optimizer: Any, done: int, rank: int) -> None:
    import torch

    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = None
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
            torch.save(state, Path(scratch) / "state.pt")
            checkpoint = train.Checkpoint.from_directory(scratch)
        train.report({"done": done}, checkpoint=checkpoint)


def _finished(folder: Path) -> dict[int, list[tuple[int, int, int, float]]]:
    """By process: rank, number of ranks, step and time of each finished step."""
    found = {}
    for path in folder.glob("steps-*"):
        lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.name[6:])] = [(int(one[0]), int(one[1]), int(one[2]), float(one[3])) for one in lines]
    return found


def ray_train(nodes: Nodes, folder: Path, disturb: bool, options: argparse.Namespace) -> Result:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from hoop.data.sampler import SampleOrder

    write_data(folder)
    ray.init(address=nodes.cluster.address, log_to_driver=False)
    trainer = TorchTrainer(
        worker,
        train_loop_config={"folder": str(folder), "every": options.every},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=(LEAST, NODES), resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=3)),
    )
    found: Result = {}
    disturbing = threading.Thread(target=lambda: found.update(_disturb(nodes, folder)) if disturb else None)
    disturbing.start()
    trainer.fit()
    disturbing.join()
    ray.shutdown()
    tally, order = Tally(), SampleOrder(1, SAMPLES)
    for steps in _finished(folder).values():
        for rank, ranks, step, _ in steps:
            tally.feed(step, order.indices(*divmod(step - 1, STEPS_AN_EPOCH), BATCH)[rank::ranks])
    counts = {"samples_lost": tally.lost, "samples_repeated": tally.repeated}
    return {**found, **counts, "weights": (folder / "weights").read_text()}


def _disturb(nodes: Nodes, folder: Path) -> Result:
    def training() -> bool | None:
        steps = _finished(folder)
        return (len(steps) >= LEAST and all(len(one) > FAULT_STEP for one in steps.values())) or None

    until(training, TURN_S, "the first steps")
    before = set(_finished(folder))
    fault_time = time.time()
    nodes.remove_one()

    def restarted() -> list[tuple[int, int, int, float]] | None:
        first = [steps[0] for pid, steps in _finished(folder).items() if pid not in before and steps]
        return first if first and len(first) == first[0][1] else None

    first = until(restarted, TURN_S, "a step after the fault")
    last = max(steps[-1][2] for pid, steps in _finished(folder).items() if pid in before and steps)
    return {
        "seconds": max(one[3] for one in first) - fault_time,
        "steps_repeated": max(0, last + 1 - first[0][2]),
        "workers_after": first[0][1],
    }


# ---- without Ray


def hoop_local(nodes: None, folder: Path, disturb: bool, options: argparse.Namespace) -> Result:
    """Three devices of this machine, one of which is killed."""
    from on_hoop import hoop as on_this_machine

    del nodes, folder
    found: Result = on_this_machine(3, signal.SIGKILL if disturb else None, TURN_S, options)
    return found


def torchft(nodes: None, folder: Path, disturb: bool, options: argparse.Namespace) -> Result:
    from on_torchft import torchft as replicas

    del nodes
    write_data(folder)
    return replicas(folder, disturb, FAULT_STEP, options.join_timeout_ms)


# ---- turns

ON_RAY = {"hoop": hoop, "ray-train": ray_train}
CONTENDERS: dict[str, Callable[..., Result]] = {**ON_RAY, "hoop, local": hoop_local, "torchft": torchft}


def turn_main(name: str, disturb: bool, options: argparse.Namespace) -> None:
    """One turn, in a process of its own with a Ray cluster of its own; prints the result as JSON."""
    nodes = Nodes() if name in ON_RAY else None
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = CONTENDERS[name](nodes, Path(folder), disturb, options)
    finally:
        if nodes is not None:
            nodes.cluster.shutdown()
    print(json.dumps(found), flush=True)


def _turn(name: str, disturb: bool, options: argparse.Namespace) -> Result:
    command = [sys.executable, __file__, "--turn", name, "--every", str(options.every)]
    command += ["--join-timeout-ms", str(options.join_timeout_ms)]
    command += ["--disturb"] if disturb else []
    small = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "HOOP_BENCH_EPOCHS": str(options.epochs)}
    environment = {**os.environ, **small}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TURN_S, check=False)
    if done.returncode:
        return {"said": done.stderr[-2000:]}
    found: Result = json.loads(done.stdout.splitlines()[-1])
    return found


def _range(turns: list[Result], key: str) -> str:
    values = sorted(one[key] for one in turns)
    return f"{values[0]:,}" if values[0] == values[-1] else f"{values[0]:,} to {values[-1]:,}"


def _print(found: dict[str, list[Result]]) -> None:
    print(
        "| | node lost to the next finished step, s (median) | least to most | steps repeated | samples dropped | ",
        end="",
    )
    print("samples repeated | weights as undisturbed | recovered |")
    print("|---" * 8 + "|")
    for name, turns in found.items():
        done = [one for one in turns if "seconds" in one]
        cells = [name, *["–"] * 6, f"{len(done)} of {len(turns)}"]
        if done:
            times = sorted(one["seconds"] for one in done)
            cells[1:3] = [f"{statistics.median(times):.2f}", f"{times[0]:.2f} to {times[-1]:.2f}"]
            cells[3:6] = [_range(done, key) for key in ("steps_repeated", "samples_lost", "samples_repeated")]
            cells[6] = f"{sum(one['equal'] for one in done)} of {len(done)}"
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=3, help="of each contender")
    parser.add_argument("--every", type=int, default=100, help="steps between Ray Train's checkpoints")
    parser.add_argument("--join-timeout-ms", type=int, default=100, help="how long torchft's lighthouse waits")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="1 for a short try")
    parser.add_argument("--contenders", default=";".join(CONTENDERS), help="some of them, with semicolons")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--turn", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--disturb", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--replica", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        from on_torchft import replica_main

        number, lighthouse, folder = options.replica
        replica_main(int(number), lighthouse, Path(folder))
        return
    if options.turn:
        turn_main(options.turn, options.disturb, options)
        return
    found: dict[str, list[Result]] = {}
    for name in options.contenders.split(";"):
        _log(f"{name}, undisturbed …")
        undisturbed = _turn(name, False, options)
        _log(f"{name}, undisturbed: {undisturbed}")
        found[name] = []
        for turn in range(1, options.turns + 1):
            one = _turn(name, True, options)
            one["equal"] = "weights" in one and one["weights"] == undisturbed.get("weights")
            found[name].append(one)
            _log(f"{name}, turn {turn} of {options.turns}: {one}")
    if options.json:
        print(json.dumps({"machine": platform.platform(), "load": os.getloadavg()[0], "turns": found}))
    else:
        _print(found)


if __name__ == "__main__":
    main()
