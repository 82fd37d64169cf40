"""Paper 3: RingTMP, a ring of model parts, against parameter servers; the seven aims of the dissertation.

Both systems train a chain of linear layers with plain SGD. ``capacity`` grows the model until it does not fit the
devices' memory. ``resilience`` removes a node during a training, permanently or for a while. ``at_scale`` simulates
more nodes than this machine has cores, with a core and a link each.
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
from hoop.job_events import JobEvent, Started, Steps
from hoop.lab.papers.experiment import Experiment, Findings, RunningCluster, TrainingRun, Verdict, make_table
from hoop.lab.papers.predicted import ETHERNET, curve_rows, mean_worker_idle, measure_costs, simulate_curves
from hoop.lab.papers.subset import subset_of
from hoop.models.vision import mlp
from hoop.report.chart import Bars, Chart, ChartLine, Lines, smoothed

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


def _build_mlp(seed: int, widths: list[int]) -> nn.Sequential:
    """An MLP with He initialisation: with PyTorch's default, a chain this long does not learn with plain SGD."""
    model = mlp(seed, widths=widths)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(6**0.5)  # the variance grows from 1 / 3n to 2 / n
    return model


def chain(width: int, depth: int, samples: int) -> Job:
    """A job with an MLP of ``depth`` linear layers. Each layer is a block, before which the ring can cut the model."""
    widths = [784, *[width] * (depth - 1), 10]
    return Job(lambda seed: _build_mlp(seed, widths), lambda: subset_of(load("mnist"), samples, 1000))


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest model that trained, and the error of the next larger one."""

    size: int
    parameters: int
    memory: int
    """Bytes in use on the fullest device."""
    refusal: str


def largest_model(
    experiment: Experiment, make: Callable[[int], Job], start: int, grain: int, *, halvings: int = 3, **options: Any
) -> Largest:
    """Double the size from ``start`` until it does not fit, then bisect. Every attempt trains one real step.

    ``make(size)`` returns the job of that size; sizes are multiples of ``grain``. ``halvings``: steps of bisection.
    """
    fits, too_large, best, refusal = 0, 0, None, ""
    size = start
    while not too_large or (halvings > 0 and too_large - fits > grain):
        try:
            best, fits = _train_one_step(experiment, make(size), size, options), size
        except UserError as error:
            too_large, refusal = size, str(error)
        if too_large:
            halvings -= 1
            size = (fits + too_large) // 2 // grain * grain
            if size <= fits:
                break
        else:
            size = 2 * size
    if best is None:
        return Largest(0, 0, 0, refusal)
    return Largest(fits, best.summary["parameters"], max(best.summary["memory"]), refusal)


def _train_one_step(experiment: Experiment, job: Job, size: int, options: dict[str, Any]) -> TrainingRun:
    return experiment.train(f"a model of size {size}", job, max_steps=1, **options)


def capacity(experiment: Experiment, findings: Findings) -> None:
    """Aim 7: grow the model on both systems until it does not fit the memory."""
    memory = "4MiB" if experiment.quick else "64MiB"
    nodes, halvings = 4, 2 if experiment.quick else 4
    options: dict[str, Any] = SGD | {"batch_size": 64, "memory": memory, "devices": nodes, "halvings": halvings}
    table: list[dict[str, Any]] = []
    grown = [("width", 64, 16)] if experiment.quick else [("width", 64, 16), ("depth", DEPTH, 4)]
    for what, start, grain in grown:
        for name in (RING, SERVER):

            def make(size: int, what: str = what) -> Job:
                return chain(size, DEPTH, 64) if what == "width" else chain(WIDTH, size, 64)

            best = largest_model(experiment, make, start, grain, strategy=STRATEGIES[name], **options)
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
    findings.section(
        "The largest model",
        f"{nodes} nodes with {memory} each; the cap is real, the arena is that large and no larger. Every try is "
        "a training of one step; what does not fit is refused, by name.",
        make_table(table, "Grown until memory ends", fullest_node="MiB"),
    )
    held = {row[""]: row["parameters"] for row in table if row["grown"] == "width"}
    ratio = held[RING] / max(1, held[SERVER])
    findings.claim(
        "7: RingTMP holds larger models than a parameter server",
        paper="aim",
        ours=f"{held[RING]:,} parameters against {held[SERVER]:,} on {nodes} nodes of {memory}: {ratio:.1f}x",
        how="measured",
        verdict="holds" if ratio > 1.05 else "does not hold",
        why="a worker of the server holds the whole model and a gradient of it, a node of the ring its part",
    )


AWAY_S = 1.0
"""Seconds for which a node is stopped before it continues."""


@dataclass(frozen=True)
class Removal:
    """The result of a training from which a node was removed."""

    fired: bool
    """Whether the node was removed before the training ended."""
    trained: TrainingRun | None
    error: str = ""

    @property
    def pause(self) -> float:
        """Longest time between the ends of two steps, in seconds."""
        if self.trained is None:
            return float("nan")
        pauses = [one.pause_s for one in self.trained.recoveries]
        return max([*pauses, *self.trained.seconds], default=float("nan"))


def train_with_removal(
    experiment: Experiment, job: Job, strategy: str, devices: int, for_good: bool, **settings: Any
) -> Removal:
    """Train, and remove the second device: kill it (``for_good``), or stop it for ``AWAY_S`` seconds."""
    pids: dict[int, int] = {}
    timers: list[threading.Timer] = []

    def on_event(running: RunningCluster, event: JobEvent) -> None:
        if isinstance(event, Started):
            pids.update(running.pids())
        elif isinstance(event, Steps) and not timers:
            resume = threading.Timer(AWAY_S, running.signal, (pids[2], signal.SIGCONT))
            timers.append(resume)
            running.signal(pids[2], signal.SIGKILL if for_good else signal.SIGSTOP)
            if not for_good:
                resume.start()

    what = "a node goes for good" if for_good else "a node goes for a while"
    try:
        trained = experiment.train(what, job, devices=devices, strategy=strategy, on_event=on_event, **settings)
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


def resilience(experiment: Experiment, findings: Findings) -> None:
    """Aim 6: remove a node on both systems."""
    steps = 80 if experiment.quick else 400
    job, nodes = chain(WIDTH, DEPTH, 60_000), 4
    settings: dict[str, Any] = SGD | {"max_steps": steps, "epochs": 4}
    quiet = experiment.train("undisturbed", job, devices=nodes, strategy="ring", **settings)
    table: list[dict[str, Any]] = []
    for name in (RING, SERVER):
        for for_good in (True, False):
            one = train_with_removal(experiment, job, STRATEGIES[name], nodes, for_good, **settings)
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
                    "a node goes": "for good" if for_good else f"for {AWAY_S:g} s",
                    "training": outcome,
                    "longest wait": None if one.trained is None else one.pause,
                    "how": "measured",
                    "survived": one.fired and same,
                }
            )
    findings.section(
        "A node removed",
        f"The second of {nodes} nodes is killed (SIGKILL), or stopped (SIGSTOP) for {AWAY_S:g} s, while a model is "
        f"being trained; the weights after {steps} steps are compared with those of a run that nothing happened to.",
        make_table(table, "A node removed for good, and for a while", longest_wait="s"),
    )
    ring, server = ([row["survived"] for row in table if row[""] == name] for name in (RING, SERVER))
    verdict: Verdict = (
        "holds" if all(ring) else "in part" if any(ring) and sum(ring) >= sum(server) else "does not hold"
    )
    findings.claim(
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


def at_scale(experiment: Experiment, findings: Findings) -> None:
    """Simulate idle time and speed-up with a core and a link a node, for more nodes than this machine has cores."""
    experiment.log("idle time and scaling, simulated")
    nodes, num_microbatches, depth = (2, 4, 8, 16, 32), 32, 33
    costs = measure_costs(chain(WIDTH, depth, 1024), 64)
    curves = simulate_curves(costs, STRATEGIES, nodes, num_microbatches, ETHERNET)
    curves |= simulate_curves(costs.with_rows(num_microbatches * costs.rows), {WHOLE: "ring"}, nodes, 1, ETHERNET)
    lines: list[list[ChartLine]] = [[], []]
    for name, outcomes in curves.items():
        points = [(n, one) for n, one in zip(nodes, outcomes, strict=True) if one is not None]
        idle = [100 * mean_worker_idle(one) for _, one in points]
        lines[0].append(ChartLine(name, [n for n, _ in points], idle, dashed=True))
        lines[1].append(ChartLine(name, [n for n, _ in points], [one.speedup for _, one in points], dashed=True))
    chart = Chart(
        "simulated",
        "Idle share and speed-up by number of nodes",
        [Lines("idle workers (%)", lines[0]), Lines("times one node's speed", lines[1])],
        x_label="nodes, a core each",
        x_kind="log",
        subtitle=f"simulated: {ETHERNET}, {depth} layers of {WIDTH}, {num_microbatches} shards of 64",
    )
    findings.section(
        "Idle time and scaling, with a core and a link for each node",
        f"The very rules of ring and servers, in virtual time over {ETHERNET}; a deeper chain, so that there is a part "
        "for each node. Costs were measured on one core here. A server's link carries every worker's weights and "
        "gradients; a ring's links carry activations between neighbours. **Whole batches** is the ring without "
        "micro-batches, as the dissertation draws it: never faster than one node.",
        make_table(
            curve_rows(curves, nodes),
            "Simulated strategies by number of nodes",
            step="ms",
            simulated_step="ms",
            idle="%",
            sent_a_step="MB",
        ),
        chart,
    )
    at = nodes.index(8)
    shown = {name: one for name in STRATEGIES if (one := curves[name][at]) is not None}
    ring, servers = shown[RING], [one for name, one in shown.items() if name.startswith("server")]
    waits = "; ".join(f"{name} {100 * mean_worker_idle(one):.0f} %" for name, one in shown.items())
    findings.claim(
        "3, with a core and a link for each node: less idle time",
        paper="aim",
        ours=f"{waits} (8 nodes, {ETHERNET})",
        how="simulated",
        verdict="holds" if mean_worker_idle(ring) < min(map(mean_worker_idle, servers)) else "does not hold",
        why="the server's link is what workers wait for; its memory, shared by two cores, was not",
    )
    speed = "; ".join(f"{name} {one.speedup:.1f}x" for name, one in shown.items())
    findings.claim(
        "5, with a core and a link for each node: better scaling",
        paper="aim",
        ours=f"{speed} one node's speed (8 nodes, {ETHERNET})",
        how="simulated",
        verdict="holds" if ring.speedup > max(one.speedup for one in servers) else "does not hold",
        why="one server is the bottleneck; the ring's own limit is its bubble, (p-1)/m, and the length of the chain",
    )


TableRow = dict[str, Any]
Runs = dict[tuple[str, int], TrainingRun]


def run(experiment: Experiment) -> Findings:
    findings = Findings()
    nodes = [2, 4] if experiment.quick else [2, 3, 4] + [n for n in (8,) if n <= experiment.cores]
    samples = 4_096 if experiment.quick else 60_000
    findings.limits.append(
        f"A node is a device with a core of its own, of {experiment.cores}; what it sends goes through memory, "
        "not a network."
        if nodes[-1] <= experiment.cores
        else f"A node is a device; {experiment.cores} cores are shared by up to {nodes[-1]} of them, so a node that "
        "computes keeps another from it and idle shares are too high for all. Whose is higher is comparable; times "
        f"beyond {experiment.cores} nodes are not those of as many machines."
    )
    findings.limits.append(
        f"One server among the nodes: with n nodes there are n - 1 workers. {samples} of 60 000 images."
    )
    job = chain(WIDTH, DEPTH, samples)
    runs: Runs = {
        (name, count): experiment.train(name, job, devices=count, strategy=spec, epochs=1, **SGD)
        for name, spec in STRATEGIES.items()
        for count in nodes
    }
    whole = experiment.train(
        "RingTMP, whole batches", job, devices=nodes[-1], strategy="ring", epochs=1, **SGD | {"shards": 1}
    )
    _both_systems(findings, runs, nodes)
    _idle(experiment, findings, runs, nodes)
    _whole_batches(findings, whole, nodes[-1])
    _progress(findings, runs, nodes[-1])
    _scaling(experiment, findings, runs, nodes)
    resilience(experiment, findings)
    capacity(experiment, findings)
    # Last: with a GPU, a process that has computed gradients cannot fork devices any more.
    at_scale(experiment, findings)
    _aims(findings)
    return findings


def _table(runs: Runs) -> list[TableRow]:
    return [
        {
            "": name,
            "nodes": count,
            "step": 1000 * one.step,
            "simulated step": _ms(one.summary.get("predicted_step_seconds")),
            "idle": 100 * _worker_idle(name, one),
            "idle of each": " ".join(f"{100 * share['idle']:.0f}" for share in one.summary["shares"]),
            "sent a step": one.summary["bytes_sent"] / one.summary["steps"] / 1e6,
            "memory": max(one.summary["memory"]) / 2**20,
            "how": "measured",
        }
        for (name, count), one in runs.items()
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _worker_idle(name: str, one: TrainingRun) -> float:
    """Mean idle fraction of the workers, without the server: it waits by design."""
    shares = [share["idle"] for share in one.summary["shares"]]
    workers = shares[:-1] if name.startswith("server") else shares
    return float(sum(workers) / len(workers))


def _both_systems(findings: Findings, runs: Runs, nodes: Sequence[int]) -> None:
    table = _table(runs)
    findings.section(
        "Both systems, by the same tools",
        f"An MLP of {DEPTH} layers of {WIDTH}, plain SGD, the same batches. Memory is the fullest node's arena; idle "
        "is the share of its time that a node waited for others, the mean over workers (a server is not one).",
        make_table(
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
    findings.claim(
        "1: a prototype of RingTMP runs on several machines at once",
        paper="aim",
        ours=f"trained on {', '.join(map(str, nodes))} nodes, no scheduler",
        how="measured",
        verdict="holds",
        why="processes here; the same devices join over TCP from other machines",
    )
    findings.claim(
        "2: a parameter server by the same tools does too",
        paper="aim",
        ours=f"BSP, ASP and SSP trained on {', '.join(map(str, nodes))} nodes",
        how="measured",
        verdict="holds",
    )
    ring, server = (runs[name, most].summary for name in (RING, SERVER))
    less = server["bytes_sent"] / max(1, ring["bytes_sent"])
    findings.claim(
        "less is sent between nodes than with a parameter server",
        paper="stated benefit",
        ours=f"{ring['bytes_sent'] / ring['steps'] / 1e6:.2f} MB a step, server "
        f"{server['bytes_sent'] / server['steps'] / 1e6:.2f} MB ({most} nodes)",
        how="measured",
        verdict="holds" if less > 1 else "does not hold",
        why="activations travel instead of weights: it turns with the batch, which the server's bytes do not depend on",
    )


def _idle(experiment: Experiment, findings: Findings, runs: Runs, nodes: Sequence[int]) -> None:
    groups = [f"{count} nodes" for count in nodes]
    values = {name: [100 * _worker_idle(name, runs[name, count]) for count in nodes] for name in STRATEGIES}
    chart = Chart(
        "idle",
        "Idle share of workers",
        [Bars("% of the time", groups, values)],
        subtitle="measured; mean over workers, of the time from the first step to the last",
    )
    findings.section("Idle time", chart)
    most = nodes[-1]
    ring, quick, server = (values[name][-1] for name in (RING, "RingTMP, asynchronous", SERVER))
    findings.claim(
        "3: workers of RingTMP are idle less than those of a parameter server",
        paper="aim",
        ours=f"ring {ring:.0f} %, asynchronous {quick:.0f} %, BSP {server:.0f} % ({most} nodes)",
        how="measured",
        verdict=experiment.timing_verdict(
            "holds" if ring < server else "in part" if quick < server else "does not hold"
        ),
        why="a flush a step leaves a bubble of (p-1)/m in the ring; a worker of BSP waits for the server instead",
    )


def _whole_batches(findings: Findings, one: TrainingRun, nodes: int) -> None:
    """The dissertation has no micro-batches; without them only one node of the ring has work at a time."""
    idle = 100 * one.summary["idle_fraction"]
    findings.claim(
        "a ring of model parts keeps its nodes busy (as drawn: a batch goes round as a whole)",
        paper="stated benefit",
        ours=f"idle {idle:.0f} % on {nodes} nodes; (p-1)/p is {100 * (nodes - 1) / nodes:.0f} %",
        how="measured",
        verdict="does not hold" if idle > 50 else "holds",
        why="one part computes while all others wait for it; cutting batches into micro-batches is what makes it a "
        "pipeline, and all other rows here do",
    )


def _progress(findings: Findings, runs: Runs, most: int) -> None:
    lines = [
        ChartLine(name, range(len(runs[name, most].losses)), smoothed(runs[name, most].losses, 5))
        for name in STRATEGIES
    ]
    chart = Chart(
        "loss",
        "Loss by iteration",
        [Lines("training loss", lines)],
        x_label="iteration (a global batch)",
        subtitle=f"measured, {most} nodes; the synchronous lines lie on each other",
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
    findings.section(
        "Progress per iteration",
        "The synchronous ring and BSP compute the same thing: exactly SGD, in the same order of summation.",
        make_table(table, f"After one epoch on {most} nodes", test_accuracy="%"),
        chart,
    )
    findings.claim(
        "4: per iteration RingTMP makes more progress",
        paper="aim",
        ours="the same weights as BSP, to the bit" if same else "other weights than BSP",
        how="measured",
        verdict="does not hold" if same else "not shown",
        why="both are SGD; ASP and SSP make an update for each worker, several a batch, of weights that have moved on; "
        "the asynchronous ring is one update behind",
    )


def _scaling(experiment: Experiment, findings: Findings, runs: Runs, nodes: Sequence[int]) -> None:
    lines = [ChartLine(name, nodes, [runs[name, count].summary["seconds"] for count in nodes]) for name in STRATEGIES]
    chart = Chart(
        "time",
        "Time to finish an epoch",
        [Lines("seconds", lines)],
        x_label="nodes",
        subtitle=f"measured on {experiment.cores} cores; beyond {experiment.cores} nodes they share cores",
    )
    findings.section("Scaling", chart)
    first, last = nodes[0], nodes[-1]
    apart = last <= experiment.cores
    gain = {name: runs[name, first].summary["seconds"] / runs[name, last].summary["seconds"] for name in (RING, SERVER)}
    findings.claim(
        "5: RingTMP scales better than a parameter server",
        paper="aim",
        ours=f"from {first} to {last} nodes: ring {gain[RING]:.2f}x, BSP {gain[SERVER]:.2f}x",
        how="measured",
        verdict=experiment.timing_verdict("holds" if gain[RING] > gain[SERVER] else "does not hold")
        if apart
        else "not shown",
        why="the link is memory here, so the server's is no bottleneck; the parts of a small model are waited for "
        "longer than they take"
        if apart
        else f"{experiment.cores} cores cannot show it: from {experiment.cores} nodes on all cores are busy",
    )


def _aims(findings: Findings) -> None:
    aims = sorted((one for one in findings.claims if one.claim[0].isdigit()), key=lambda one: one.claim)
    lines = [f"- aim {one.claim}: **{one.verdict}** ({one.how})" for one in aims]
    findings.section(
        "The seven aims",
        "The dissertation was handed in with its experiments planned and not made. By them:",
        "\n".join(lines),
    )
