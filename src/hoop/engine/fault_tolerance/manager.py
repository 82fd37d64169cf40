"""Keeps the state of a partitioned model alive: replicates it, commits steps, and reshards after a membership change.

The trainer of a rank that holds a part of the model calls, in this order:

    start, set_live              once: the state that the run begins with
    ensure_replicated            before steps: the state has a replica at another rank
    begin_steps
    commit                       after steps: replicas get the steps' gradients, all ranks synchronize, updates apply
    ── a rank is lost ──
    reshard                      the model is partitioned for the ranks there are now, and the state moves
    ensure_replicated, synchronize, confirm
                                 every rank has its new shard, replicated; the saved copies can go

``reshard`` keeps every consistent version of the state until the next ``confirm`` or ``commit``. A second loss during
recovery therefore finds the same versions as the first. A version stays in the arena, where it is, if the new partition
has room beside it, in one piece; so the vectors of the new partition are never scattered over the gaps between older
ones. Otherwise it is copied to private memory, which takes longer: the kernel has to find and clear the pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from hoop.collectives.communicator import any_rank
from hoop.collectives.rank_context import RankContext
from hoop.data.dataset import Splits
from hoop.engine.fault_tolerance.local_persistence import StepLog
from hoop.engine.fault_tolerance.recovery import agree_on_recovery, collect
from hoop.engine.fault_tolerance.replication import DoubleBufferedState, Replicator, replicates_gradients
from hoop.engine.fault_tolerance.state_slices import StateShard, shard_of_tensors, whole_state
from hoop.engine.job import Job, blocks_of
from hoop.engine.partitioning import KeptVersions
from hoop.engine.profiler import now
from hoop.engine.settings import Settings
from hoop.engine.setup import EarlierSetup, TrainingSetup, prepare
from hoop.engine.stage.provenance import Provenance
from hoop.engine.stage.state import StateVectors, release_tensors
from hoop.errors import InternalError
from hoop.membership.recovery import NO_STATE, RankStatus, RecoveryPlan
from hoop.memory.commit_record import NO_STEP


class ShardedStateManager:
    """One rank's shard of the training state, its replicas and copies, and its way to another shard."""

    def __init__(
        self,
        settings: Settings,
        job: Job,
        data: Splits,
        vectors: StateVectors,
        provenance: Provenance,
        arena_shards: Sequence[StateShard] = (),
    ) -> None:
        """``arena_shards``: state that a restarted device found in its arena."""
        self._settings, self._job, self._data, self._provenance = settings, job, data, provenance
        self._setup: TrainingSetup | None = None
        self._vectors = [vectors]
        """The vectors of each partitioning so far; the last ones are in use."""
        self._log_vectors = vectors.child("beside.")
        self._step_log: StepLog | None = None
        self._replicator: Replicator | None = None
        self._own_copies: DoubleBufferedState | None = None
        self._live_step = NO_STEP
        """Step of the live state."""
        self._pending_step = NO_STEP
        """Step that the live state will have after the pending commit; ``NO_STEP``: no commit is pending."""
        self._saved = list(arena_shards)
        """Consistent versions of state that this rank can offer, in private memory."""
        self._in_arena: list[StateShard] = []
        """Further versions that it can offer, in vectors of earlier partitionings."""
        self._fresh_start, self._joining, self._left_out, self._reshard_count = False, True, False, 0
        self._written_by_peers: set[int] = set()
        """Numbers of the partitionings in which other ranks write this rank's total, because a stage has several
        holders."""
        self.initial_model: nn.Module | None = None
        """Model that a device built before it joined the job, for its first partitioning."""
        self._first_size = 0
        """Number of ranks with which the run began; 0 if this rank joined later."""

    @property
    def reshard_count(self) -> int:
        """How often the model was resharded; the same at every rank."""
        return self._reshard_count

    # ---- steps

    def start(self, tensors: Mapping[str, Tensor], step: int, size: int) -> None:
        """Called at the start of a run: with a checkpoint's tensors and step, or with none for the initial model.

        ``size``: number of ranks that the run begins with.
        """
        self._fresh_start, self._joining, self._first_size = not tensors, False, size
        if tensors:
            self._saved = [shard_of_tensors(tensors, step)]

    def set_live(self, setup: TrainingSetup, step: int) -> None:
        """The live state is that of ``setup``, after ``step`` steps. The rest of the model needs no memory here."""
        self._setup, self._live_step = setup, step
        plan, rank, blocks = setup.plan, setup.executor.rank, blocks_of(setup.model)
        if plan.servers or (any(len(ranks) > 1 for ranks in plan.holders) and not plan.sharded_update):
            self._written_by_peers.add(len(self._vectors) - 1)
        if plan.stages > 1 and not plan.servers and setup.executor.accelerator is None:
            ends = [*setup.bounds[1:], len(blocks)]
            held = {one for stage in plan.held_by(rank) for one in range(setup.bounds[stage], ends[stage])}
            release_tensors(block for index, block in enumerate(blocks) if index not in held)

    def ensure_replicated(self, context: RankContext) -> None:
        """Collective. Make sure my state is replicated before training goes on.

        Does nothing if the user switched replication off, or if the run is not elastic and could not use them.
        """
        if not self._settings.replicate or context.wait_reassignment is None:
            return
        setup = self._setup
        assert setup is not None, "there is a live state"
        if self._replicator is None:
            self._replicator = Replicator(context, self._vectors[-1], setup.role, setup.model, self._settings)
            self._replicator.replicate(self._live_step, 0.0)
            setup.executor.deferred_updates.enabled = replicates_gradients(setup.role)
            if context.persistent_memory:
                self._own_copies = DoubleBufferedState(self._vectors[-1], setup.role, setup.model)
                self._own_copies.save(self._live_step)

    def begin_steps(self) -> None:
        """Called before steps. If updates do not wait for the commit, the live state is invalid until then."""
        if self._replicator is not None and self._setup is not None and not replicates_gradients(self._setup.role):
            self._replicator.save_own_state(self._live_step)
            self._live_step = NO_STEP

    def commit(
        self, context: RankContext, stop: bool, done: int, steps: int, losses: Sequence[float] | None
    ) -> tuple[bool, list[float]]:
        """Collective. Replicate the last ``steps`` steps up to ``done``, synchronize, then apply deferred updates.

        Arguments and result: see ``synchronize``. If it raises, either no rank has updated, or every rank can.
        """
        setup = self._setup
        assert setup is not None, "there were steps"
        began = now()
        # The steps have read other ranks' memory (gradients, weights): no version counts that is made of a mixture.
        context.communicator.endpoint.verify_reads()
        if replicates_gradients(setup.role):
            self._pending_step = done
        else:
            self._live_step = done
        if self._replicator is not None:
            self._replicator.replicate(done, setup.executor.rate)
        agreed = self.synchronize(context, stop, done, steps, losses)
        setup.executor.profiler.record_other("commit", began)
        setup.executor.deferred_updates.apply_all()
        self._live_step, self._pending_step = done, NO_STEP
        if context.persistent_memory and agreed[1]:
            self._step_log = self._step_log or StepLog(self._log_vectors, self._provenance)
            self._step_log.append(done, agreed[1])
        if self._own_copies is not None:
            self._own_copies.save(done)
        if self._replicator is not None:
            setup.executor.channel.idle_work = self._replicator.apply_updates
        self.release()
        setup.executor.profiler.record_overhead()
        return agreed

    def synchronize(
        self, context: RankContext, stop: bool, done: int, steps: int = 0, losses: Sequence[float] | None = None
    ) -> tuple[bool, list[float]]:
        """Collective. Returns whether any rank wants to ``stop``, and the losses of the last ``steps`` steps.

        ``losses``: given by the one rank that knows them, None elsewhere; that rank also gives the steps' provenance.
        """
        provenance = self._provenance
        rows = np.zeros((steps, 1 + provenance.width))
        if losses is not None:
            rows[: len(losses), 0], rows[:, 1:] = losses, provenance.rows(done - steps, steps)
        stops = any_rank(context.communicator, stop, rows, self._settings.timeout_s)
        provenance.set_rows(done - steps, rows[:, 1:])
        return stops, rows[:, 0].tolist()

    # ---- a membership change

    def reshard(
        self, context: RankContext, done: int, epoch_end: int, stopped: bool
    ) -> tuple[TrainingSetup, RecoveryPlan]:
        """Collective. Partition the model for the ranks of ``context``; get my shard of the newest complete state.

        ``done``, ``epoch_end``, ``stopped``: for ``RankStatus``. Raises ``StateLost`` if no step is complete. After any
        error it can be called again, for the next generation.
        """
        self._left_out = self._left_out or context.left_out  # until ``confirm``, whatever fails below
        self._keep_versions()
        steps = [one.step for one in self._versions]
        self._vectors.append(self._vectors[0].child(f"cut{len(self._vectors)}."))
        reused = self._model_without_weights(steps)
        model, self.initial_model = reused or self.initial_model, None
        costs = self._setup.blocks if self._setup is not None else None
        places = self._kept_places()
        movable = sum(vectors.bytes_with(places) for vectors in self._vectors)
        earlier = EarlierSetup(model, costs, KeptVersions(movable, self._make_room))
        setup = prepare(context, self._settings, self._job, self._data, self._vectors[-1], earlier)
        try:
            plan = self._load_shard(context, setup, done, epoch_end, stopped)
            if not plan.sources and reused is not None:
                raise InternalError(f"the run begins again, and device {context.device} has state of the steps {steps}")
        except BaseException:
            setup.executor.close()
            raise
        if self._setup is not None:
            setup.executor.profiler.prepend(self._setup.executor.profiler)
            setup.executor.extra_bytes_sent = self._setup.executor.bytes_sent
        self.set_live(setup, plan.step)
        return setup, plan

    def _load_shard(
        self, context: RankContext, setup: TrainingSetup, done: int, epoch_end: int, stopped: bool
    ) -> RecoveryPlan:
        """Collective. Agree on the newest complete state, and load the part of it that ``setup`` holds."""
        settings, timeout = self._settings, self._settings.timeout_s
        offers = [(one.step, one.slices) for one in self._versions]
        if self._joining:
            # Later than any count so far, should no survivor know it: there was at most one per generation.
            self._reshard_count = context.communicator.endpoint.generation
        if self._joining:  # arenas and checkpoints contain only steps that all ranks have done
            done = max((one.step for one in self._versions), default=NO_STATE)
        status = RankStatus(
            context.device,
            done,
            epoch_end,
            survived=not self._joining and not self._left_out,
            offers=offers,
            stopped=stopped,
            reshard_count=self._reshard_count,
            fresh_start=self._fresh_start,
            first_size=self._first_size,
        )
        whole = whole_state(setup.model, settings.optimizer.num_moments)
        plan = agree_on_recovery(context.communicator, status, whole, timeout)
        if plan.sources:
            targets = setup.role.restore_targets(setup.model)
            found, source = collect(context, plan, self._versions, targets, timeout)
            setup.role.restore(setup.model, found, plan.step)
            plan = replace(plan, source="" if status.survived else source)
        return plan

    def _model_without_weights(self, steps: Sequence[int]) -> nn.Module | None:
        """The model of the last partitioning, for the next one; None if it must be built again.

        ``steps``: of the saved versions. With versions from after the first step only, no rank can go back to the
        initial model, and every weight is loaded again: drawing millions of random numbers would only take time.
        """
        last = self._setup
        if last is None or min(steps, default=0) < 2 or last.plan.servers or last.executor.accelerator is not None:
            return None  # servers restore a whole model, of which they hold slices; a GPU measures the blocks again
        release_tensors(blocks_of(last.model))
        return last.model

    @property
    def _versions(self) -> list[StateShard]:
        """All versions of state that this rank can offer."""
        return [*self._saved, *self._in_arena]

    def _keep_versions(self) -> None:
        """Keep every consistent version of the state, and free the rest of the arena.

        That is the committed one, and the pending one, which a lost rank may have committed. Where there is a pending
        one, its update overwrites the committed one, of which a copy is made.
        """
        setup, step = self._setup, self._live_step
        if setup is not None and self._pending_step != NO_STEP:
            assert step != NO_STEP, "an update is pending that can be made"
            self._saved.append(StateShard.copy_of(setup.role.live_slices(setup.model), step))
            setup.executor.deferred_updates.apply_all()
            step = self._pending_step
        if setup is not None and step != NO_STEP:
            live = setup.role.live_slices(setup.model)
            shard, elsewhere = StateShard.in_place(live, step, self._vectors[0].memory)
            self._in_arena.append(shard)
            self._saved += [elsewhere] if elsewhere.slices else []
        self._live_step = self._pending_step = NO_STEP
        if self._replicator is not None:
            memory = self._vectors[0].memory
            for one in self._replicator.versions():
                (self._in_arena if np.may_share_memory(one.data, memory) else self._saved).append(one)
            self._replicator = self._own_copies = None
        if setup is not None:
            setup.executor.channel.idle_work = None  # it would update a replica that is kept
            setup.executor.close()
        self._free(self._vectors)

    def _kept_places(self) -> list[int]:
        """Where the versions in the arena are."""
        return [place for one in self._in_arena for place in one.places]

    def _free(self, partitionings: Sequence[StateVectors]) -> None:
        """Free the vectors of these partitionings, from the first on, in which no version is kept."""
        places = self._kept_places()
        for index, vectors in enumerate(partitionings):
            # A rank that was presumed dead may still write to the old total buffers.
            vectors.free("total" if index in self._written_by_peers else "", places)

    def _make_room(self, needed: int) -> None:
        """Move versions out of the arena, replicas first, until ``needed`` bytes are free in one piece."""
        while self._in_arena and self._vectors[0].largest_free < needed:
            self._saved.append(self._in_arena.pop().clone())
            self._free(self._vectors[:-1])

    def confirm(self, plan: RecoveryPlan) -> None:
        """Called when every rank has its new shard, replicated: this rank is a survivor in the next recovery."""
        self._joining, self._left_out, self._reshard_count = False, False, plan.reshard_count
        self.release()

    def release(self) -> None:
        """Drop the kept versions."""
        self._saved = []
        if self._in_arena:
            self._in_arena = []
            self._free(self._vectors[:-1])

    def close(self) -> None:
        for vectors in [*self._vectors, self._log_vectors]:
            vectors.free()
