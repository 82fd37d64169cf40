"""Paper 1: an MLP learns MNIST with a ring all-reduce of its gradients; and the ring against a naive all-reduce.

``AllReduceVariants`` sums one vector through real servers in every way:

listed    the paper's listing: the client copies from each device with the lab's Memcpy, sums, and copies back
relay     the lab's NaiveAllReduce: all devices send to the coordinator at once, and it sends the sum back
stepped   the ring, each round started by the coordinator
ring      the ring, run by the devices alone after one launch
tree      a tree, run by the devices alone

``ring_against_naive`` counts the messages of their plans, simulates them, and measures them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from hoop.client.cluster import Cluster, connect
from hoop.collectives.plan import Send
from hoop.collectives.registry import Operation
from hoop.engine.recipes import RECIPES
from hoop.errors import InternalError
from hoop.lab.papers.experiment import Experiment, Findings, TrainingRun, Verdict, grade, make_table, median_seconds
from hoop.lab.papers.predicted import ETHERNET, all_reduce_seconds
from hoop.report.chart import Bars, Chart, ChartLine, Lines
from hoop.wire.auth import grpc_target
from hoop.wire.channels import LOCAL_LEASE_S, channel_options
from hoop.wire.generated import gpu_sim_pb2 as gpu_sim
from hoop.wire.generated import gpu_sim_pb2_grpc as gpu_sim_grpc

VARIANTS = ("listed", "relay", "stepped", "ring", "tree")


class AllReduceVariants:
    """A communicator with one float64 vector a rank, and every variant of its all-reduce."""

    def __init__(self, client: Cluster, devices: int, count: int) -> None:
        self.comm = client.communicator(devices)
        self.addresses = [device.info.min_address for device in self.comm.devices]
        self.buffer = self.comm.at(self.addresses, count, "float64")
        self.count = count
        self._channel = grpc.insecure_channel(grpc_target(client.address), options=channel_options(LOCAL_LEASE_S))
        self._gpu_sim = gpu_sim_grpc.GPUCoordinatorStub(self._channel)

    def listed(self) -> None:
        vectors = []
        for device, address in zip(self.comm.devices, self.addresses, strict=True):
            get = gpu_sim.MemcpyDeviceToHostRequest(
                srcDeviceId={"value": device.id}, srcMemAddr={"value": address}, numBytes=8 * self.count
            )
            answer = self._gpu_sim.Memcpy(gpu_sim.MemcpyRequest(deviceToHost=get))
            vectors.append(np.frombuffer(answer.deviceToHost.dstData))
        total = sum(vectors[1:], start=vectors[0]).tobytes()
        for device, address in zip(self.comm.devices, self.addresses, strict=True):
            put = gpu_sim.MemcpyHostToDeviceRequest(
                hostSrcData=total, dstDeviceId={"value": device.id}, dstMemAddr={"value": address}
            )
            self._gpu_sim.Memcpy(gpu_sim.MemcpyRequest(hostToDevice=put))

    def variants(self) -> dict[str, Callable[[], object]]:
        return {
            "listed": self.listed,
            "relay": lambda: self.comm.all_reduce(self.buffer, driver="relay"),
            "stepped": lambda: self.comm.all_reduce(self.buffer, driver="stepped", algorithm="ring"),
            "ring": lambda: self.comm.all_reduce(self.buffer, algorithm="ring"),
            "tree": lambda: self.comm.all_reduce(self.buffer, algorithm="tree"),
        }

    def check(self, run: Callable[[], object]) -> None:
        """Raise InternalError unless ``run`` gives the right sum on every device."""
        size = len(self.comm.devices)
        values = [np.arange(self.count, dtype=np.float64) + rank for rank in range(size)]
        self.buffer.fill(values)
        run()
        expected = np.sum(values, axis=0)
        for rank in range(size):
            if not np.array_equal(self.buffer.read(rank), expected):
                raise InternalError(f"all-reduce of {self.count} float64 on {size}: rank {rank} has a wrong sum")

    def close(self) -> None:
        self.comm.destroy()
        self._channel.close()


Vector = npt.NDArray[np.float64]
DEVICES = 4
GRADIENT = 109_386
"""Number of parameters of the MLP 784-128-64-10."""
PAPER_NAIVE_MS, PAPER_RING_MS = 83.0, 8.0


def ring_against_naive(experiment: Experiment, findings: Findings) -> None:
    """Measure, count and simulate. Opens gRPC: this process cannot fork devices afterwards."""
    _measured(experiment, findings)
    _count_messages(findings)
    _simulated(experiment, findings)
    _run_listing(findings)


def _count_messages(findings: Findings) -> None:
    """Count the messages of the plans: the paper says that O(n²) steps become O(n)."""
    table = []
    for devices in (2, 4, 8, 16, 64):
        row: dict[str, Any] = {"devices": devices}
        for name in ("naive", "ring"):
            plans = [Operation("all_reduce", GRADIENT, algorithm=name).plan(devices, r) for r in range(devices)]
            sent = [[one for steps in plan.rounds for one in steps if isinstance(one, Send)] for plan in plans]
            row[f"{name} messages"] = sum(map(len, sent))
            row[f"{name} rounds"] = max(len(plan.rounds) for plan in plans)
            row[f"{name} busiest sends"] = max(4 * sum(one.range.length for one in mine) for mine in sent)
        table.append(row)
    last = table[-1]
    findings.section(
        "What the ring saves",
        "Counted on the plans themselves, for the MLP's gradient in float32. The ring sends **more** messages, in more "
        "rounds, not fewer; what it saves is that no device has to send, or add up, everybody's gradient.",
        make_table(table, "Messages of one all-reduce", naive_busiest_sends="bytes", ring_busiest_sends="bytes"),
    )
    findings.claim(
        "the ring takes communication from O(n²) to O(n) steps",
        paper="O(n²) to O(n)",
        ours=f"at 64 devices naive {last['naive messages']} messages, ring {last['ring messages']}",
        how="simulated",
        verdict="holds" if last["ring messages"] < last["naive messages"] else "does not hold",
        why="the naive way has 2(n-1) messages, the ring 2n(n-1); it saves bytes at the busiest device, "
        f"{last['naive busiest sends'] / last['ring busiest sends']:.0f} times at 64",
    )


def _run_listing(findings: Findings) -> None:
    """Run the paper's listing of the ring as printed."""
    vectors = [np.arange(12.0) + 100 * rank for rank in range(DEVICES)]
    expected = np.sum(vectors, axis=0)
    results = listing_3([vector.copy() for vector in vectors])
    wrong = sum(int((one != expected).sum()) for one in results)
    findings.claim(
        "listing 3 is an all-reduce",
        paper="pseudocode",
        ours=f"{wrong} of {DEVICES * 12} sums are wrong with {DEVICES} devices",
        how="measured",
        verdict="does not hold" if wrong else "holds",
        why="it picks segments by step alone and has no second half: each device adds its neighbour's part and stops",
    )


def listing_3(gradients: list[Vector]) -> list[Vector]:
    """Paper 1's AllReduceRing, line by line, in the most favourable reading: all devices send before any receives."""
    devices = len(gradients)
    segment = len(gradients[0]) // devices
    for step in range(devices - 1):
        part = slice(step * segment, (step + 1) * segment)
        sent = [vector[part].copy() for vector in gradients]
        for device in range(devices):
            gradients[device][part] += sent[(device - 1 + devices) % devices]
    return gradients


def _measured(experiment: Experiment, findings: Findings) -> None:
    seconds = 0.3 if experiment.quick else 2.0
    table: list[dict[str, Any]] = []
    for devices in (DEVICES,) if experiment.quick else (2, 4, 8):
        experiment.log(f"ring against naive: an all-reduce of the gradient on {devices} devices")
        with experiment.cluster(devices, lab=True) as address, connect(address) as client:
            variants = AllReduceVariants(client, devices, GRADIENT)
            row: dict[str, Any] = {"devices": devices}
            for name, call in variants.variants().items():
                variants.check(call)
                row[name] = 1000 * median_seconds(call, seconds)
            variants.close()
            table.append(row | {"how": "measured"})
    at = next(row for row in table if row["devices"] == DEVICES)
    groups = [f"{row['devices']} devices" for row in table]
    chart = Chart(
        "ring-against-naive",
        "One all-reduce of the MLP's gradient",
        [
            Bars(
                "median (ms)",
                groups,
                {way: [row[way] for row in table] for way in VARIANTS},
                rules={"paper: naive, 83 ms": PAPER_NAIVE_MS, "paper: ring, 8 ms": PAPER_RING_MS},
            )
        ],
        subtitle="measured through real servers, as a client sees it; float64, 875 KB",
    )
    findings.section(
        "Ring against naive",
        "- **listed**: the paper's naive way as printed, a Memcpy a device, one after the other\n"
        "- **relay**: the same work with all devices at once, through the coordinator\n"
        "- **stepped**: the ring, a call to each device each round\n"
        "- **ring**: the devices run the ring alone\n"
        "- **tree**: so too a tree",
        make_table(table, "Latency of an all-reduce", **dict.fromkeys(VARIANTS, "ms")),
        chart,
    )
    less = 1 - at["ring"] / at["listed"]
    findings.claim(
        "the ring takes a step's synchronisation from 83 to 8 ms, 90 % less",
        paper="83 ms to 8 ms",
        ours=f"{at['listed']:.1f} ms to {at['ring']:.1f} ms, {less:.0%} less ({DEVICES} devices)",
        how="measured",
        verdict=grade(less, 0.8, 0.5),
        why=f"not the ring's doing alone: the same naive work done at once takes {at['relay']:.1f} ms, and a ring "
        f"whose every round goes through the coordinator {at['stepped']:.1f} ms",
    )


def _simulated(experiment: Experiment, findings: Findings) -> None:
    """Simulate the same plans with one machine a device, for more devices than this machine can run."""
    experiment.log("ring against naive, simulated")
    devices = (2, 4, 8, 16, 32, 64)
    names = ("naive", "ring", "tree")
    ms = {name: [1000 * all_reduce_seconds(GRADIENT, count, name, ETHERNET) for count in devices] for name in names}
    small = {name: 1000 * all_reduce_seconds(17, devices[-1], name, ETHERNET) for name in names}
    chart = Chart(
        "simulated",
        "One all-reduce of the MLP's gradient, by number of devices",
        [Lines("time (ms)", [ChartLine(name, devices, ms[name], dashed=True) for name in names], kind="log")],
        x_label="devices, a machine each",
        x_kind="log",
        subtitle=f"simulated: {ETHERNET}, float32, 438 KB",
    )
    table = [{"devices": n, **{name: ms[name][i] for name in names}, "how": "simulated"} for i, n in enumerate(devices)]
    findings.section(
        "Ring against naive, between machines",
        f"The plans that devices execute, in virtual time over links of {ETHERNET}. The naive way is bound by the one "
        "machine through which all gradients go. For 17 numbers instead of a gradient it is another story: on "
        f"{devices[-1]} devices naive {small['naive']:.1f} ms, ring {small['ring']:.1f} ms, tree {small['tree']:.1f} "
        "ms, because the ring's hops follow one another.",
        make_table(table, "Simulated latency of an all-reduce", **dict.fromkeys(names, "ms")),
        chart,
    )
    at, last = devices.index(DEVICES), len(devices) - 1
    findings.claim(
        "the ring scales better with the number of devices",
        paper="stated",
        ours=f"naive over ring: {ms['naive'][at] / ms['ring'][at]:.1f}x on {DEVICES} machines, "
        f"{ms['naive'][last] / ms['ring'][last]:.1f}x on {devices[-1]}",
        how="simulated",
        verdict="holds" if ms["ring"][last] < ms["naive"][last] else "does not hold",
        why=f"for vectors of this size; for 17 numbers the naive way is {small['ring'] / small['naive']:.0f} times as "
        f"fast on {devices[-1]}, and a tree beats both on many machines",
    )


PAPER_ACCURACY, PAPER_SECONDS = 0.9289, 480.0
PLAIN_MLP, TUNED_MLP, CNN = "MLP, plain SGD 0.01", "MLP, Hoop's recipe (Adam)", "LeNet-style CNN"
"""Names of runs in the tables."""
PLAIN: dict[str, Any] = {"optimizer": "sgd", "lr": 0.01, "schedule": "constant", "warmup": 0}
"""Likely settings of a program written from scratch; the paper names neither optimizer nor learning rate."""


def run(experiment: Experiment) -> Findings:
    findings = Findings()
    findings.limits.append(
        f"{DEVICES} devices share {experiment.cores} cores here: times are this machine's, not those of "
        f"{DEVICES} machines. The paper does not name its hardware, its optimizer, its learning rate or its number "
        "of devices."
    )
    _train_models(experiment, findings)
    ring_against_naive(experiment, findings)  # last: it opens gRPC, and then this process cannot fork devices
    return findings


def _train_models(experiment: Experiment, findings: Findings) -> None:
    epochs = 2 if experiment.quick else 10
    runs = _trained_models(experiment, epochs)
    findings.section(
        "Accuracy and time",
        "Every row is a real training; the trained weights do not depend on how many devices there were. The paper's "
        "figure is what plain SGD at a small rate gives, and about what a model with no hidden layer at all reaches: "
        "it says that the program works, and nothing about how well such an MLP can do.",
        make_table(
            [_row(name, one) for name, one in runs.items()],
            "Training on MNIST",
            time="s",
            paper_time="s",
            accuracy="%",
            paper_accuracy="%",
        ),
        _accuracy_chart(runs),
    )
    _claim_mlp(findings, runs[TUNED_MLP], runs[PLAIN_MLP], epochs)
    _claim_cnn(experiment, findings, runs[CNN], runs[TUNED_MLP])


def _trained_models(experiment: Experiment, epochs: int) -> dict[str, TrainingRun]:
    """Train each model of the comparison; returns the runs by name."""
    cnn: dict[str, Any] = {"epochs": 1, "max_steps": 40} if experiment.quick else {"epochs": epochs}
    return {
        PLAIN_MLP: experiment.train("MLP, plain SGD", RECIPES["mnist"], devices=DEVICES, epochs=epochs, **PLAIN),
        TUNED_MLP: experiment.train("MLP", RECIPES["mnist"], devices=DEVICES, epochs=epochs),
        "no hidden layer (softmax)": experiment.train(
            "softmax regression",
            RECIPES["softmax"],
            devices=DEVICES,
            epochs=epochs,
            **PLAIN | {"batch_size": 256, "evaluate_every": 1},
        ),
        CNN: experiment.train("LeNet", RECIPES["lenet"], devices=DEVICES, **cnn),
    }


def _accuracy_chart(runs: dict[str, TrainingRun]) -> Chart:
    lines = [
        ChartLine(name, [e["epoch"] for e in one.evaluations], [100 * e["accuracy"] for e in one.evaluations])
        for name, one in runs.items()
    ]
    return Chart(
        "accuracy",
        "Accuracy by epoch",
        [Lines("test accuracy (%)", lines, rules={"the paper's MLP, 92.89 %": 100 * PAPER_ACCURACY})],
        x_label="epoch",
        subtitle=f"measured, {DEVICES} devices, data parallel",
    )


def _claim_mlp(findings: Findings, tuned: TrainingRun, plain: TrainingRun, epochs: int) -> None:
    """The claims about the MLP: its accuracy, and the time of its training."""
    best = tuned.summary["accuracy"]
    findings.claim(
        "the MLP's accuracy after 10 epochs",
        paper="92.89 %",
        ours=f"{best:.2%} (recipe), {plain.summary['accuracy']:.2%} (plain SGD), {epochs} epochs",
        how="measured",
        verdict="holds" if best >= PAPER_ACCURACY else "does not hold",
        why="reached and passed; the paper's figure is an optimizer's, not the model's limit",
    )
    seconds = tuned.summary["seconds"]
    findings.claim(
        "10 epochs of training take 8 minutes, instead of 30",
        paper="480 s",
        ours=f"{seconds:.1f} s for {epochs} epochs on {DEVICES} devices",
        how="measured",
        verdict="holds" if seconds * 10 / epochs < PAPER_SECONDS else "does not hold",
        why="the paper's client moves every batch through gRPC calls; here devices keep their data",
    )


def _claim_cnn(experiment: Experiment, findings: Findings, cnn: TrainingRun, mlp: TrainingRun) -> None:
    accuracy = cnn.summary["accuracy"]
    findings.claim(
        "a LeNet-style CNN is better than the MLP",
        paper="99.20 %, 15 min, 10 epochs",
        ours=f"{accuracy:.2%}, {cnn.summary['seconds']:.0f} s, {cnn.summary['epochs']:g} epochs",
        how="measured",
        verdict=_cnn_verdict(experiment, accuracy, mlp.summary["accuracy"]),
        why="a fraction of an epoch in a quick run" if experiment.quick else "",
    )


def _cnn_verdict(experiment: Experiment, cnn: float, mlp: float) -> Verdict:
    if experiment.quick:
        return "not shown"
    return "holds" if cnn > mlp else "does not hold"


def _row(name: str, one: TrainingRun) -> dict[str, Any]:
    papers = {"MLP": (92.89, 480.0), "no": (92.40, 480.0), "LeNet-style": (99.20, 900.0)}
    accuracy, seconds = papers[name.replace(",", " ").split()[0]]
    return {
        "model": name,
        "epochs": float(one.summary["epochs"]),
        "accuracy": 100 * one.summary["accuracy"],
        "paper accuracy": accuracy,
        "time": one.summary["seconds"],
        "paper time": seconds,
        "samples a second": round(one.summary["samples_per_second"]),
        "how": "measured",
    }
