"""Paper 1: an MLP learns MNIST on devices that add their gradients up over a ring."""

from __future__ import annotations

from typing import Any

from hoop.engine.recipes import RECIPES
from hoop.papers.findings import Findings, Verdict, rows
from hoop.papers.lab import Lab, Trained
from hoop.papers.ring_or_naive import DEVICES, ring_against_naive
from hoop.report.chart import Chart, Line, Lines
from hoop.report.page import Picture

PAPER_ACCURACY, PAPER_SECONDS = 0.9289, 480.0
PLAIN: dict[str, Any] = {"optimizer": "sgd", "lr": 0.01, "schedule": "constant", "warmup": 0}
"""What a program written from scratch is likely to have; the paper names neither optimizer nor rate."""


def run(lab: Lab) -> Findings:
    found = Findings()
    found.limits.append(
        f"{DEVICES} devices share {lab.cores} cores here: times are this machine's, not those of {DEVICES} machines. "
        "The paper does not name its hardware, its optimizer, its learning rate or its number of devices."
    )
    _learning(lab, found)
    ring_against_naive(lab, found)  # last: a process that has opened gRPC forks no more devices
    return found


def _learning(lab: Lab, found: Findings) -> None:
    epochs = 2 if lab.quick else 10
    cnn: dict[str, Any] = {"epochs": 1, "max_steps": 40} if lab.quick else {"epochs": epochs}
    runs = {
        "MLP, plain SGD 0.01": lab.train(
            "MLP, plain SGD", RECIPES["mnist"], devices=DEVICES, epochs=epochs, **PLAIN
        ),
        "MLP, Hoop's recipe (Adam)": lab.train("MLP", RECIPES["mnist"], devices=DEVICES, epochs=epochs),
        "no hidden layer (softmax)": lab.train(
            "softmax regression",
            RECIPES["softmax"],
            devices=DEVICES,
            epochs=epochs,
            **PLAIN | {"batch_size": 256, "evaluate_every": 1},
        ),
        "LeNet-style CNN": lab.train("LeNet", RECIPES["lenet"], devices=DEVICES, **cnn),
    }
    table = [_row(name, one) for name, one in runs.items()]
    chart = Chart(
        "Accuracy by epoch",
        [
            Lines(
                "test accuracy (%)",
                [
                    Line(
                        name,
                        [e["epoch"] for e in one.evaluations],
                        [100 * e["accuracy"] for e in one.evaluations],
                    )
                    for name, one in runs.items()
                ],
                rules={"the paper's MLP, 92.89 %": 100 * PAPER_ACCURACY},
            )
        ],
        x_label="epoch",
        subtitle=f"measured, {DEVICES} devices, data parallel",
    )
    plain, tuned = runs["MLP, plain SGD 0.01"], runs["MLP, Hoop's recipe (Adam)"]
    found.section(
        "Accuracy and time",
        "Every row is a real training; the trained weights do not depend on how many devices there were. The paper's "
        "figure is what plain SGD at a small rate gives, and about what a model with no hidden layer at all reaches: "
        "it says that the program works, and nothing about how well such an MLP can do.",
        rows(table, "Training on MNIST", time="s", paper_time="s", accuracy="%", paper_accuracy="%"),
        Picture("accuracy", chart.svg(), "Measured."),
    )
    best = tuned.summary["accuracy"]
    found.claim(
        "the MLP's accuracy after 10 epochs",
        paper="92.89 %",
        ours=f"{best:.2%} (recipe), {plain.summary['accuracy']:.2%} (plain SGD), {epochs} epochs",
        how="measured",
        verdict="holds" if best >= PAPER_ACCURACY else "does not hold",
        why="reached and passed; the paper's figure is an optimizer's, not the model's limit",
    )
    seconds = tuned.summary["seconds"]
    found.claim(
        "10 epochs of training take 8 minutes, instead of 30",
        paper="480 s",
        ours=f"{seconds:.1f} s for {epochs} epochs on {DEVICES} devices",
        how="measured",
        verdict="holds" if seconds * 10 / epochs < PAPER_SECONDS else "does not hold",
        why="the paper's client moves every batch through gRPC calls; here devices keep their data",
    )
    cnn_run = runs["LeNet-style CNN"]
    found.claim(
        "a LeNet-style CNN is better than the MLP",
        paper="99.20 %, 15 min, 10 epochs",
        ours=f"{cnn_run.summary['accuracy']:.2%}, {cnn_run.summary['seconds']:.0f} s, "
        f"{cnn_run.summary['epochs']:g} epochs",
        how="measured",
        verdict=_cnn_verdict(lab, cnn_run.summary["accuracy"], best),
        why="a fraction of an epoch in a quick run" if lab.quick else "",
    )


def _cnn_verdict(lab: Lab, cnn: float, mlp: float) -> Verdict:
    if lab.quick:
        return "not shown"
    return "holds" if cnn > mlp else "does not hold"


def _row(name: str, one: Trained) -> dict[str, Any]:
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
