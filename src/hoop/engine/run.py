"""A job on one rank, from the first step to the last.

    (1) prepare   the model, the data, the cut; all ranks compare what they hold
    (2) steps     each epoch's samples in their order; shards move to faster devices
    (3) epochs    evaluation, a snapshot in the arena that a client may read
    (4) the end   what it took

What is worth telling goes to ``emit``, as plain values; nothing here knows who listens.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from hoop.collectives.catalog import Operation
from hoop.data.order import Order
from hoop.engine.balance import Balance
from hoop.engine.evaluation import evaluate
from hoop.engine.feed import Position
from hoop.engine.figures import Emit, Figures
from hoop.engine.job import Job
from hoop.engine.preparation import prepare
from hoop.engine.recovery import NEW, catch_up, compare, hand_over, rest_of_step
from hoop.engine.role import Work
from hoop.engine.settings import Settings
from hoop.engine.snapshot import packed, put, unpacked
from hoop.engine.weights import LOSS, SAMPLES, STOP, Vectors
from hoop.engine.world import World, settle
from hoop.errors import DeadlineExceeded, FailedPrecondition, HoopError, PeerError
from hoop.memory.dtypes import dtype

PATIENCE_S = 60.0
"""How long a rank waits for a seat among those who are left."""


class Run:
    """One rank's part in a job."""

    def __init__(
        self,
        world: World,
        settings: Settings,
        job: Job,
        emit: Emit,
        stopping: Callable[[], bool],
        resume: bytes | None = None,
        prefix: str = "",
    ) -> None:
        self._world, self._settings, self._emit, self._stopping = world, settings, emit, stopping
        self._prefix = prefix
        self._started = time.perf_counter()
        settle(world, settings.threads_per_device, settings.pin)
        self._vectors = Vectors(world.arena, prefix)
        self._data = job.data()
        self._ready = prepare(world, settings, job, self._data, self._vectors)
        self.worker = self._ready.worker
        self._role = self._ready.role
        self._order = Order(settings.seed, len(self._data.train))
        self._per_epoch = self._order.steps(settings.batch_size)
        self._steps = settings.epochs * self._per_epoch
        self._limit = min(self._steps, settings.max_steps or self._steps)
        self._done = 0
        self._snapshots = 0
        self._balance = Balance(self._ready.strategy, self._ready.plan, world.size)
        self._figures = Figures(emit)
        if resume is not None:
            tensors, metadata = unpacked(resume)
            self._done = int(metadata["steps"])
            self._role.restore(self._ready.model, tensors, self._done)
        self._ended = self._done

    @property
    def reporter(self) -> bool:
        """Whether this rank tells the figures."""
        return self._role.reports

    def go(self) -> None:
        """Trains until the epochs are over or somebody asks to stop."""
        settings, worker = self._settings, self.worker
        if self.reporter:
            self._emit(
                {
                    "kind": "started",
                    "steps": self._limit,
                    "done": self._done,
                    "steps_an_epoch": self._per_epoch,
                    "samples": self._order.length,
                    "parameters": self._ready.parameters,
                    "stages": self._ready.describe(),
                    "costs": self._ready.priced,
                    "seconds": time.perf_counter() - self._started,
                }
            )
        began, self._begun_at = time.perf_counter(), self._done
        stopped = False
        while True:
            try:
                if self._owes():
                    self._end_of_epoch()
                if self._done >= self._limit or stopped:
                    break
                worker.clock.tracing = self._done - self._begun_at < settings.trace_steps
                begun = time.perf_counter()
                works = self._next()
                losses = self._role.advance(works, self._stopping())
                worker.rate = works[-1].rate
                self._done += len(works)
                stopped = self._after(losses, time.perf_counter() - begun)
                if stopped:
                    break
            except PeerError as error:
                self._recover(error)
        self._tell(force=True)
        self._role.refresh()
        self._snapshot(final=True)
        self._account(time.perf_counter() - began, stopped)

    def _owes(self) -> bool:
        """Whether the end of an epoch has come, and not been dealt with."""
        ends = self._done % self._per_epoch == 0 or self._done == self._limit
        return ends and self._done > self._ended

    def join(self) -> None:
        """Goes in where others are at work already: says that it is ready, and takes the first seat there is."""
        self._done = NEW
        self._emit({"kind": "ready", "seconds": time.perf_counter() - self._started})
        self._recover(FailedPrecondition("no seat came for a device that was ready"))
        self.go()

    def _recover(self, error: HoopError) -> None:
        """Goes on among those who are left, once there are seats for them; raises the error if there never are."""
        began, world = time.perf_counter(), self._world
        while True:
            if world.reseated is None or not self._role.elastic:
                raise error
            try:
                world = world.reseated(PATIENCE_S)
            except DeadlineExceeded:
                raise error from None
            try:
                self._go_on(world)
                break
            except PeerError as another:
                error = another
        if self.reporter:
            pause = time.perf_counter() - began
            self._emit(
                {
                    "kind": "recovered",
                    "step": self._done,
                    "pause_s": pause,
                    "ranks": world.size,
                    "text": str(error),
                }
            )

    def _count_late(self) -> None:
        """A step that was finished by the way."""
        tail = self.worker.held[0].tail
        self._figures.add([float(tail[LOSS]) / float(tail[SAMPLES])], 0.0)
        self._done += 1

    def _go_on(self, world: World) -> None:
        """The same step, with the shards that were lost dealt out anew; see ``recovery``."""
        worker, settings, communicator = self.worker, self._settings, world.communicator
        held, timeout_s = worker.held[0], settings.timeout_s
        worker.move(world)
        self._world = world
        if worker.updated > self._done > NEW:  # the news came between an update and its being counted
            self._count_late()
        standing = compare(communicator, self._done, self._ended, worker.computed, settings.micros, timeout_s)
        rate = settings.optimizer.rate(standing.lead - 1, self._steps)
        catch_up(worker, communicator, standing, rate, timeout_s)
        hand_over(worker, communicator, standing, timeout_s)
        if NEW < self._done < standing.lead:
            self._count_late()
        self._done, worker.computed = standing.lead, list(standing.computed[world.rank])
        self._ended = standing.ended
        held.another_room()
        usual = self._ready.strategy.plan(world.size, settings.micros)
        worker.follow(usual)
        if self._owes():
            self._end_of_epoch()
        if any(standing.computed):
            plan, holdings, kept = rest_of_step(standing, settings.micros, len(held.slots))
            worker.follow(plan, holdings)
            (work,) = self._next()
            worker.rate = work.rate
            worker.step(work.position, work.samples, self._stopping(), kept[world.rank])
            self._count_late()
            worker.follow(usual)
        self._balance = Balance(self._ready.strategy, usual, world.size)

    def _next(self) -> list[Work]:
        """The steps until ranks meet again: never across an epoch, and at the same places whenever it is resumed."""
        epoch, step = divmod(self._done, self._per_epoch)
        stride = self._role.stride
        end = min((step // stride + 1) * stride, self._per_epoch, step + self._limit - self._done)
        found = []
        for one in range(step, end):
            done = self._done + one - step
            samples = self._order.indices(epoch, one, self._settings.batch_size)
            rate = self._settings.optimizer.rate(done, self._steps)
            found.append(Work(Position(epoch, one, done), samples, rate))
        return found

    def _after(self, losses: list[float], seconds: float) -> bool:
        """Figures of some steps; whether all ranks are to stop."""
        worker = self.worker
        last = worker.held.get(worker.last)
        stop = False
        if losses:
            self._figures.add(losses, seconds)
            self._tell()
        if self._role.hears and last is not None:
            stop = bool(last.tail[STOP] > 0)
        if not self._role.hears:
            flag = np.array([self._stopping()], np.float32)
            self._world.communicator.run(
                Operation("all_reduce", 1, dtype("float32")), flag, flag, self._settings.timeout_s
            )
            stop = bool(flag[0])
        elif self._settings.balance and last is not None and self._world.size > 1:
            plan = self._balance.after(last.tail)
            if plan is not None:
                worker.follow(plan)
                if self.reporter:
                    shares = [len(plan.computed_by(rank, 0)) for rank in range(plan.size)]
                    self._emit({"kind": "balanced", "step": self._done, "shards": shares})
        return stop

    def _tell(self, force: bool = False) -> None:
        self._figures.tell(self._done, self.worker.rate, self.reporter, force)

    def _end_of_epoch(self) -> None:
        settings, epoch = self._settings, -(-self._done // self._per_epoch)
        final = self._done == self._limit
        self._tell(force=True)
        self._role.refresh()
        if final or (settings.evaluate_every and epoch % settings.evaluate_every == 0):
            loss, accuracy = evaluate(self.worker, self._data.test)
            if self.reporter:
                self._emit(
                    {
                        "kind": "evaluated",
                        "epoch": epoch,
                        "steps": self._done,
                        "loss": loss,
                        "accuracy": accuracy,
                    }
                )
        if not final and settings.checkpoint_every and epoch % settings.checkpoint_every == 0:
            self._snapshot(final=False)
        self._ended = self._done

    def _snapshot(self, final: bool) -> None:
        """This rank's part of a checkpoint, if it has one, as a file's bytes in the arena."""
        tensors = self._role.tensors(self._ready.model)
        if tensors is None:
            return
        epoch, step = divmod(self._done, self._per_epoch)
        metadata = {"steps": self._done, "epoch": epoch, "step": step}
        # Two in turn: one may be read while the next is written.
        name = f"{self._prefix}snapshot{self._snapshots % 2}"
        self._snapshots += 1
        self._emit(
            {
                "kind": "snapshot",
                "steps": self._done,
                "final": final,
                **put(self._world.arena, name, packed(tensors, metadata)),
                "parts": self._role.parts,
            }
        )

    def _account(self, seconds: float, stopped: bool) -> None:
        worker = self.worker
        self._emit(
            {
                "kind": "account",
                "rank": self._world.rank,
                "seconds": seconds,
                "shares": worker.clock.seconds,
                "instructions": worker.clock.instructions,
                "bytes_sent": worker.bytes_sent,
                "memory": self._world.arena.used,
                "spans": worker.clock.spans,
                "done": self._done,
                "stopped": stopped,
            }
        )

    def close(self) -> None:
        """Gives the arena's memory back, but for the last snapshots, which a client may still read."""
        self._vectors.free()
