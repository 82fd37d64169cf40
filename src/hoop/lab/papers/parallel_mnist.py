"""Paper 4: softmax regression on MNIST by cores, nodes and image size, with Hoop, MPI and a task-based engine.

The baselines run ``softmax_rank.py`` in separate processes, serially and under mpirun, and ``softmax_tasks.py`` on Ray.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hoop.data.catalog import load
from hoop.data.dataset import Splits
from hoop.data.mnist import mnist
from hoop.engine.recipes import softmax
from hoop.errors import FailedPrecondition, PeerLost
from hoop.lab.papers.experiment import END_S, Experiment, Findings, TrainingRun, grade, make_table
from hoop.lab.papers.predicted import ETHERNET, INFINIBAND, measure_costs, simulate_curves
from hoop.lab.papers.subset import subset_of
from hoop.launch.processes import terminate_process
from hoop.models.vision import softmax as softmax_model
from hoop.report.chart import Chart, ChartLine, Lines
from hoop.simulate.cluster import Link
from hoop.simulate.cost_model import Costs

SCRIPT = Path(__file__).with_name("softmax_rank.py")
TASKS_SCRIPT = SCRIPT.with_name("softmax_tasks.py")
TASKS = "tasks (Ray)"
BASELINE_S = 3600.0
"""Time limit of a baseline in seconds."""


@dataclass(frozen=True)
class ByHand:
    """The result of a baseline run; see ``softmax_rank.py``."""

    seconds: list[float]
    loss: list[float]
    functions: dict[str, float]

    @property
    def epoch(self) -> float:
        """Median seconds of an epoch, without the first if there are several."""
        steady = sorted(self.seconds[1:] or self.seconds)
        return steady[len(steady) // 2]


@contextmanager
def baseline_folder(images: int, side: int) -> Iterator[Path]:
    """A folder with the images, their labels and the initial weights, which are the same as Hoop's."""
    train: Any = mnist().train
    model: Any = softmax_model(0, inputs=side * side)
    weights = np.hstack([model[1].weight.detach().numpy(), model[1].bias.detach().numpy()[:, None]])
    with tempfile.TemporaryDirectory(prefix="hoop-") as name:
        folder = Path(name)
        np.save(folder / "images.npy", train.images[:images, 0])
        np.save(folder / "labels.npy", train.labels[:images])
        np.save(folder / "weights.npy", weights.astype(np.float32))
        yield folder


def run_serial(folder: Path, side: int, epochs: int, rate: float) -> ByHand:
    """Run the baseline in one process on one core."""
    return _run_baseline([sys.executable, str(SCRIPT)], folder, side, epochs, rate)[0]


def has_ray() -> bool:
    found = importlib.util.find_spec("ray")
    return found is not None and found.origin is not None  # a folder of that name on the path is no package


def run_tasks(nodes: Sequence[int], folder: Path, side: int, epochs: int, rate: float) -> list[ByHand]:
    """Run the baseline on a task-based engine, with each of these numbers of nodes."""
    given = ",".join(map(str, nodes))
    return _run_baseline([sys.executable, str(TASKS_SCRIPT)], folder, side, epochs, rate, given)


def run_mpi(mpirun: Path, ranks: int, folder: Path, side: int, epochs: int, rate: float) -> ByHand:
    """Run the baseline under mpirun with ``ranks`` ranks."""
    python = next((one for one in (str(mpirun.parent / "python"), sys.executable) if _has_mpi(one)), "")
    if not python:
        raise FailedPrecondition(f"mpirun: neither the Python beside {mpirun} nor this one has mpi4py and numpy")
    options = ["--oversubscribe", "--bind-to", "none"]
    if os.getuid() == 0:
        options.append("--allow-run-as-root")
    return _run_baseline([str(mpirun), "-n", str(ranks), *options, python, str(SCRIPT)], folder, side, epochs, rate)[0]


def _has_mpi(python: str) -> bool:
    command = [python, "-c", "import mpi4py, numpy"]
    return Path(python).exists() and not subprocess.run(command, stderr=subprocess.DEVNULL).returncode


def _run_baseline(program: list[str], folder: Path, side: int, epochs: int, rate: float, *more: str) -> list[ByHand]:
    """Run a program; returns the results that it printed, one a line."""
    command = [*program, str(folder), str(side // 28), str(epochs), repr(rate), *more]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE)
    try:
        out, _ = process.communicate(timeout=BASELINE_S)
    finally:
        if process.poll() is None:
            terminate_process(process, END_S)
    if process.returncode:
        raise PeerLost(f"{' '.join(program)} ended with code {process.returncode}; what it printed is above")
    return [ByHand(**json.loads(line)) for line in out.splitlines() if line.startswith("{")]


SIDES = (28, 56, 112)
"""Widths of the square images: 784, 3 136 and 12 544 pixels. (The paper's figure 7 says 3 248, which is no square.)"""
PAPER_PROFILE = {"hypothesis": 56.53, "gradient_update": 43.18, "softmax": 0.27, "training_step": 0.01}
TableRow = dict[str, Any]


def run(experiment: Experiment) -> Findings:
    findings = Findings()
    images, epochs = (2_000, 3) if experiment.quick else (60_000, 5)
    nodes = [count for count in (1, 2, 4, 8, 16) if count <= (2 if experiment.quick else max(4, experiment.cores))]
    findings.limits.append(
        f"A node is a device with one core; {experiment.cores} cores are here, and devices beyond that share them. The "
        "paper's nodes have as many cores as give it 10x, joined by InfiniBand."
    )
    if experiment.quick:
        findings.limits.append(
            f"A quick run: {images} of 60 000 images, so that an epoch is short and waits weigh more."
        )
    if experiment.mpirun is None:
        findings.limits.append("No mpirun was found or given (`--mpirun`): there are no MPI rows.")
    if not has_ray():
        findings.limits.append("Ray is not installed (`pip install 'hoop[ray]'`): there are no rows of tasks.")
    table: list[TableRow] = []
    profile: ByHand | None = None
    for side in SIDES:
        size_rows, serial = _one_size(experiment, side, images, epochs, nodes)
        table += size_rows
        profile = profile or serial
    assert profile is not None, "there are sizes"
    _profile(findings, profile, images)
    _speed(experiment, findings, table, nodes)
    _simulated(experiment, findings)
    return findings


def _one_size(
    experiment: Experiment, side: int, images: int, epochs: int, nodes: list[int]
) -> tuple[list[TableRow], ByHand]:
    """Run every contender on images of one size. Times are of an epoch, which is one step."""
    job = softmax(side)
    subset_job = dataclasses.replace(job, data=partial(_subset, side, images))
    rate = float(job.settings["lr"])
    settings: TableRow = {"epochs": epochs, "batch_size": images, "evaluate_every": 0}
    # More accumulation for larger images, so that the memory does not depend on their size.
    settings |= {"accumulate": 1 if experiment.quick else (side // 28) ** 2}
    table: list[TableRow] = []

    def add(contender: str, count: int, seconds: float, loss: float) -> None:
        row = {"pixels": side * side, "who": contender, "nodes": count, "epoch": seconds, "loss": loss}
        table.append(row)

    with baseline_folder(images, side) as folder:
        experiment.log(f"{side * side} pixels: by hand, one core")
        serial = run_serial(folder, side, epochs, rate)
        add("by hand, serial", 1, serial.epoch, serial.loss[-1])
        for count in nodes:
            one = experiment.train(f"{side * side} pixels", subset_job, devices=count, accelerator="cpu", **settings)
            add("Hoop", count, _epoch(one), one.losses[-1])
            if experiment.mpirun is not None:
                experiment.log(f"{side * side} pixels: MPI, {count} ranks")
                ranks = run_mpi(experiment.mpirun, count, folder, side, epochs, rate)
                add("MPI", count, ranks.epoch, ranks.loss[-1])
        if has_ray():
            experiment.log(f"{side * side} pixels: tasks on Ray")
            for count, tasks in zip(nodes, run_tasks(nodes, folder, side, epochs, rate), strict=True):
                add(TASKS, count, tasks.epoch, tasks.loss[-1])
        if experiment.accelerator != "cpu":
            one = experiment.train(f"{side * side} pixels", subset_job, **settings)
            add(f"Hoop, {experiment.accelerator}", 1, _epoch(one), one.losses[-1])
    for row in table:
        row["to serial"] = serial.epoch / row["epoch"]
        row["how"] = "measured"
    return table, serial


def _subset(side: int, images: int) -> Splits:
    return subset_of(load("mnist", size=side), images, 1000)


def _epoch(one: TrainingRun) -> float:
    steady = sorted(one.seconds[1:])
    return steady[len(steady) // 2]


def _profile(findings: Findings, profile: ByHand, images: int) -> None:
    whole = sum(profile.functions.values())
    share = {name: 100 * seconds / whole for name, seconds in profile.functions.items()}
    table = [
        {"function": name, "share": part, "paper": PAPER_PROFILE.get(name), "how": "measured"}
        for name, part in sorted(share.items(), key=lambda one: -one[1])
    ]
    findings.section(
        "Profile of the serial job",
        f"Softmax regression by hand (NumPy, one core, {images} images of 784 pixels). The paper's program scales "
        "pixels inside its two large functions, this one before them (load); matrix products take the rest.",
        make_table(table, "Where the time of the serial job goes", share="%", paper="%"),
    )
    work = share["load"] + share["hypothesis"] + share["gradient_update"]
    findings.claim(
        "forward pass and gradient take nearly all of the serial time",
        paper="56.53 % + 43.18 %",
        ours=f"{share['hypothesis'] + share['load']:.1f} % + {share['gradient_update']:.1f} %",
        how="measured",
        verdict="holds" if work > 90 else "in part" if work > 75 else "does not hold",
        why="so all that is worth sharing out is the loop over images; vectorised, the soft maximum shows too",
    )


def _speed(experiment: Experiment, findings: Findings, table: list[TableRow], nodes: list[int]) -> None:
    """Compare the contenders by speed: the table and its charts, and the paper's claims about speed."""
    who = ["Hoop"] + (["MPI"] if experiment.mpirun is not None else []) + ([TASKS] if has_ray() else [])
    findings.section(
        "Speed",
        "Every contender trains from the same first weights with the same rate: the losses show that it is the same "
        "job. **By hand** and **MPI** are one program: each rank adds up the gradient of its images, MPI_Reduce brings "
        "them to the root, MPI_Bcast the weights back. **Tasks**, where Ray is installed, are the same arithmetic on a "
        "task-based engine, which OmpCluster is in the paper: a head makes one task a node in every epoch.",
        make_table(table, "An epoch", epoch="s"),
        _speedup_chart(experiment, table, who, nodes),
        _epoch_chart(table, who, nodes[-1]),
    )
    at = max(count for count in nodes if count <= experiment.cores)
    _claim_one_node(experiment, findings, table, at)
    speedups = {name: _measured_speedups(table, name, SIDES[-1] ** 2)[nodes.index(at)] for name in who}
    if has_ray():
        _claim_tasks(experiment, findings, speedups, at)
    for name in who[: 2 if experiment.mpirun is not None else 1]:
        _claim_nodes(experiment, findings, name, speedups[name], at)
    if experiment.accelerator != "cpu":
        _claim_gpu(experiment, findings, table)


def _speedup_chart(experiment: Experiment, table: list[TableRow], who: list[str], nodes: list[int]) -> Chart:
    lines = [
        ChartLine(f"{name}, {side * side} pixels", nodes, _measured_speedups(table, name, side * side))
        for side in SIDES
        for name in who
    ]
    lines.append(ChartLine("linear", nodes, nodes, dashed=True))
    return Chart(
        "speed-up",
        "Speed-up by number of nodes",
        [Lines("times one node's speed", lines)],
        x_label=f"nodes, a core each ({experiment.cores} cores here)",
        subtitle="measured; the same job, one batch an epoch",
    )


def _epoch_chart(table: list[TableRow], who: list[str], most: int) -> Chart:
    """The time of an epoch on one node and on ``most`` nodes."""
    contenders = [("by hand, serial", 1), *((one, n) for one in who for n in (1, most))]
    lines = [
        ChartLine(f"{name}, {count}", [side**2 for side in SIDES], _epoch_seconds(table, name, count))
        for name, count in contenders
    ]
    return Chart(
        "times",
        "Time of an epoch by size of image",
        [Lines("seconds", lines, kind="log")],
        x_label="pixels",
        x_kind="log",
        subtitle="measured",
    )


def _claim_one_node(experiment: Experiment, findings: Findings, table: list[TableRow], at: int) -> None:
    single = [_find_row(table, "Hoop", side * side, at)["to serial"] for side in SIDES]
    findings.claim(
        "about 10x on one node, whatever the size of images",
        paper="10x (cores not stated)",
        ours=f"{min(single):.2f}x to {max(single):.2f}x on {at} cores, to the serial program by hand",
        how="measured",
        verdict="not shown" if experiment.cores < 10 else "holds" if min(single) > 8 else "does not hold",
        why=f"{experiment.cores} cores cannot give 10x; the paper counts OpenMP's threads"
        if experiment.cores < 10
        else "",
    )


def _claim_tasks(experiment: Experiment, findings: Findings, speedups: dict[str, float], at: int) -> None:
    """``speedups``: of each contender on ``at`` nodes, with the largest images."""
    head, peers = speedups[TASKS], speedups["Hoop"]
    findings.claim(
        "a task-based engine (OmpCluster) scales worse",
        paper="little improvement by nodes",
        ours=f"tasks on Ray {head:.2f}x, Hoop {peers:.2f}x on {at} nodes, {SIDES[-1] ** 2} pixels",
        how="measured",
        verdict=experiment.timing_verdict("holds" if head < 0.95 * peers else "does not hold"),
        why="the head sends the weights and sums the gradients alone, in every epoch",
    )


def _claim_nodes(experiment: Experiment, findings: Findings, name: str, up: float, at: int) -> None:
    """``up``: the speed-up of this contender on ``at`` nodes, with the largest images."""
    findings.claim(
        f"near-linear speed-up by nodes ({'MPI + OpenMP' if name == 'MPI' else 'data parallel'})",
        paper="near-linear to 4 nodes",
        ours=f"{name}: {up:.2f}x on {at} nodes, {SIDES[-1] ** 2} pixels",
        how="measured",
        verdict=experiment.timing_verdict(grade(up / at, 0.8, 0.6)),
        why=f"cores of one machine share its memory; more than {experiment.cores} nodes cannot be shown here",
    )


def _claim_gpu(experiment: Experiment, findings: Findings, table: list[TableRow]) -> None:
    largest = SIDES[-1] ** 2
    graphics = _find_row(table, f"Hoop, {experiment.accelerator}", largest, 1)["to serial"]
    findings.claim(
        "a GPU gives 4x the serial program, less than the cores of a node",
        paper="4x",
        ours=f"{graphics:.1f}x on {largest} pixels",
        how="measured",
        verdict="does not hold" if graphics > 8 else "holds",
        why="the images go up to the GPU in every epoch, and it waits for them; the arithmetic is little",
    )


def _simulated(experiment: Experiment, findings: Findings) -> None:
    """Simulate the paper's figures 6 to 8: nodes of one core each, and the links between them."""
    experiment.log("speed-up by nodes, simulated")
    nodes, shards = (1, 2, 4, 8, 16, 32, 64), 64
    speedups: dict[str, list[float]] = {}
    with_server: dict[int, float] = {}
    for side in SIDES:
        rows_a_shard = 60_000 // shards
        small_job = dataclasses.replace(softmax(side), data=partial(_subset, side, 1000))
        costs = measure_costs(small_job, 256).with_rows(rows_a_shard)
        for link in (INFINIBAND, ETHERNET):
            speedups[f"{side * side} pixels, {link}"] = _speedups(costs, "data", nodes, shards, link)
        with_server[side * side] = _speedups(costs, "ps:bsp", (4,), shards, INFINIBAND)[0]
    chart = Chart(
        "simulated",
        "Speed-up by number of nodes",
        [Lines("times one node's speed", [ChartLine(name, nodes, up, dashed=True) for name, up in speedups.items()])],
        x_label="nodes, a core each",
        subtitle="simulated: 60 000 images in one batch an epoch, data parallel",
    )
    table = [
        {"": name, **{str(n): up[i] for i, n in enumerate(nodes)}, "how": "simulated"} for name, up in speedups.items()
    ]
    findings.section(
        "Speed-up, beyond this machine",
        "Costs of the job measured on one core here; nodes and links simulated.",
        make_table(table, "Simulated speed-up by number of nodes"),
        chart,
    )
    four = [up[nodes.index(4)] for name, up in speedups.items() if str(INFINIBAND) in name]
    most = [up[-1] for name, up in speedups.items() if str(ETHERNET) in name]
    findings.claim(
        "near-linear speed-up to 4 nodes, for every size of image",
        paper="near-linear",
        ours=f"{min(four):.2f}x to {max(four):.2f}x on 4 nodes over {INFINIBAND}",
        how="simulated",
        verdict="holds" if min(four) > 3.5 else "in part",
        why="a gradient is small beside 60 000 images; on 64 nodes over "
        f"{ETHERNET} it is {min(most):.0f}x to {max(most):.0f}x",
    )

    findings.claim(
        "a system of a head and workers (OmpCluster) scales worse",
        paper="little improvement by nodes",
        ours=f"a head and 3 workers {min(with_server.values()):.2f}x to {max(with_server.values()):.2f}x, 4 workers "
        f"{min(four):.2f}x to {max(four):.2f}x, over {INFINIBAND}",
        how="simulated",
        verdict="holds" if max(with_server.values()) < min(four) else "does not hold",
        why="here the head is a parameter server, a node that does not compute; the paper blames its own changes too",
    )


def _speedups(costs: Costs, spec: str, nodes: Sequence[int], shards: int, link: Link) -> list[float]:
    (outcomes,) = simulate_curves(costs, {spec: spec}, nodes, shards, link).values()
    return [one.speedup for one in outcomes if one is not None]


def _find_row(table: list[TableRow], who: str, pixels: int, count: int) -> TableRow:
    return next(row for row in table if (row["who"], row["pixels"], row["nodes"]) == (who, pixels, count))


def _measured_speedups(table: list[TableRow], who: str, pixels: int) -> list[float]:
    mine = [row["epoch"] for row in table if (row["who"], row["pixels"]) == (who, pixels)]
    return [mine[0] / one for one in mine]


def _epoch_seconds(table: list[TableRow], who: str, count: int) -> list[float]:
    return [_find_row(table, who, side * side, count)["epoch"] for side in SIDES]
