"""A ring in chunks against a plain one: measured by size of chunk, and simulated over two kinds of links."""

from __future__ import annotations

from typing import Any

from hoop.client.cluster import connect
from hoop.config import format_size
from hoop.papers.findings import Findings, rows
from hoop.papers.lab import Lab, timed
from hoop.papers.predicted import ETHERNET, INFINIBAND, all_reduce_seconds
from hoop.report.chart import Chart, Line, Lines
from hoop.report.page import Picture

DEVICES = 4


def chunked_ring(lab: Lab, found: Findings) -> None:
    """The chunked ring by the size of its chunks, beside the plain one; several in a launch: calls cost little."""
    count = (1 if lab.quick else 4) << 20
    chunks = [1 << power for power in ((14, 16, 18, 20) if lab.quick else range(13, 23))]
    turns = 8
    lab.say(f"chunked ring: {format_size(4 * count)} on {DEVICES} devices, {len(chunks)} sizes of chunks")
    table: list[dict[str, Any]] = []
    with lab.cluster(DEVICES, memory="128MiB") as address, connect(address) as client:
        comm = client.communicator(DEVICES)
        buffer = comm.buffer("x", count)

        def ring(**options: Any) -> float:
            def call() -> None:
                with comm.group():
                    for _ in range(turns):
                        comm.all_reduce(buffer, op="max", **options)

            return 1000 * timed(call, 0.3 if lab.quick else 2.0, least=3) / turns

        plain = ring(algorithm="ring")
        segment = 4 * count // DEVICES
        for chunk in chunks:
            ms = ring(algorithm="chunked_ring", chunk_bytes=chunk)
            messages = 2 * (DEVICES - 1) * -(-segment // min(chunk, segment))
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
                [Line("chunked ring", [row["bytes"] for row in table], [row["chunked"] for row in table])],
                rules={"plain ring": plain},
            )
        ],
        x_label="bytes a chunk",
        x_kind="log",
        subtitle=f"measured, {DEVICES} devices of one host",
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
