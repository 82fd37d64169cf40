"""Passes each step and each evaluation of a job once: when the reporting rank changes, the next one repeats rows.

Used by ``Conducting`` on every event before it is recorded or shown. A step that no rank reported, and one that two
ranks reported with different values, become warnings: neither happens as long as the engine keeps its promises
(``engine/progress_reporter.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

REMEMBERED = 8192
"""Steps whose values are remembered, to be compared: more than a rank repeats."""


class Deduplicator:
    """What was seen of one job."""

    def __init__(self, synchronous: bool) -> None:
        """``synchronous``: a step that is run again has the same loss, so that it can be compared."""
        self.step = 0
        """The last step that was passed."""
        self._synchronous = synchronous
        self._begun: int | None = None
        """The step after which the run began, once it is known."""
        self._evaluated = -1
        self._values: OrderedDict[int, tuple[float, str]] = OrderedDict()
        self._warnings: list[str] = []

    def passes(self, kind: str, told: dict[str, Any]) -> bool:
        """Whether anything of this event is new; rows that are not are taken out of it."""
        match kind:
            case "started" if self._begun is None:  # later ones are of ranks that begin in the middle
                self._begun = int(told["done"])
            case "evaluated":
                steps, before = int(told["steps"]), self._evaluated
                self._evaluated = max(before, steps)
                return steps > before
            case "steps":
                return self._steps(told)
        return True

    def warnings(self) -> list[str]:
        """What went wrong since the last call."""
        found, self._warnings = self._warnings, []
        return found

    def _steps(self, told: dict[str, Any]) -> bool:
        first, count = int(told["first"]), len(told["loss"])
        if self._begun is not None and first > (before := max(self.step, self._begun)):
            self._warnings.append(
                f"no device reported the steps {before + 1} to {first}: they are missing in metrics and ledger"
            )
        self._compare(told)
        repeated = min(count, max(0, self.step - first))
        for name in ("loss", "seconds", "fed"):
            told[name] = told[name][repeated:]
        told["first"] += repeated
        self.step = max(self.step, first + count)
        return repeated < count

    def _compare(self, told: Mapping[str, Any]) -> None:
        """Remembers the rows; one that is known already must be the same but for the devices that computed it."""
        if not self._synchronous:
            return
        for step, (loss, fed) in enumerate(zip(told["loss"], told["fed"], strict=True), told["first"] + 1):
            value = (loss, fed[1] if fed else "")
            known = self._values.setdefault(step, value)
            if known != value and loss == loss:  # a loss that is not a number is reported elsewhere
                self._warnings.append(
                    f"step {step} was reported twice, with the losses {known[0]!r} and {loss!r}, and prints of samples "
                    f"{known[1]!r} and {value[1]!r}: please report this as a bug of Hoop"
                )
        while len(self._values) > REMEMBERED:
            self._values.popitem(last=False)
