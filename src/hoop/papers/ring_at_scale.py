"""Paper 3's systems with a core and a link for each node, more of them than this machine has: simulated."""

from __future__ import annotations

from hoop.papers.chain import RING, STRATEGIES, WIDTH, chain
from hoop.papers.findings import Findings, rows
from hoop.papers.lab import Lab
from hoop.papers.predicted import ETHERNET, costs_of, curve, figures, workers_idle
from hoop.report.chart import Chart, Line, Lines
from hoop.report.page import Picture

WHOLE = "RingTMP, whole batches"


def at_scale(lab: Lab, found: Findings) -> None:
    """Nodes with a core and a link of their own, more of them than this machine has."""
    lab.say("idle time and scaling, simulated")
    nodes, micros, depth = (2, 4, 8, 16, 32), 32, 33
    costs = costs_of(chain(WIDTH, depth, 1024), 64)
    curves = curve(costs, STRATEGIES, nodes, micros, ETHERNET)
    curves |= curve(costs.of(micros * costs.rows), {WHOLE: "ring"}, nodes, 1, ETHERNET)
    lines: list[list[Line]] = [[], []]
    for name, outcomes in curves.items():
        there = [(n, one) for n, one in zip(nodes, outcomes, strict=True) if one is not None]
        idle = [100 * workers_idle(one) for _, one in there]
        lines[0].append(Line(name, [n for n, _ in there], idle, "dashed"))
        lines[1].append(Line(name, [n for n, _ in there], [one.speedup for _, one in there], "dashed"))
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
