"""When is a device dead? Ways to fail, against X failed calls of Y and a lease: how long until it is known."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

from hoop.client.cluster import Cluster, connect
from hoop.errors import HoopError
from hoop.papers.findings import Findings, rows
from hoop.papers.lab import Lab

BLIND_S = 4.0
"""How long a detector is watched that should not notice."""
SEEING_S = 30.0
"""The same for one that should."""
NO_LEASE = "600s"
LOOK_S = 0.02
"""Between two looks at the events; each carries the time at which it happened, so this delays nothing."""


def detection(lab: Lab, found: Findings) -> None:
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
