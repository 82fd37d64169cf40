"""The way through the data: which steps there are, what each of them is made of, and where an epoch ends."""

from __future__ import annotations

from hoop.data.order import Order
from hoop.engine.feed import Position
from hoop.engine.role import Work
from hoop.engine.settings import Settings
from hoop.plan.faults import check_reachable
from hoop.strategies.catalog import parse


def check_faults(settings: Settings, devices: int, samples: int, linked: bool = True) -> None:
    """Raises if a placed fault can never happen in a job that begins with this many devices and samples."""
    if faults := settings.placed:
        plan = parse(settings.strategy).plan(devices, settings.micros)
        check_reachable(faults, plan, Course(settings, samples).limit, linked)


class Course:
    """All steps of a run."""

    def __init__(self, settings: Settings, samples: int) -> None:
        self._settings = settings
        self._order = Order(settings.seed, samples)
        self.samples = samples
        self.per_epoch = self._order.steps(settings.batch_size)
        self._steps = settings.epochs * self.per_epoch
        self.limit = min(self._steps, settings.max_steps or self._steps)

    @property
    def told(self) -> dict[str, int]:
        """For whoever follows the run."""
        return {"steps": self.limit, "steps_an_epoch": self.per_epoch, "samples": self.samples}

    def rate(self, done: int) -> float:
        """The learning rate of the step after so many."""
        return self._settings.optimizer.rate(done, self._steps)

    def next(self, done: int, stride: int) -> list[Work]:
        """The steps until ranks meet again: never across an epoch, and at the same places whenever it is resumed."""
        epoch, step = divmod(done, self.per_epoch)
        end = min((step // stride + 1) * stride, self.per_epoch, step + self.limit - done)
        found = []
        for one in range(step, end):
            number = done + one - step
            samples = self._order.indices(epoch, one, self._settings.batch_size)
            found.append(Work(Position(epoch, one, number), samples, self.rate(number)))
        return found

    def ends(self, done: int) -> bool:
        """Whether an epoch is over, or all of it."""
        return done % self.per_epoch == 0 or done == self.limit

    def ended(self, done: int) -> int:
        """The end of an epoch that was certainly dealt with, where it is known only that so many steps are done."""
        return max(0, (done - 1) // self.per_epoch * self.per_epoch)

    def epoch(self, done: int) -> int:
        """Which one ends here, counted from 1."""
        return -(-done // self.per_epoch)
