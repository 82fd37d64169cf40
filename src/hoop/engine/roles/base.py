"""The role of a rank in a job: how it runs steps, and which state it has for checkpoints and replication.

RankRole              holds stages and runs the plan's list            data parallel, pipelines, hybrids
ShardedDataRole       data parallel, updates a slice of the weights    sharded_data.py
ResidentRole          data parallel with the state on a GPU            resident.py
StandbyRole           holds nothing, ready to replace a lost rank
RingRole              holds stages and follows a rule                  ring.py
AsynchronousRingRole  the same without a flush between steps           ring.py
ServerClientRole      holds a copy of the model; servers update it     parameter_server.py
ParameterServerRole   holds a slice of weights and optimizer state     parameter_server.py
CustomRole            the user's own losses and optimizers, or loop    custom.py

``setup.py`` selects the role of a rank. The trainer calls ``advance``; checkpoints and replication use the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from torch import Tensor, nn

from hoop.collectives.reduction import Array
from hoop.engine.executor import PlanExecutor
from hoop.engine.fault_tolerance.checkpoint_format import restore, tensors_of
from hoop.engine.fault_tolerance.state_slices import FlatState, LiveSlice
from hoop.engine.job import names_of
from hoop.engine.stage.provenance import Provenance
from hoop.engine.step_schedule import StepWork


class RankRole:
    """A rank that holds stages and runs the plan's list of instructions once per step."""

    stride = 1
    """Number of steps between two synchronisation points. Only there are all ranks at the same step, and may agree to
    stop."""

    evaluates = True
    """True if the trainer evaluates the model after epochs."""

    reads_checkpoints_later = False
    """True if ``checkpoint_reader`` keeps the state of a checkpoint, which is read while training goes on."""

    state_is_whole = True
    """After ``sync_for_recovery``: False if another rank may have changed memory that this rank's last update was made
    from, because this rank was stopped meanwhile and the others went on without it."""

    provenance: Provenance
    """Records which device put which samples into a step. ``attach_provenance`` sets it, before the first step."""

    def __init__(self, executor: PlanExecutor) -> None:
        self.executor = executor
        self.notes: list[str] = []
        """Texts for the user, which the trainer takes and emits as events ``warning``."""
        for stage_state in executor.stage_states.values():
            stage_state.device_id = executor.context.device or executor.rank + 1

    def attach_provenance(self, provenance: Provenance) -> None:
        """Record the provenance of updates there, if this rank has the last stage, and so knows the losses."""
        self.provenance = provenance
        for stage, stage_state in self.executor.stage_states.items():
            stage_state.provenance = provenance if stage == self.executor.last_stage else None

    @property
    def is_reporter(self) -> bool:
        """True if this rank emits the metrics of steps; one rank does, which knows the loss."""
        return self.executor.plan.holders[-1][0] == self.executor.rank

    @property
    def num_checkpoint_parts(self) -> int:
        """Number of ranks that contribute a part of a checkpoint."""
        return len({ranks[0] for ranks in self.executor.plan.holders})

    @property
    def sees_stop_vote(self) -> bool:
        """True if this rank learns from the tail of the summed gradient whether any rank has asked to stop."""
        return self.executor.plan.stages == 1

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        """Run these steps; returns their mean losses, or an empty list if this rank does not know them.

        ``stop``: this rank asks all ranks to stop.
        """
        executor = self.executor
        losses = []
        for work in works:
            executor.rate = work.rate
            executor.step(work.position, work.samples, stop)
            last = executor.stage_states.get(executor.last_stage)
            if last is not None:
                losses.append(last.mean_loss(last.tail))
        return losses

    def sync_for_recovery(self, done: int) -> list[float]:
        """Called before a recovery: bring the state in the arena up to the last finished step.

        ``done``: the steps that the trainer has counted. Returns the mean losses of the steps finished since.
        """
        if self.executor.steps_updated <= done:
            return []
        stage = self.executor.stage_states[0]  # the failure came after the update and before the step was counted
        return [stage.mean_loss(stage.tail)]

    def on_state_change(self) -> None:
        """Called after a recovery, which may have changed the state in the arena."""

    def close(self) -> None:
        """The job is over."""

    def refresh(self) -> None:
        """Update copies of weights that other ranks own. Collective; called before evaluations and checkpoints."""

    def checkpoint_tensors(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Return this rank's part of a checkpoint, or None. Collective; called after ``refresh``."""
        executor = self.executor
        holders = enumerate(executor.plan.holders)
        mine = [executor.stage_states[stage] for stage, ranks in holders if ranks[0] == executor.rank]
        for one in mine:
            one.download()
        return tensors_of(mine, names_of(model)) if mine else None

    def checkpoint_reader(self, model: nn.Module) -> Callable[[], dict[str, Tensor]] | None:
        """Return a function that returns this rank's part of a checkpoint of the current state, or None.

        Only if ``reads_checkpoints_later``: another thread calls it, after later steps have begun.
        """
        raise NotImplementedError

    def restore(self, model: nn.Module, tensors: Mapping[str, Tensor], done: int) -> None:
        """Load the state of a checkpoint that was made after ``done`` steps."""
        stage_states = list(self.executor.stage_states.values())
        restore(stage_states, model, tensors)
        for one in stage_states:
            one.on_arena_change()

    # ---- for fault tolerance (replication.py, recovery.py, local_persistence.py)

    def live_slices(self, model: nn.Module) -> list[LiveSlice]:
        """Return this rank's part of the training state, which only it and its replicas have: tensors, or slices.

        They are in host memory, and up to date.
        """
        executor = self.executor
        self._download()
        names = names_of(model)
        found = tensors_of(executor.stage_states.values(), names)
        for stage, stage_state in executor.stage_states.items():
            # Without shards, this rank's counters do not advance.
            if not executor.plan.computed_by(executor.rank, stage):
                for one in stage_state.layout.counters:
                    del found[names[id(one)]]
        return [LiveSlice(name, 0, one.contiguous().view(-1)) for name, one in found.items()]

    def flat_states(self) -> list[FlatState]:
        """Return the vectors in the arena that this rank's updates work on, or a copy of them, stage by stage."""
        stage_states = self.executor.stage_states.values()
        return [FlatState(one.state_array, one.layout.trained, one.moments) for one in stage_states]

    def totals(self) -> list[Array]:
        """Return the step's summed gradient for each of ``flat_states``, with the summed changes of the buffers."""
        return [one.host_total() for one in self.executor.stage_states.values()]

    def _download(self) -> None:
        for one in self.executor.stage_states.values():
            one.download()

    @cached_property
    def counted_stages(self) -> frozenset[int]:
        """Stages whose counters this rank replicates: those that it computes when it begins.

        Shards that move to other ranks later change nothing: the layout of a replica is fixed.
        """
        plan, rank = self.executor.plan, self.executor.rank
        return frozenset(stage for stage in self.executor.stage_states if plan.computed_by(rank, stage))

    def counters(self) -> list[tuple[Tensor, Tensor]]:
        """Return the counters of this rank, each with its value after the current step."""
        found = []
        for stage, stage_state in self.executor.stage_states.items():
            if stage_state.layout.counters and stage in self.counted_stages:
                later = {id(one): one + added for one, added in stage_state.counter_increments()}
                found += [(one, later.get(id(one), one)) for one in stage_state.layout.counters]
        return found

    def restore_targets(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that ``restore`` loads, with their current values."""
        self._download()
        return tensors_of(self.executor.stage_states.values(), names_of(model))

    def deadline(self) -> float:
        return time.monotonic() + self.executor.settings.timeout_s


class StandbyRole(RankRole):
    """A rank that the strategy does not use. It keeps in step and may hold a replica, ready to replace a lost rank."""

    def __init__(self, executor: PlanExecutor, stride: int) -> None:
        super().__init__(executor)
        self.stride = stride

    @property
    def sees_stop_vote(self) -> bool:
        return False

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        self.executor.channel.endpoint.flush(self.deadline())  # raises if the generation has ended
        return []
