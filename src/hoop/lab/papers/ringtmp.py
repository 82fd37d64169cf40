"""What paper 3's two systems train: a chain of linear layers, by plain SGD; and the two systems, by name.

The largest model that devices of a given memory can train: grown until it is refused.

A node is taken away in the middle of a training, for good or for a while: what becomes of it.

Paper 3's systems with a core and a link for each node, more of them than this machine has: simulated.

Paper 3: RingTMP, a ring of model parts, against parameter servers; the seven aims of the dissertation.
"""

from __future__ import annotations

import dataclasses
import re
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hoop.data.catalog import load
from hoop.engine.job import Job
from hoop.errors import HoopError, UserError
from hoop.lab.papers.experiment import EventFields, Experiment, RunningCluster, TrainingRun
from hoop.lab.papers.findings import Findings, Verdict, rows
from hoop.lab.papers.predicted import ETHERNET, costs_of, curve, figures, workers_idle
from hoop.lab.papers.subset import subset_of
from hoop.models.mlp import mlp
from hoop.report.chart import Bars, Chart, ChartLine, Lines, smoothed
from hoop.report.page import Picture

STRATEGIES = {
    "RingTMP": "ring",
    "RingTMP, asynchronous": "ring:async",
    "server, BSP": "ps:bsp",
    "server, ASP": "ps:asp",
    "server, SSP": "ps:ssp",
}
RING, SERVER = "RingTMP", "server, BSP"
WIDTH, DEPTH = 256, 8
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05, "batch_size": 256, "shards": 8, "evaluate_every": 0}


def _built(seed: int, widths: list[int]) -> nn.Sequential:
    """Weights as large as ReLU wants them: with PyTorch's own, a chain this long does not learn by plain SGD."""
    model = mlp(seed, widths=widths)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(6**0.5)  # from 1 / 3n to 2 / n
    return model


def chain(width: int, depth: int, samples: int) -> Job:
    """An MLP of so many linear layers, each a block that the ring can cut before."""
    widths = [784, *[width] * (depth - 1), 10]
    return Job(lambda seed: _built(seed, widths), lambda: subset_of(load("mnist"), samples, 1000))


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest that trained, and why the next did not."""

    size: int
    parameters: int
    memory: int
    """Of the fullest device, bytes."""
    refusal: str


def largest(
    lab: Experiment, make: Callable[[int], Job], start: int, grain: int, *, halvings: int = 3, **options: Any
) -> Largest:
    """Doubles from ``start`` until a training is refused, then halves the gap; every try is a real step of training.

    ``make(size)`` is the job of that size; sizes are multiples of ``grain``.
    """
    good, bad, kept, refusal = 0, 0, None, ""
    size = start
    while not bad or (halvings > 0 and bad - good > grain):
        try:
            kept, good = _try(lab, make(size), size, options), size
        except UserError as error:
            bad, refusal = size, str(error)
        if bad:
            halvings -= 1
            size = (good + bad) // 2 // grain * grain
            if size <= good:
                break
        else:
            size = 2 * size
    if kept is None:
        return Largest(0, 0, 0, refusal)
    return Largest(good, kept.summary["parameters"], max(kept.summary["memory"]), refusal)


def _try(lab: Experiment, job: Job, size: int, options: dict[str, Any]) -> TrainingRun:
    return lab.train(f"a model of size {size}", job, max_steps=1, **options)


def capacity(lab: Experiment, found: Findings) -> None:
    """Aim 7: either system, with a model that grows until memory ends."""
    memory = "4MiB" if lab.quick else "64MiB"
    nodes, halvings = 4, 2 if lab.quick else 4
    options: dict[str, Any] = SGD | {
        "batch_size": 64,
        "memory": memory,
        "devices": nodes,
        "halvings": halvings,
    }
    table: list[dict[str, Any]] = []
    grown = [("width", 64, 16)] if lab.quick else [("width", 64, 16), ("depth", DEPTH, 4)]
    for what, start, grain in grown:
        for name in (RING, SERVER):

            def make(size: int, what: str = what) -> Job:
                return chain(size, DEPTH, 64) if what == "width" else chain(WIDTH, size, 64)

            best = largest(lab, make, start, grain, strategy=STRATEGIES[name], **options)
            table.append(
                {
                    "grown": what,
                    "": name,
                    "largest": best.size,
                    "parameters": best.parameters,
                    "fullest node": best.memory / 2**20,
                    "how": "measured",
                    "then": best.refusal.splitlines()[0][:100] if best.refusal else None,
                }
            )
    found.section(
        "The largest model",
        f"{nodes} nodes with {memory} each; the cap is real, the arena is that large and no larger. Every try is "
        "a training of one step; what does not fit is refused, by name.",
        rows(table, "Grown until memory ends", fullest_node="MiB"),
    )
    held = {row[""]: row["parameters"] for row in table if row["grown"] == "width"}
    ratio = held[RING] / max(1, held[SERVER])
    found.claim(
        "7: RingTMP holds larger models than a parameter server",
        paper="aim",
        ours=f"{held[RING]:,} parameters against {held[SERVER]:,} on {nodes} nodes of {memory}: {ratio:.1f}x",
        how="measured",
        verdict="holds" if ratio > 1.05 else "does not hold",
        why="a worker of the server holds the whole model and a gradient of it, a node of the ring its part",
    )


WHILE_S = 1.0
"""How long a node that comes back was away."""


@dataclass(frozen=True)
class Removal:
    """What happened."""

    fired: bool
    """Whether the training was still going on when the node was taken away."""
    trained: TrainingRun | None
    error: str = ""

    @property
    def pause(self) -> float:
        """The longest time in which no step ended."""
        if self.trained is None:
            return float("nan")
        told = [one["pause_s"] for one in self.trained.of_kind("recovered")]
        return max([*told, *self.trained.seconds], default=float("nan"))


def remove(
    lab: Experiment, job: Job, strategy: str, devices: int, for_good: bool, **settings: Any
) -> Removal:
    """Trains, and takes the second device away: killed, or stopped for a second."""
    pids: dict[int, int] = {}
    timers: list[threading.Timer] = []

    def disturb(running: RunningCluster, event: EventFields) -> None:
        if event["kind"] == "started":
            pids.update(running.pids())
        elif event["kind"] == "steps" and not timers:
            back = threading.Timer(WHILE_S, running.signal, (pids[2], signal.SIGCONT))
            timers.append(back)
            running.signal(pids[2], signal.SIGKILL if for_good else signal.SIGSTOP)
            if not for_good:
                back.start()

    what = "a node goes for good" if for_good else "a node goes for a while"
    try:
        trained = lab.train(what, job, devices=devices, strategy=strategy, disturb=disturb, **settings)
        return Removal(bool(timers), trained)
    except HoopError as error:
        return Removal(bool(timers), None, str(error))
    except ProcessLookupError:
        return Removal(False, None, "it was over before the node was taken away")
    finally:
        for timer in timers:
            if timer.is_alive():
                timer.cancel()
                timer.join()


def resilience(lab: Experiment, found: Findings) -> None:
    """Aim 6: either system, with a node taken away."""
    steps = 80 if lab.quick else 400
    job, nodes = chain(WIDTH, DEPTH, 60_000), 4
    settings: dict[str, Any] = SGD | {"max_steps": steps, "epochs": 4}
    quiet = lab.train("undisturbed", job, devices=nodes, strategy="ring", **settings)
    table: list[dict[str, Any]] = []
    for name in (RING, SERVER):
        for for_good in (True, False):
            one = remove(lab, job, STRATEGIES[name], nodes, for_good, **settings)
            same = one.trained is not None and (
                one.trained.summary["weights_sha256"] == quiet.summary["weights_sha256"]
            )
            if not one.fired:
                outcome = "not shown: over too soon"
            elif one.trained is None:
                outcome = "ends: " + re.sub(r" \(pid.*?\)", "", one.error.splitlines()[0])[:60]
            else:
                outcome = f"goes on, {'the same weights' if same else 'other weights'}"
            table.append(
                {
                    "": name,
                    "a node goes": "for good" if for_good else f"for {WHILE_S:g} s",
                    "training": outcome,
                    "longest wait": None if one.trained is None else one.pause,
                    "how": "measured",
                    "survived": one.fired and same,
                }
            )
    found.section(
        "A node removed",
        f"The second of {nodes} nodes is killed (SIGKILL), or stopped (SIGSTOP) for {WHILE_S:g} s, while a model is "
        f"being trained; the weights after {steps} steps are compared with those of a run that nothing happened to.",
        rows(table, "A node removed for good, and for a while", longest_wait="s"),
    )
    ring, server = ([row["survived"] for row in table if row[""] == name] for name in (RING, SERVER))
    verdict: Verdict = (
        "holds" if all(ring) else "in part" if any(ring) and sum(ring) >= sum(server) else "does not hold"
    )
    found.claim(
        "6: RingTMP is as resilient as a parameter server",
        paper="aim",
        ours=f"ring: for good {_survived(ring[0])}, for a while {_survived(ring[1])}; BSP: {_survived(server[0])}, "
        f"{_survived(server[1])}",
        how="measured",
        verdict=verdict,
        why=""
        if all(ring)
        else "neither goes on here without a node; a stage is held by nobody else, and must come from a copy",
    )


def _survived(good: bool) -> str:
    return "survived" if good else "did not survive"


WHOLE = "RingTMP, whole batches"


def at_scale(lab: Experiment, found: Findings) -> None:
    """Nodes with a core and a link of their own, more of them than this machine has."""
    lab.say("idle time and scaling, simulated")
    nodes, micros, depth = (2, 4, 8, 16, 32), 32, 33
    costs = costs_of(chain(WIDTH, depth, 1024), 64)
    curves = curve(costs, STRATEGIES, nodes, micros, ETHERNET)
    curves |= curve(costs.of(micros * costs.rows), {WHOLE: "ring"}, nodes, 1, ETHERNET)
    lines: list[list[ChartLine]] = [[], []]
    for name, outcomes in curves.items():
        there = [(n, one) for n, one in zip(nodes, outcomes, strict=True) if one is not None]
        idle = [100 * workers_idle(one) for _, one in there]
        lines[0].append(ChartLine(name, [n for n, _ in there], idle, "dashed"))
        lines[1].append(ChartLine(name, [n for n, _ in there], [one.speedup for _, one in there], "dashed"))
    chart = Chart(
        "Idle share and speed-up by number of nodes",
        [Lines("idle workers (%)", lines[0]), Lines("times one node's speed", lines[1])],
        x_label="nodes, a core each",
        x_kind="log",
        subtitle=f"simulated: {ETHERNET}, {depth} layers of {WIDTH}, {micros} shards of 64",
    )
    found.section(
        "Idle time and scaling, with a core and a link for each node",
        f"The very rules of ring and servers, in virtual time over {ETHERNET}; a deeper chain, so that there is a part "
        "for each node. Costs were measured on one core here. A server's link carries every worker's weights and "
        "gradients; a ring's links carry activations between neighbours. **Whole batches** is the ring without "
        "micro-batches, as the dissertation draws it: never faster than one node.",
        rows(
            figures(curves, nodes),
            "Simulated strategies by number of nodes",
            step="ms",
            simulated_step="ms",
            idle="%",
            sent_a_step="MB",
        ),
        Picture("simulated", chart.svg(), "Simulated."),
    )
    at = nodes.index(8)
    shown = {name: one for name in STRATEGIES if (one := curves[name][at]) is not None}
    ring, servers = shown[RING], [one for name, one in shown.items() if name.startswith("server")]
    waits = "; ".join(f"{name} {100 * workers_idle(one):.0f} %" for name, one in shown.items())
    found.claim(
        "3, with a core and a link for each node: less idle time",
        paper="aim",
        ours=f"{waits} (8 nodes, {ETHERNET})",
        how="simulated",
        verdict="holds" if workers_idle(ring) < min(map(workers_idle, servers)) else "does not hold",
        why="the server's link is what workers wait for; its memory, shared by two cores, was not",
    )
    speed = "; ".join(f"{name} {one.speedup:.1f}x" for name, one in shown.items())
    found.claim(
        "5, with a core and a link for each node: better scaling",
        paper="aim",
        ours=f"{speed} one node's speed (8 nodes, {ETHERNET})",
        how="simulated",
        verdict="holds" if ring.speedup > max(one.speedup for one in servers) else "does not hold",
        why="one server is the bottleneck; the ring's own limit is its bubble, (p-1)/m, and the length of the chain",
    )


TableRow = dict[str, Any]
Runs = dict[tuple[str, int], TrainingRun]


def run(lab: Experiment) -> Findings:
    found = Findings()
    nodes = [2, 4] if lab.quick else [2, 3, 4] + [n for n in (8,) if n <= lab.cores]
    samples = 4_096 if lab.quick else 60_000
    found.limits.append(
        f"A node is a device with a core of its own, of {lab.cores}; what it sends goes through memory, not a network."
        if nodes[-1] <= lab.cores
        else f"A node is a device; {lab.cores} cores are shared by up to {nodes[-1]} of them, so a node that computes "
        "keeps another from it and idle shares are too high for all. Whose is higher is comparable; times beyond "
        f"{lab.cores} nodes are not those of as many machines."
    )
    found.limits.append(
        f"One server among the nodes: with n nodes there are n - 1 workers. {samples} of 60 000 images."
    )
    job = chain(WIDTH, DEPTH, samples)
    runs: Runs = {
        (name, count): lab.train(name, job, devices=count, strategy=spec, epochs=1, **SGD)
        for name, spec in STRATEGIES.items()
        for count in nodes
    }
    whole = lab.train(
        "RingTMP, whole batches", job, devices=nodes[-1], strategy="ring", epochs=1, **SGD | {"shards": 1}
    )
    _made(found, runs, nodes)
    _idle(lab, found, runs, nodes)
    _whole(found, whole, nodes[-1])
    _progress(found, runs, nodes[-1])
    _scaling(lab, found, runs, nodes)
    resilience(lab, found)
    capacity(lab, found)
    at_scale(lab, found)  # last: beside a GPU, a process that has computed gradients forks none that can
    _aims(found)
    return found


def _table(runs: Runs) -> list[TableRow]:
    return [
        {
            "": name,
            "nodes": count,
            "step": 1000 * one.step,
            "simulated step": _ms(one.summary.get("predicted_step_seconds")),
            "idle": 100 * _idle_of(name, one),
            "idle of each": " ".join(f"{100 * share['idle']:.0f}" for share in one.summary["shares"]),
            "sent a step": one.summary["bytes_sent"] / one.summary["steps"] / 1e6,
            "memory": max(one.summary["memory"]) / 2**20,
            "how": "measured",
        }
        for (name, count), one in runs.items()
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _idle_of(name: str, one: TrainingRun) -> float:
    """The mean over those who compute; a server waits for work by design."""
    shares = [share["idle"] for share in one.summary["shares"]]
    workers = shares[:-1] if name.startswith("server") else shares
    return float(sum(workers) / len(workers))


def _made(found: Findings, runs: Runs, nodes: Sequence[int]) -> None:
    table = _table(runs)
    found.section(
        "Both systems, by the same tools",
        f"An MLP of {DEPTH} layers of {WIDTH}, plain SGD, the same batches. Memory is the fullest node's arena; idle "
        "is the share of its time that a node waited for others, the mean over workers (a server is not one).",
        rows(
            table,
            "Strategies by number of nodes",
            step="ms",
            simulated_step="ms",
            idle="%",
            idle_of_each="%",
            sent_a_step="MB",
            memory="MiB",
        ),
    )
    most = nodes[-1]
    found.claim(
        "1: a prototype of RingTMP runs on several machines at once",
        paper="aim",
        ours=f"trained on {', '.join(map(str, nodes))} nodes, no scheduler",
        how="measured",
        verdict="holds",
        why="processes here; the same devices join over TCP from other machines",
    )
    found.claim(
        "2: a parameter server by the same tools does too",
        paper="aim",
        ours=f"BSP, ASP and SSP trained on {', '.join(map(str, nodes))} nodes",
        how="measured",
        verdict="holds",
    )
    ring, server = (runs[name, most].summary for name in (RING, SERVER))
    less = server["bytes_sent"] / max(1, ring["bytes_sent"])
    found.claim(
        "less is sent between nodes than with a parameter server",
        paper="stated benefit",
        ours=f"{ring['bytes_sent'] / ring['steps'] / 1e6:.2f} MB a step, server "
        f"{server['bytes_sent'] / server['steps'] / 1e6:.2f} MB ({most} nodes)",
        how="measured",
        verdict="holds" if less > 1 else "does not hold",
        why="activations travel instead of weights: it turns with the batch, which the server's bytes do not depend on",
    )


def _idle(lab: Experiment, found: Findings, runs: Runs, nodes: Sequence[int]) -> None:
    groups = [f"{count} nodes" for count in nodes]
    values = {name: [100 * _idle_of(name, runs[name, count]) for count in nodes] for name in STRATEGIES}
    chart = Chart(
        "Idle share of workers",
        [Bars("% of the time", groups, values)],
        subtitle="measured; mean over workers, of the time from the first step to the last",
    )
    found.section("Idle time", Picture("idle", chart.svg(), "Measured."))
    most = nodes[-1]
    ring, quick, server = (values[name][-1] for name in (RING, "RingTMP, asynchronous", SERVER))
    found.claim(
        "3: workers of RingTMP are idle less than those of a parameter server",
        paper="aim",
        ours=f"ring {ring:.0f} %, asynchronous {quick:.0f} %, BSP {server:.0f} % ({most} nodes)",
        how="measured",
        verdict=lab.timed("holds" if ring < server else "in part" if quick < server else "does not hold"),
        why="a flush a step leaves a bubble of (p-1)/m in the ring; a worker of BSP waits for the server instead",
    )


def _whole(found: Findings, one: TrainingRun, nodes: int) -> None:
    """The dissertation has no word of micro-batches; without them only one node of the ring has work at a time."""
    idle = 100 * one.summary["idle_fraction"]
    found.claim(
        "a ring of model parts keeps its nodes busy (as drawn: a batch goes round as a whole)",
        paper="stated benefit",
        ours=f"idle {idle:.0f} % on {nodes} nodes; (p-1)/p is {100 * (nodes - 1) / nodes:.0f} %",
        how="measured",
        verdict="does not hold" if idle > 50 else "holds",
        why="one part computes while all others wait for it; cutting batches into micro-batches is what makes it a "
        "pipeline, and all other rows here do",
    )


def _progress(found: Findings, runs: Runs, most: int) -> None:
    lines = [
        ChartLine(name, range(len(runs[name, most].losses)), smoothed(runs[name, most].losses, 5))
        for name in STRATEGIES
    ]
    chart = Chart(
        "Loss by iteration",
        [Lines("training loss", lines)],
        x_label="iteration (a global batch)",
        subtitle=f"measured, {most} nodes",
    )
    table = [
        {
            "": name,
            "loss of the last tenth": sum(tail) / len(tail),
            "test accuracy": 100 * runs[name, most].summary["accuracy"],
            "weights": runs[name, most].summary["weights_sha256"][:12],
            "how": "measured",
        }
        for name in STRATEGIES
        if (tail := runs[name, most].losses[-max(1, len(runs[name, most].losses) // 10) :])
    ]
    same = runs[RING, most].summary["weights_sha256"] == runs[SERVER, most].summary["weights_sha256"]
    found.section(
        "Progress per iteration",
        "The synchronous ring and BSP compute the same thing: exactly SGD, in the same order of summation.",
        rows(table, f"After one epoch on {most} nodes", test_accuracy="%"),
        Picture("loss", chart.svg(), "Measured; the synchronous lines lie on each other."),
    )
    found.claim(
        "4: per iteration RingTMP makes more progress",
        paper="aim",
        ours="the same weights as BSP, to the bit" if same else "other weights than BSP",
        how="measured",
        verdict="does not hold" if same else "not shown",
        why="both are SGD; ASP and SSP make an update for each worker, several a batch, of weights that have moved on; "
        "the asynchronous ring is one update behind",
    )


def _scaling(lab: Experiment, found: Findings, runs: Runs, nodes: Sequence[int]) -> None:
    lines = [
        ChartLine(name, nodes, [runs[name, count].summary["seconds"] for count in nodes])
        for name in STRATEGIES
    ]
    chart = Chart(
        "Time to finish an epoch",
        [Lines("seconds", lines)],
        x_label="nodes",
        subtitle=f"measured on {lab.cores} cores",
    )
    found.section(
        "Scaling", Picture("time", chart.svg(), f"Measured; beyond {lab.cores} nodes they share cores.")
    )
    first, last = nodes[0], nodes[-1]
    apart = last <= lab.cores
    gain = {
        name: runs[name, first].summary["seconds"] / runs[name, last].summary["seconds"]
        for name in (RING, SERVER)
    }
    found.claim(
        "5: RingTMP scales better than a parameter server",
        paper="aim",
        ours=f"from {first} to {last} nodes: ring {gain[RING]:.2f}x, BSP {gain[SERVER]:.2f}x",
        how="measured",
        verdict=lab.timed("holds" if gain[RING] > gain[SERVER] else "does not hold")
        if apart
        else "not shown",
        why="the link is memory here, so the server's is no bottleneck; the parts of a small model are waited for "
        "longer than they take"
        if apart
        else f"{lab.cores} cores cannot show it: from {lab.cores} nodes on all cores are busy",
    )


def _aims(found: Findings) -> None:
    aims = sorted((one for one in found.claims if one.claim[0].isdigit()), key=lambda one: one.claim)
    lines = [f"- aim {one.claim}: **{one.verdict}** ({one.how})" for one in aims]
    found.section(
        "The seven aims",
        "The dissertation was handed in with its experiments planned and not made. By them:",
        "\n".join(lines),
    )
