"""Answers of the simulator for the page: one thread computes them, bounded in number and size.

page ── ask(question) ──▶ Simulator ── one thread ──▶ run(costs, settings, question)
     ◀─ answer(question) ─┘                            (``cli/dashboard.py``: it needs the engine's settings)
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hoop.errors import HoopError

log = logging.getLogger(__name__)
MAX_DEVICES = 256
MAX_WAITING = 4
MAX_ANSWERS = 64
JOIN_S = 10.0


@dataclass(frozen=True)
class Question:
    """What a user asks for."""

    job: int
    """Whose measured costs are used."""
    strategy: str
    devices: int
    per_host: int
    """Devices on one host, which share memory."""
    link: str
    """Between hosts, like ``1Gbps,0.5ms``."""


@dataclass(frozen=True)
class Answer:
    """What the simulator predicts; or why it does not."""

    step_seconds: float = 0.0
    speedup: float = 0.0
    """Relative to one device."""
    bytes_a_step: float = 0.0
    """Sent by all devices."""
    shares: tuple[tuple[float, float, float], ...] = ()
    """By rank: seconds of a step that it computes, communicates and waits."""
    problem: str = ""


Run = Callable[[dict[str, Any], str, Question], Answer]
"""From measured costs (``Started.costs``), the job's settings (JSON), and the question."""
Inputs = Callable[[int], tuple[dict[str, Any], str] | None]
"""Costs and settings of a job; None: they are not known."""


class Simulator:
    """Computes answers on a thread of its own, which starts with the first question."""

    def __init__(self, run: Run, inputs: Inputs) -> None:
        self._run, self._inputs = run, inputs
        self._answers: OrderedDict[Question, Answer] = OrderedDict()
        self._waiting: queue.Queue[Question | None] = queue.Queue(MAX_WAITING)
        self._lock = threading.Lock()
        self._asked: set[Question] = set()
        self._thread: threading.Thread | None = None

    def ask(self, question: Question) -> str:
        """Asks for an answer, if none is there or on its way; one that had a problem is asked for again.

        Does not wait. Returns why it is refused; empty: not.
        """
        if not 1 <= question.devices <= MAX_DEVICES or not 1 <= question.per_host <= MAX_DEVICES:
            return f"{question.devices} devices, {question.per_host} a host: both are in 1..{MAX_DEVICES}"
        with self._lock:
            known = self._answers.get(question)
            if (known is not None and not known.problem) or question in self._asked:
                return ""
            try:
                self._waiting.put_nowait(question)
            except queue.Full:
                return f"{MAX_WAITING} simulations wait already; try again later"
            self._asked.add(question)
            self._answers.pop(question, None)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hoop-dashboard-simulator", daemon=True)
                self._thread.start()
        return ""

    def answer(self, question: Question) -> Answer | None:
        """None: it is on its way."""
        with self._lock:
            return self._answers.get(question)

    def close(self) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(JOIN_S)

    def _work(self) -> None:
        while (question := self._waiting.get()) is not None:
            found = self._compute(question)
            with self._lock:
                self._asked.discard(question)
                self._answers[question] = found
                while len(self._answers) > MAX_ANSWERS:
                    self._answers.popitem(last=False)

    def _compute(self, question: Question) -> Answer:
        inputs = self._inputs(question.job)
        if inputs is None:
            return Answer(problem="the job has not reported its costs (it does before its first step)")
        try:
            return self._run(*inputs, question)
        except HoopError as error:
            return Answer(problem=str(error))
        except Exception as error:  # another process wrote the costs: they may be anything
            log.info("dashboard: simulation: %s", error)
            return Answer(problem=f"{type(error).__name__}: the costs that the job has reported cannot be used")
