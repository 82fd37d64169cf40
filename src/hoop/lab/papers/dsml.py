"""When is a device dead? Ways to fail, against X failed calls of Y and a lease: how long until it is known.

A ring in chunks against a plain one: measured by size of chunk, and simulated over two kinds of links.

Paper 2: a chunked ring, X failures of Y calls, transparent restarts, and devices that join.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

from hoop.client.cluster import Cluster, connect
from hoop.config import format_size, parse_size
from hoop.errors import HoopError
from hoop.lab.papers.experiment import EventFields, Experiment, RunningCluster, TrainingRun, timed
from hoop.lab.papers.findings import Findings, rows
from hoop.lab.papers.predicted import ETHERNET, INFINIBAND, all_reduce_seconds
from hoop.report.chart import Chart, ChartLine, Lines
from hoop.report.page import Picture

BLIND_S = 4.0
"""How long a detector is watched that should not notice."""
SEEING_S = 30.0
"""The same for one that should."""
NO_LEASE = "600s"
LOOK_S = 0.02
"""Between two looks at the events; each carries the time at which it happened, so this delays nothing."""


def detection(lab: Experiment, found: Findings) -> None:
    """Ways to fail, against the two witnesses: X of Y calls, and a lease that heartbeats renew."""
    table: list[dict[str, Any]] = []

    def watch(
        client: Cluster,
        device: int,
        number: signal.Signals,
        detector: str,
        calls: bool = False,
        within: float = SEEING_S,
    ) -> None:
        harm = "killed" if number == signal.SIGKILL else "stopped"
        lab.say(f"detection: a device is {harm}; {detector}")
        seconds, why = _noticed(client, device, number, calls, within)
        row = {"a device is": harm, "detector": detector, "noticed after": seconds}
        table.append(row | {"by": why or f"not within {within:g} s", "how": "measured"})

    with lab.cluster(4, "16MiB", NO_LEASE) as address, connect(address) as client:
        watch(client, 4, signal.SIGKILL, "X of Y, nobody calls")
        watch(client, 3, signal.SIGSTOP, "X of Y, nobody calls", within=BLIND_S)
        watch(client, 2, signal.SIGSTOP, "X of Y, calls go on", calls=True)
    with lab.cluster(2, "16MiB", "1.5s") as address, connect(address) as client:
        watch(client, 2, signal.SIGSTOP, "lease of 1.5 s, nobody calls")
    _, blind, called, leased = (row["noticed after"] for row in table)
    found.section(
        "When is a device dead?",
        "The paper counts failed calls, X of the last Y (here 3 of 5), and chose that over heartbeats because it is "
        "easier. A killed process is noticed at once in every case, because its connection breaks. One that is stopped "
        "keeps its connections: counting calls sees it only if somebody calls, a lease sees it in any case.",
        rows(table, "Time until a failed device is known", noticed_after="s"),
    )
    found.claim(
        "X failures out of Y calls detect a failed device",
        paper="stated; heartbeats left out for ease",
        ours=f"stopped device: {_time(called)} with calls, {_time(blind)} without; lease {_time(leased)}",
        how="measured",
        verdict="in part" if blind is None else "holds",
        why="it is blind where nobody calls: a device that hangs between calls is found by the next job, not before",
    )


def _time(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.2f} s"


def _noticed(
    client: Cluster, device: int, number: signal.Signals, calls: bool, within: float
) -> tuple[float | None, str]:
    """Seconds until the coordinator knows, and what told it; None: it did not, while it was watched."""
    comm = client.communicator([1, device])
    buffer = comm.buffer(f"x{device}", 1000)
    comm.all_reduce(buffer)
    pid, after = comm.devices[1].info.pid, _newest(client)

    def call() -> None:
        comm.all_reduce(buffer, timeout=1.0)

    try:
        return _died(client, device, after, lambda: os.kill(pid, number), call if calls else None, within)
    finally:
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)


def _newest(client: Cluster) -> int:
    """The number of the newest event."""
    return max((event.sequence for event in client.events()), default=0)


def _died(
    client: Cluster,
    device: int,
    after: int,
    hurt: Callable[[], None],
    call: Callable[[], None] | None,
    within: float,
) -> tuple[float | None, str]:
    """Hurts a device, calls meanwhile if asked to, and says how long it took until it was dead, and why it was."""
    began = time.monotonic()
    hurt()
    while time.monotonic() < began + within:
        if call is not None:
            with contextlib.suppress(HoopError):  # what fails is what is counted
                call()
        for event in client.events(after):
            if event.kind == "device_dead" and int(event.fields["device"]) == device:
                reason = event.text.partition(" is dead: ")[2]
                return time.monotonic() - began, re.sub(r"[\d.]+:\d+ |( \(Connect|:).*", "", reason)
        time.sleep(LOOK_S)
    return None, ""


CHUNK_DEVICES = 4


def chunked_ring(lab: Experiment, found: Findings) -> None:
    """The chunked ring by the size of its chunks, beside the plain one; several in a launch: calls cost little."""
    count = (1 if lab.quick else 4) << 20
    chunks = [1 << power for power in ((14, 16, 18, 20) if lab.quick else range(13, 23))]
    turns = 8
    lab.say(
        f"chunked ring: {format_size(4 * count)} on {CHUNK_DEVICES} devices, {len(chunks)} sizes of chunks"
    )
    table: list[dict[str, Any]] = []
    with lab.cluster(CHUNK_DEVICES, memory="128MiB") as address, connect(address) as client:
        comm = client.communicator(CHUNK_DEVICES)
        buffer = comm.buffer("x", count)

        def ring(**options: Any) -> float:
            def call() -> None:
                with comm.group():
                    for _ in range(turns):
                        comm.all_reduce(buffer, op="max", **options)

            return 1000 * timed(call, 0.3 if lab.quick else 2.0, least=3) / turns

        plain = ring(algorithm="ring")
        segment = 4 * count // CHUNK_DEVICES
        for chunk in chunks:
            ms = ring(algorithm="chunked_ring", chunk_bytes=chunk)
            messages = 2 * (CHUNK_DEVICES - 1) * -(-segment // min(chunk, segment))
            table.append(
                {
                    "chunk": format_size(chunk),
                    "bytes": chunk,
                    "messages a device": messages,
                    "chunked": ms,
                    "plain": plain,
                    "how": "measured",
                }
            )
    real = [row for row in table if row["bytes"] < segment]
    best = min(real, key=lambda row: float(row["chunked"]))
    worst = max(real, key=lambda row: float(row["chunked"]))
    chart = Chart(
        f"All-reduce of {format_size(4 * count)} by size of chunk",
        [
            Lines(
                "time (ms)",
                [
                    ChartLine(
                        "chunked ring", [row["bytes"] for row in table], [row["chunked"] for row in table]
                    )
                ],
                rules={"plain ring": plain},
            )
        ],
        x_label="bytes a chunk",
        x_kind="log",
        subtitle=f"measured, {CHUNK_DEVICES} devices of one host",
    )
    found.section(
        "Chunked against plain ring",
        f"The same bytes move; chunks decide in how many messages. A segment of this ring is {format_size(segment)}: a "
        "chunk of that size or more **is** the plain ring, and how far its row is from plain is the noise. Smaller "
        "chunks let adding overlap with moving, and cost a message each.",
        rows(table, "Chunked ring by size of chunk", chunked="ms", plain="ms"),
        Picture("chunks", chart.svg(), "Measured."),
    )
    _simulated(found)
    gain = plain / best["chunked"]
    found.claim(
        "a chunked ring is better than the plain one",
        paper="chosen by argument, not measured",
        ours=f"best at {best['chunk']}: {gain:.2f}x the plain ring's speed; worst at {worst['chunk']}: "
        f"{plain / worst['chunked']:.2f}x",
        how="measured",
        verdict=lab.timed("in part" if gain > 1.05 else "does not hold"),
        why="it depends on the chunk: too small and messages dominate, too large and it is the plain ring",
    )


def _simulated(found: Findings) -> None:
    """Between machines, over two kinds of links: what overlapping is worth."""
    count, devices = 1 << 22, (2, 4, 8, 16)
    table: list[dict[str, Any]] = [
        {
            "devices": n,
            "link": str(link),
            "plain": 1000 * all_reduce_seconds(count, n, "ring", link),
            "chunked": 1000 * all_reduce_seconds(count, n, "chunked_ring", link),
            "how": "simulated",
        }
        for link in (ETHERNET, INFINIBAND)
        for n in devices
    ]
    gains = {
        str(link): max(row["plain"] / row["chunked"] for row in table if row["link"] == str(link))
        for link in (ETHERNET, INFINIBAND)
    }
    slow, fast = gains.values()
    found.section(
        "Chunks between machines",
        f"An all-reduce of {format_size(4 * count)} in chunks of 256 KiB, in virtual time. Where the link is slow, "
        "adding hides behind moving; where it is fast, every message's own cost shows.",
        rows(table, "Simulated chunked ring", plain="ms", chunked="ms"),
    )
    found.claim(
        "chunks pay off where devices are near each other",
        paper="stated",
        ours=f"{slow:.2f}x the plain ring's speed over {ETHERNET}, {fast:.2f}x over {INFINIBAND}",
        how="simulated",
        verdict="does not hold" if fast < 1 < slow else "holds",
        why="it is the other way round: on slow links adding hides behind moving, on fast ones messages cost",
    )


DEVICES = 3
VICTIM = 2
"""A device's id; the first is 1."""
TRAINING: dict[str, Any] = {"batch_size": 512, "shards": 8, "epochs": 40, "evaluate_every": 0}


def run(lab: Experiment) -> Findings:
    found = Findings()
    found.limits.append(
        "The paper reports no figure: what is checked are its design's claims. Its GPUs are simulated by processes, "
        f"and so are these; {lab.cores} cores are shared by all of them."
    )
    _restart(lab, found)
    chunked_ring(lab, found)  # from here on gRPC is open in this process: no more devices are forked
    detection(lab, found)
    return found


def _restart(lab: Experiment, found: Findings) -> None:
    """A device is killed and a new one joins in the middle of a training."""
    killed: list[int] = []

    def disturb(running: RunningCluster, event: EventFields) -> None:
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
                    ChartLine("undisturbed", range(len(quiet.losses)), quiet.losses),
                    ChartLine("disturbed", range(len(harmed.losses)), harmed.losses, "dashed"),
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


def _row(name: str, one: TrainingRun) -> dict[str, Any]:
    return {
        "run": name,
        "steps": one.summary["steps"],
        "time": one.summary["seconds"],
        "longest pause": max((e["pause_s"] for e in one.of_kind("recovered")), default=None),
        "weights": one.summary["weights_sha256"][:16],
        "how": "measured",
    }
