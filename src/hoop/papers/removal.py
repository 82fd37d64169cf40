"""A node is taken away in the middle of a training, for good or for a while: what becomes of it."""

from __future__ import annotations

import re
import signal
import threading
from dataclasses import dataclass
from typing import Any

from hoop.engine.job import Job
from hoop.errors import HoopError
from hoop.papers.chain import DEPTH, RING, SERVER, SGD, STRATEGIES, WIDTH, chain
from hoop.papers.findings import Findings, Verdict, rows
from hoop.papers.lab import Lab, Running, Told, Trained

WHILE_S = 1.0
"""How long a node that comes back was away."""


@dataclass(frozen=True)
class Removal:
    """What happened."""

    fired: bool
    """Whether the training was still going on when the node was taken away."""
    trained: Trained | None
    error: str = ""

    @property
    def pause(self) -> float:
        """The longest time in which no step ended."""
        if self.trained is None:
            return float("nan")
        told = [one["pause_s"] for one in self.trained.of_kind("recovered")]
        return max([*told, *self.trained.seconds], default=float("nan"))


def remove(lab: Lab, job: Job, strategy: str, devices: int, for_good: bool, **settings: Any) -> Removal:
    """Trains, and takes the second device away: killed, or stopped for a second."""
    pids: dict[int, int] = {}
    timers: list[threading.Timer] = []

    def disturb(running: Running, event: Told) -> None:
        if event["kind"] == "started":
            pids.update(running.pids())
        elif event["kind"] == "steps" and not timers:
            back = threading.Timer(WHILE_S, running.signal, (pids[2], signal.SIGCONT))
            timers.append(back)
            running.signal(pids[2], signal.SIGKILL if for_good else signal.SIGSTOP)
            if not for_good:
                back.start()

    what = "a node goes for good" if for_good else "a node goes for a while"
    try:
        trained = lab.train(what, job, devices=devices, strategy=strategy, disturb=disturb, **settings)
        return Removal(bool(timers), trained)
    except HoopError as error:
        return Removal(bool(timers), None, str(error))
    except ProcessLookupError:
        return Removal(False, None, "it was over before the node was taken away")
    finally:
        for timer in timers:
            if timer.is_alive():
                timer.cancel()
                timer.join()


def resilience(lab: Lab, found: Findings) -> None:
    """Aim 6: either system, with a node taken away."""
    steps = 80 if lab.quick else 400
    job, nodes = chain(WIDTH, DEPTH, 60_000), 4
    settings: dict[str, Any] = SGD | {"max_steps": steps, "epochs": 4}
    quiet = lab.train("undisturbed", job, devices=nodes, strategy="ring", **settings)
    table: list[dict[str, Any]] = []
    for name in (RING, SERVER):
        for for_good in (True, False):
            one = remove(lab, job, STRATEGIES[name], nodes, for_good, **settings)
            same = one.trained is not None and (
                one.trained.summary["weights_sha256"] == quiet.summary["weights_sha256"]
            )
            if not one.fired:
                outcome = "not shown: over too soon"
            elif one.trained is None:
                outcome = "ends: " + re.sub(r" \(pid.*?\)", "", one.error.splitlines()[0])[:60]
            else:
                outcome = f"goes on, {'the same weights' if same else 'other weights'}"
            table.append(
                {
                    "": name,
                    "a node goes": "for good" if for_good else f"for {WHILE_S:g} s",
                    "training": outcome,
                    "longest wait": None if one.trained is None else one.pause,
                    "how": "measured",
                    "survived": one.fired and same,
                }
            )
    found.section(
        "A node removed",
        f"The second of {nodes} nodes is killed (SIGKILL), or stopped (SIGSTOP) for {WHILE_S:g} s, while a model is "
        f"being trained; the weights after {steps} steps are compared with those of a run that nothing happened to.",
        rows(table, "A node removed for good, and for a while", longest_wait="s"),
    )
    ring, server = ([row["survived"] for row in table if row[""] == name] for name in (RING, SERVER))
    verdict: Verdict = (
        "holds" if all(ring) else "in part" if any(ring) and sum(ring) >= sum(server) else "does not hold"
    )
    found.claim(
        "6: RingTMP is as resilient as a parameter server",
        paper="aim",
        ours=f"ring: for good {_survived(ring[0])}, for a while {_survived(ring[1])}; BSP: {_survived(server[0])}, "
        f"{_survived(server[1])}",
        how="measured",
        verdict=verdict,
        why=""
        if all(ring)
        else "neither goes on here without a node; a stage is held by nobody else, and must come from a copy",
    )


def _survived(good: bool) -> str:
    return "survived" if good else "did not survive"
