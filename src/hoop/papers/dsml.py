"""Paper 2: a chunked ring, X failures of Y calls, transparent restarts, and devices that join."""

from __future__ import annotations

import signal
from typing import Any

from hoop.config import parse_size
from hoop.papers.chunks import chunked_ring
from hoop.papers.detection import detection
from hoop.papers.findings import Findings, rows
from hoop.papers.lab import Lab, Running, Told, Trained
from hoop.report.chart import Chart, Line, Lines
from hoop.report.page import Picture

DEVICES = 3
VICTIM = 2
"""A device's id; the first is 1."""
TRAINING: dict[str, Any] = {"batch_size": 512, "shards": 8, "epochs": 40, "evaluate_every": 0}


def run(lab: Lab) -> Findings:
    found = Findings()
    found.limits.append(
        "The paper reports no figure: what is checked are its design's claims. Its GPUs are simulated by processes, "
        f"and so are these; {lab.cores} cores are shared by all of them."
    )
    _restart(lab, found)
    chunked_ring(lab, found)  # from here on gRPC is open in this process: no more devices are forked
    detection(lab, found)
    return found


def _restart(lab: Lab, found: Findings) -> None:
    """A device is killed and a new one joins in the middle of a training."""
    killed: list[int] = []

    def disturb(running: Running, event: Told) -> None:
        if event["kind"] == "steps" and not killed:
            killed.append(event["first"] + len(event["loss"]))
            running.signal(running.pids()[VICTIM], signal.SIGKILL)
        elif event["kind"] == "recovered":
            if event["ranks"] == DEVICES - 1:
                running.join(parse_size("256MiB", "memory"))
            else:
                running.stop()

    harmed = lab.train(
        "a device is killed, another joins", "mnist", devices=DEVICES, disturb=disturb, **TRAINING
    )
    steps = harmed.summary["steps"]
    quiet = lab.train("the same, undisturbed", "mnist", devices=DEVICES, max_steps=steps, **TRAINING)
    same = harmed.summary["weights_sha256"] == quiet.summary["weights_sha256"]
    recoveries = harmed.of_kind("recovered")
    table = [_row("undisturbed", quiet), _row("killed, joined", harmed)]
    chart = Chart(
        "Loss, with a device killed and another joined",
        [
            Lines(
                "training loss",
                [
                    Line("undisturbed", range(len(quiet.losses)), quiet.losses),
                    Line("disturbed", range(len(harmed.losses)), harmed.losses, "dashed"),
                ],
            )
        ],
        x_label="step",
        subtitle=f"measured, {DEVICES} devices; the lines lie on each other if nothing was lost",
    )
    found.section(
        "Transparent restart, and a device that joins",
        f"Device {VICTIM} of {DEVICES} is killed (SIGKILL) after step {killed[0] if killed else 'none'}; the others go "
        "on, a new device joins and takes its share. The weights at the end are compared, bit by bit, with those of a "
        "run that nothing happened to.",
        rows(table, "A training that loses and gains a device", longest_pause="s", time="s"),
        rows(
            [
                {
                    "step": one["step"],
                    "devices then": one["ranks"],
                    "pause": one["pause_s"],
                    "how": "measured",
                }
                for one in recoveries
            ],
            "Recoveries",
            pause="s",
        ),
        Picture("restart", chart.svg(), "Measured."),
    )
    pauses = ", ".join(f"{one['pause_s']:.2f} s" for one in recoveries) or "no recovery"
    found.claim(
        "a failed device is restarted transparently",
        paper="stated, not measured",
        ours=f"weights {'identical' if same else 'differ'} after {steps} steps; pauses {pauses}",
        how="measured",
        verdict="holds" if same and killed and recoveries else "does not hold",
        why="lost shards are computed again, in the same order of summation",
    )
    joined = any(one["ranks"] == DEVICES for one in recoveries)
    found.claim(
        "devices can join while it runs",
        paper="stated, not measured",
        ours=f"{'a third device took part' if joined else 'no device joined in time'}, weights "
        f"{'identical' if same else 'differ'}",
        how="measured",
        verdict="holds" if joined and same else "not shown",
    )


def _row(name: str, one: Trained) -> dict[str, Any]:
    return {
        "run": name,
        "steps": one.summary["steps"],
        "time": one.summary["seconds"],
        "longest pause": max((e["pause_s"] for e in one.of_kind("recovered")), default=None),
        "weights": one.summary["weights_sha256"][:16],
        "how": "measured",
    }
