"""Paper 2: a chunked ring, failure detection by X failures of Y calls, transparent restarts, and joining devices.

``chunked_ring`` compares the chunked with the plain ring: measured by chunk size, and simulated over two links.
``detection`` measures the time until a killed or stopped device is declared dead, by X of Y calls and by a lease.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hoop.client.cluster import Cluster, connect
from hoop.config import format_size, parse_size
from hoop.errors import HoopError
from hoop.job_events import JobEvent, Recovered, Resized, Steps
from hoop.lab.papers.experiment import Experiment, Findings, RunningCluster, TrainingRun, make_table, median_seconds
from hoop.lab.papers.predicted import ETHERNET, INFINIBAND, all_reduce_seconds
from hoop.report.chart import Chart, ChartLine, Lines

UNDETECTED_S = 4.0
"""Seconds of observation where no detection is expected."""
DETECTED_S = 30.0
"""Maximum seconds of observation where a detection is expected."""
NO_LEASE = "600s"
FAILED, COUNTED = 3, 5
"""The paper's detector: X failed calls of the last Y."""
POLL_S = 0.02
"""Seconds between two polls of the events."""


def detection(experiment: Experiment, findings: Findings) -> None:
    """Kill or stop devices, and measure the time to detection by X of Y calls and by a lease.

    Hoop does not declare a device dead that fails calls while it is silent: it may be frozen for a moment. The caller
    here counts by itself, as the paper's coordinator does.
    """
    table: list[dict[str, Any]] = []

    def watch(
        client: Cluster,
        device: int,
        number: signal.Signals,
        detector: str,
        calls: bool = False,
        within: float = DETECTED_S,
    ) -> None:
        harm = "killed" if number == signal.SIGKILL else "stopped"
        experiment.log(f"detection: a device is {harm}; {detector}")
        seconds, why = _detection_time(client, device, number, calls, within)
        row = {"a device is": harm, "detector": detector, "noticed after": seconds}
        table.append(row | {"by": why or f"not within {within:g} s", "how": "measured"})

    with experiment.cluster(4, "16MiB", NO_LEASE) as address, connect(address) as client:
        watch(client, 4, signal.SIGKILL, "X of Y, nobody calls")
        watch(client, 3, signal.SIGSTOP, "X of Y, nobody calls", within=UNDETECTED_S)
        watch(client, 2, signal.SIGSTOP, "X of Y, calls go on", calls=True)
    with experiment.cluster(2, "16MiB", "1.5s") as address, connect(address) as client:
        watch(client, 2, signal.SIGSTOP, "lease of 1.5 s, nobody calls")
    _, blind, called, leased = (row["noticed after"] for row in table)
    findings.section(
        "When is a device dead?",
        f"The paper counts failed calls, X of the last Y (here {FAILED} of {COUNTED}), and chose that over heartbeats "
        "because it is easier. A killed process is noticed at once in every case. One that is stopped keeps its "
        "connections: counting calls sees it only if somebody calls, a lease sees it in any case. A process that is "
        "frozen for a moment fails calls too, so Hoop's own detector does not count those to a silent device.",
        make_table(table, "Time until a failed device is known", noticed_after="s"),
    )
    findings.claim(
        "X failures out of Y calls detect a failed device",
        paper="stated; heartbeats left out for ease",
        ours=f"stopped device: {_time(called)} with calls, {_time(blind)} without; lease {_time(leased)}",
        how="measured",
        verdict="in part" if blind is None else "holds",
        why="it is blind where nobody calls: a device that hangs between calls is found by the next job, not before",
    )


def _time(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.2f} s"


def _detection_time(
    client: Cluster, device: int, number: signal.Signals, calls: bool, within: float
) -> tuple[float | None, str]:
    """Send a signal to a device; returns the seconds until its death is reported, and the reported reason.

    None: it was not reported within ``within`` seconds. ``calls``: run collectives on the device meanwhile.
    """
    comm = client.communicator([1, device])
    buffer = comm.buffer(f"x{device}", 1000)
    comm.all_reduce(buffer)
    pid, after = comm.devices[1].info.pid, _last_sequence(client)

    def call() -> None:
        comm.all_reduce(buffer, timeout=1.0)

    try:
        return _wait_dead(client, device, after, lambda: os.kill(pid, number), call if calls else None, within)
    finally:
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)


def _last_sequence(client: Cluster) -> int:
    """Sequence number of the newest event."""
    return max((event.sequence for event in client.events()), default=0)


def _wait_dead(
    client: Cluster, device: int, after: int, inject: Callable[[], None], call: Callable[[], None] | None, within: float
) -> tuple[float | None, str]:
    """Inject the fault and wait for ``device_dead``; returns the seconds and the reason. Repeats ``call`` if given,
    until too many of its last repetitions have failed."""
    began, outcomes = time.monotonic(), deque[bool](maxlen=COUNTED)
    inject()
    while time.monotonic() < began + within:
        if call is not None:
            try:
                call()
                outcomes.append(True)
            except HoopError:
                outcomes.append(False)
            if outcomes.count(False) >= FAILED:
                return time.monotonic() - began, f"{FAILED} of the last {len(outcomes)} calls failed"
        for event in client.events(after):
            if event.kind == "device_dead" and int(event.fields["device"]) == device:
                reason = event.text.partition(" is dead: ")[2]
                return time.monotonic() - began, re.sub(r"[\d.]+:\d+ |( \(Connect|:).*", "", reason)
        time.sleep(POLL_S)
    return None, ""


CHUNK_DEVICES = 4
GROUPED = 8
"""Operations of a group, which share the cost of a launch."""


def chunked_ring(experiment: Experiment, findings: Findings) -> None:
    """Compare the chunked with the plain ring: measured by size of chunk, and simulated between machines."""
    count = (1 if experiment.quick else 4) << 20
    segment = 4 * count // CHUNK_DEVICES
    table = _time_chunks(experiment, count, segment)
    findings.section(
        "Chunked against plain ring",
        f"The same bytes move; chunks decide in how many messages. A segment of this ring is {format_size(segment)}: a "
        "chunk of that size or more **is** the plain ring, and how far its row is from plain is the noise. Smaller "
        "chunks let adding overlap with moving, and cost a message each.",
        make_table(table, "Chunked ring by size of chunk", chunked="ms", plain="ms"),
        _chunk_chart(table, count),
    )
    _simulated(findings)
    _claim_chunks(experiment, findings, [row for row in table if row["bytes"] < segment])


def _time_chunks(experiment: Experiment, count: int, segment: int) -> list[dict[str, Any]]:
    """Measure an all-reduce of ``count`` elements by the plain ring, and by the chunked ring with each size of chunk.

    ``segment``: the bytes of a rank's segment of the ring.
    """
    chunks = [1 << power for power in ((14, 16, 18, 20) if experiment.quick else range(13, 23))]
    experiment.log(f"chunked ring: {format_size(4 * count)} on {CHUNK_DEVICES} devices, {len(chunks)} sizes of chunks")
    table: list[dict[str, Any]] = []
    with experiment.cluster(CHUNK_DEVICES, memory="128MiB") as address, connect(address) as client:
        comm = client.communicator(CHUNK_DEVICES)
        buffer = comm.buffer("x", count)

        def ring(**options: Any) -> float:
            def call() -> None:
                with comm.group():
                    for _ in range(GROUPED):
                        comm.all_reduce(buffer, op="max", **options)

            return 1000 * median_seconds(call, 0.3 if experiment.quick else 2.0, least=3) / GROUPED

        plain = ring(algorithm="ring")
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
    return table


def _chunk_chart(table: list[dict[str, Any]], count: int) -> Chart:
    line = ChartLine("chunked ring", [row["bytes"] for row in table], [row["chunked"] for row in table])
    return Chart(
        "chunks",
        f"All-reduce of {format_size(4 * count)} by size of chunk",
        [Lines("time (ms)", [line], rules={"plain ring": table[0]["plain"]})],
        x_label="bytes a chunk",
        x_kind="log",
        subtitle=f"measured, {CHUNK_DEVICES} devices of one host",
    )


def _claim_chunks(experiment: Experiment, findings: Findings, chunked: list[dict[str, Any]]) -> None:
    """``chunked``: the rows whose chunk is smaller than a segment."""
    best = min(chunked, key=lambda row: float(row["chunked"]))
    worst = max(chunked, key=lambda row: float(row["chunked"]))
    gain = best["plain"] / best["chunked"]
    findings.claim(
        "a chunked ring is better than the plain one",
        paper="chosen by argument, not measured",
        ours=f"best at {best['chunk']}: {gain:.2f}x the plain ring's speed; worst at {worst['chunk']}: "
        f"{worst['plain'] / worst['chunked']:.2f}x",
        how="measured",
        verdict=experiment.timing_verdict("in part" if gain > 1.05 else "does not hold"),
        why="it depends on the chunk: too small and messages dominate, too large and it is the plain ring",
    )


def _simulated(findings: Findings) -> None:
    """Simulate both rings between machines, over two kinds of links."""
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
    findings.section(
        "Chunks between machines",
        f"An all-reduce of {format_size(4 * count)} in chunks of 256 KiB, in virtual time. Where the link is slow, "
        "adding hides behind moving; where it is fast, every message's own cost shows.",
        make_table(table, "Simulated chunked ring", plain="ms", chunked="ms"),
    )
    findings.claim(
        "chunks pay off where devices are near each other",
        paper="stated",
        ours=f"{slow:.2f}x the plain ring's speed over {ETHERNET}, {fast:.2f}x over {INFINIBAND}",
        how="simulated",
        verdict="does not hold" if fast < 1 < slow else "holds",
        why="it is the other way round: on slow links adding hides behind moving, on fast ones messages cost",
    )


DEVICES = 3
VICTIM = 2
"""Id of the killed device; ids start at 1."""
TRAINING: dict[str, Any] = {"batch_size": 512, "shards": 8, "epochs": 40, "evaluate_every": 0}


def run(experiment: Experiment) -> Findings:
    findings = Findings()
    findings.limits.append(
        "The paper reports no figure: what is checked are its design's claims. Its GPUs are simulated by processes, "
        f"and so are these; {experiment.cores} cores are shared by all of them."
    )
    _restart(experiment, findings)
    chunked_ring(experiment, findings)  # opens gRPC: this process cannot fork devices any more
    detection(experiment, findings)
    return findings


def _restart(experiment: Experiment, findings: Findings) -> None:
    """Kill a device and let a new one join during a training; compare with an undisturbed training."""
    disturbed, killed = _train_disturbed(experiment)
    steps = disturbed.summary["steps"]
    undisturbed = experiment.train("the same, undisturbed", "mnist", devices=DEVICES, max_steps=steps, **TRAINING)
    changes = [one for one in disturbed.events if isinstance(one, Recovered | Resized)]
    table = [_row("undisturbed", undisturbed), _row("killed, joined", disturbed)]
    findings.section(
        "Transparent restart, and a device that joins",
        f"Device {VICTIM} of {DEVICES} is killed (SIGKILL) after step {killed or 'none'}; the others go "
        "on, a new device joins and takes its share. The weights at the end are compared, bit by bit, with those of a "
        "run that nothing happened to.",
        make_table(table, "A training that loses and gains a device", longest_pause="s", time="s"),
        make_table(
            [{"step": one.step, "devices then": one.ranks, "pause": one.pause_s, "how": "measured"} for one in changes],
            "Changes of the ranks",
            pause="s",
        ),
        _loss_chart(undisturbed, disturbed),
    )
    same = disturbed.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    pauses = ", ".join(f"{one.pause_s:.2f} s" for one in changes) or "no recovery"
    findings.claim(
        "a failed device is restarted transparently",
        paper="stated, not measured",
        ours=f"weights {'identical' if same else 'differ'} after {steps} steps; pauses {pauses}",
        how="measured",
        verdict="holds" if same and killed and disturbed.recoveries else "does not hold",
        why="lost shards are computed again, in the same order of summation",
    )
    joined = any(one.ranks == DEVICES for one in changes)
    findings.claim(
        "devices can join while it runs",
        paper="stated, not measured",
        ours=f"{'a third device took part' if joined else 'no device joined in time'}, weights "
        f"{'identical' if same else 'differ'}",
        how="measured",
        verdict="holds" if joined and same else "not shown",
    )


def _train_disturbed(experiment: Experiment) -> tuple[TrainingRun, int | None]:
    """Train, kill a device, and let another join; returns the step after which it was killed, if it was."""
    killed: list[int] = []

    def on_event(running: RunningCluster, event: JobEvent) -> None:
        if isinstance(event, Steps) and not killed:
            killed.append(event.first + len(event.loss))
            running.signal(running.pids()[VICTIM], signal.SIGKILL)
        elif isinstance(event, Recovered | Resized):
            if event.ranks == DEVICES - 1:
                running.join(parse_size("256MiB", "memory"))
            else:
                running.stop()

    trained = experiment.train(
        "a device is killed, another joins", "mnist", devices=DEVICES, on_event=on_event, **TRAINING
    )
    return trained, killed[0] if killed else None


def _loss_chart(undisturbed: TrainingRun, disturbed: TrainingRun) -> Chart:
    lines = [
        ChartLine("undisturbed", range(len(undisturbed.losses)), undisturbed.losses),
        ChartLine("disturbed", range(len(disturbed.losses)), disturbed.losses, dashed=True),
    ]
    return Chart(
        "restart",
        "Loss, with a device killed and another joined",
        [Lines("training loss", lines)],
        x_label="step",
        subtitle=f"measured, {DEVICES} devices; the lines lie on each other if nothing was lost",
    )


def _row(name: str, one: TrainingRun) -> dict[str, Any]:
    return {
        "run": name,
        "steps": one.summary["steps"],
        "time": one.summary["seconds"],
        "longest pause": max((recovered.pause_s for recovered in one.recoveries), default=None),
        "weights": one.summary["weights_sha256"][:16],
        "how": "measured",
    }
