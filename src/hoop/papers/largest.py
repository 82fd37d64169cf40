"""The largest model that devices of a given memory can train: grown until it is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hoop.engine.job import Job
from hoop.errors import UserError
from hoop.papers.chain import DEPTH, RING, SERVER, SGD, STRATEGIES, WIDTH, chain
from hoop.papers.findings import Findings, rows
from hoop.papers.lab import Lab, Trained


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest that trained, and why the next did not."""

    size: int
    parameters: int
    memory: int
    """Of the fullest device, bytes."""
    refusal: str


def largest(
    lab: Lab, make: Callable[[int], Job], start: int, grain: int, *, halvings: int = 3, **options: Any
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


def _try(lab: Lab, job: Job, size: int, options: dict[str, Any]) -> Trained:
    return lab.train(f"a model of size {size}", job, max_steps=1, **options)


def capacity(lab: Lab, found: Findings) -> None:
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
