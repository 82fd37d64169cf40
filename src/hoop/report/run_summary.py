"""The result of a run in a few lines: ``hoop train`` and ``hoop attach`` print them at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hoop.config import format_size
from hoop.texts import counted

STRAGGLERS = 4
"""Number of stragglers that are named."""


def accuracy_name(split: str) -> str:
    """The name of an accuracy on this split: training accuracy is never called test accuracy."""
    return "accuracy" if split == "test" else "training accuracy"


def headline(result: Mapping[str, Any]) -> str:
    """The result in one line."""
    measured = result.get("accuracy") is not None
    accuracy = f"{accuracy_name(result['split'])} {result['accuracy']:.2%}  " if measured else ""
    steps = counted(result["steps"], "step")
    at_the_end = len(result["device_ids"])
    changed = f" at first, {at_the_end} at the end" if at_the_end != result["devices"] else ""
    return (
        f"{accuracy}{'stopped after ' if result['stopped'] else ''}{steps} in {result['seconds']:.1f} s  "
        f"{result['samples_per_second']:,.0f} samples/s  "
        f"{counted(result['devices'], 'device')}{changed}, {result['strategy']}"
    )


def summary_lines(result: Mapping[str, Any], out: Path | None) -> Iterator[str]:
    """All lines of the summary."""
    yield headline(result)
    by_rank = zip(result["device_ids"], result["shares"], result["memory"], strict=True)
    for rank, (device, share, memory) in enumerate(by_rank):
        yield (
            f"  device {device} (rank {rank}): compute {share['compute']:.0%}  communication "
            f"{share['communicate']:.0%}  idle {share['idle']:.0%}  memory {format_size(memory)}"
        )
    moved = result.get("shards_moved")
    rebalanced = f"; shards followed the devices' speed {counted(moved, 'time')}" if moved else ""
    yield f"  moved {format_size(result['bytes_sent'])} between devices{rebalanced}"
    if result.get("stragglers"):
        yield f"  stragglers: {_stragglers(result['stragglers'])}"
    for state in result.get("states", ()):
        yield f"  device {state['device']} came at step {state['step']}; state: from {state['source']}"
    if result.get("damaged"):
        yield f"  messages damaged on the way and sent again: {result['damaged']}"
    if result.get("prediction_error") is not None:
        yield (
            f"  a step took {1e3 * result['step_seconds']:.2f} ms (median); the simulator predicted "
            f"{1e3 * result['predicted_step_seconds']:.2f} ms: {_difference(result['prediction_error'])}"
        )
    yield f"  weights sha256 {result['weights_sha256']}"
    if out is not None and result.get("checkpoint") is not None:
        again = f"; go on: hoop train --resume --out {out}" if result["stopped"] else ""
        yield f"  kept in {out}{again}"
    elif out is None and result["stopped"]:
        yield "  nothing was kept: no --out was given"


def _stragglers(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """The stragglers in words, each rank once, those that were slow most often first."""
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for verdict in verdicts:
        by_rank.setdefault(verdict["rank"], []).append(verdict)
    ranks = sorted(by_rank, key=lambda rank: (-len(by_rank[rank]), rank))
    texts = [_straggler(rank, by_rank[rank]) for rank in ranks[:STRAGGLERS]]
    more = [f"{counted(len(ranks) - STRAGGLERS, 'more rank')}"] if len(ranks) > STRAGGLERS else []
    return "; ".join([*texts, *more])


def _straggler(rank: int, verdicts: Sequence[Mapping[str, Any]]) -> str:
    slowest = max(verdict["times"] for verdict in verdicts)
    if len(verdicts) == 1:
        return f"rank {rank} from step {verdicts[0]['step']} on, {slowest:.1f} times slower"
    return f"rank {rank} {len(verdicts)} times, first at step {verdicts[0]['step']}, up to {slowest:.1f} times slower"


def _difference(error: float) -> str:
    """The measured time of a step compared with the predicted one."""
    if error > 1:  # a percentage of several hundred reads as a fault
        return f"{1 + error:.1f} times that; other work on the same cores does this"
    return f"{abs(error):.0%} {'more' if error > 0 else 'less'}"
