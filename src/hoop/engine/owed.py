"""Updates that are put off until all ranks have met: then everybody has what it takes to make them, or nobody did."""

from __future__ import annotations

from collections.abc import Callable

from hoop.engine.clockwork import Clockwork, now
from hoop.plan.instructions import Instruction


class Owed:
    """One rank's."""

    def __init__(self, clock: Clockwork) -> None:
        self._clock = clock
        self.puts_off = False
        """Whether anything is put off at all."""
        self._due: list[tuple[Callable[[], None], Instruction | None]] = []

    def __call__(self, update: Callable[[], None], instruction: Instruction | None = None) -> None:
        """An update, now or later; where it is all of an ``instruction``, that shows when it is done."""
        if self.puts_off:
            self._due.append((update, instruction))
        else:
            update()

    def settle(self) -> None:
        """All that is due, in its order."""
        due, self._due = self._due, []
        for update, instruction in due:
            started = now()
            update()
            if instruction is not None:
                self._clock.later(instruction, started, now())
