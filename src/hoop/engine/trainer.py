"""The training loop of one rank, from the first step to the last.

    (1) set up    model, data, partition; all ranks check that they train the same job
    (2) steps     each epoch's samples in order; shards move to faster devices
    (3) epochs    evaluation; a snapshot in the arena, which a client may read
    (4) the end   the final snapshot; an ``account`` event: seconds, bytes, memory

A failed peer or link in (2) to (4) leads to ``_recover``: the rank keeps its state, waits for a new rank assignment,
agrees with the other ranks on a step, and the loop continues there.

The trainer reports events (``hoop/job_events.py``) through ``emit`` and does not know the receiver.
``engine/entrypoint.py`` makes a ``Trainer`` on every device of a job and calls ``train``, or ``join`` if the job runs
already.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
from torch import Tensor, nn

from hoop import job_events as ev
from hoop.collectives.communicator import any_rank
from hoop.collectives.rank_context import RankContext, single_rank
from hoop.data.dataset import fingerprint
from hoop.data.structured import structured
from hoop.engine.custom.evaluation import evaluate_custom
from hoop.engine.custom.loss import CustomLoss
from hoop.engine.denormals import denormals_flushed
from hoop.engine.early_stopping import EarlyStopping
from hoop.engine.evaluation import evaluate
from hoop.engine.executor import PlanExecutor
from hoop.engine.fault_tolerance.checkpoint_format import deserialize
from hoop.engine.fault_tolerance.gpu_persistence import GpuInPlaceState
from hoop.engine.fault_tolerance.local_persistence import (
    CustomInPlaceState,
    InPlaceState,
)
from hoop.engine.fault_tolerance.manager import ShardedStateManager
from hoop.engine.fault_tolerance.recovery import (
    RECOVERABLE,
    UpdateIsSharded,
    announce_sharded_update,
    plan_rest_of_step,
    synchronize_replicas,
)
from hoop.engine.fault_tolerance.snapshots import SnapshotPublisher
from hoop.engine.gradient_slots import max_gradient_slots
from hoop.engine.job import Job, build_model
from hoop.engine.live_activity import LiveActivity
from hoop.engine.load_balancer import load_balancer_for
from hoop.engine.loss_reduction import with_criterion
from hoop.engine.numeric_probe import rank_environment
from hoop.engine.progress_reporter import Evaluation, ProgressReporter
from hoop.engine.rank_startup import RankStartup
from hoop.engine.roles.custom import CustomRole
from hoop.engine.settings import Settings
from hoop.engine.setup import EarlierSetup, TrainingSetup, prepare
from hoop.engine.stage.accelerator import DEVICE_ERRORS, may_use_gpu
from hoop.engine.stage.provenance import Provenance
from hoop.engine.stage.state import MOVE, STOP, StateVectors
from hoop.engine.step_schedule import StepSchedule
from hoop.engine.thread_pinning import pin_threads
from hoop.errors import DeadlineExceeded, FailedPrecondition, HoopError, InternalError, PeerError, PeerLost, UserError
from hoop.job_events import Emit
from hoop.membership.recovery import NO_STATE, WHOLE, RankStatus, StateLost
from hoop.membership.replication import check_replicas
from hoop.plan.faults import check_reachable
from hoop.strategies.catalog import parse
from hoop.strategies.data_parallel import DataParallel, for_hosts
from hoop.texts import counted

log = logging.getLogger("hoop.engine")
REASSIGNMENT_TIMEOUT_S = 600.0
"""Seconds that a rank keeps its state and waits for the coordinator to assign it another rank, or to end the job."""


def check_faults(settings: Settings, devices: int, samples: int, linked: bool = True) -> None:
    """Raises if an injected fault can never happen in a job that begins with this many devices and samples."""
    if faults := settings.parsed_faults:
        plan = parse(settings.strategy).plan(devices, settings.num_microbatches)
        check_reachable(faults, plan, StepSchedule(settings, samples).total_steps, linked)


class Trainer:
    """One rank's part in a job.

    Data parallel ranks have the whole state (``_in_place``) and survive a loss by finishing the same step. Ranks of
    other strategies, and of a sharded update, have a shard of it, which ``_sharded`` replicates and moves; it is None
    in other data parallel training.
    """

    def __init__(
        self,
        context: RankContext,
        settings: Settings,
        job: Job,
        emit: Emit,
        should_stop: Callable[[], bool],
        resume: bytes | None = None,
        prefix: str = "",
    ) -> None:
        """Collective, unless ``context.joining``: all ranks of the job set up together.

        ``should_stop``: the user wants the run to stop. ``resume``: a checkpoint's bytes. ``prefix``: of the names of
        this job's buffers in the arena. If ``context.joining``, call ``join`` instead of ``train``.
        """
        joining = context.joining
        if settings.sharded_update == "on":
            settings = settings.check().with_sharded_update()
        self._context, self._settings, self._emit, self._should_stop = context, settings, emit, should_stop
        self._created_at = time.perf_counter()
        pin_threads(context, settings.threads_per_device, settings.pin and not may_use_gpu(settings))
        self._data = job.data()
        model = build_model(job, settings.seed)
        job = with_criterion(job, self._data.train, settings.seed, model)
        self._schedule = StepSchedule(settings, len(self._data.train))
        if not joining:
            check_faults(settings, context.size, len(self._data.train), context.linked)
            check_replicas(settings.replicas, context.size)
        self._done = 0
        """Number of steps done."""
        self._epoch_end = 0
        """Number of steps done at the newest epoch end that has been processed."""
        self._first_step = 0
        """Number of steps done when this rank began."""
        self._stopped = self._reassignment_agreed = self._reassigning = False
        self._missing_shards: list[int] = []
        self._startup = RankStartup(joining, emit, context, prefix)
        self._snapshots = SnapshotPublisher(context.arena, prefix, emit, context.run, joining)
        self._provenance = Provenance(settings.num_microbatches)
        metric_names = job.loss.metric_names if isinstance(job.loss, CustomLoss) else ()
        self._progress = ProgressReporter(emit, self._provenance, self._data.evaluated_split, metric_names)
        self._early_stopping = EarlyStopping(settings)
        self._vectors = StateVectors(context.arena, prefix, context.run)
        self._first_tensors: dict[str, Tensor] = {}
        """State that the run begins with, if this rank could not set up with the first ranks."""
        self._first_size = 0
        """Number of ranks that the run begins with, if this rank could not set up with them; else 0."""
        self._job = job
        self._sharded: ShardedStateManager | None = None
        if not parse(settings.strategy).replicated:
            self._sharded = self._new_sharded_state()
        self._activity = LiveActivity(settings.hang_s)
        context.publish_activity(self._activity)
        self._opened: PlanExecutor | None = None
        """The same as ``executor``; None before there is one: a device that joins may get it in its first recovery."""
        self._setup_error: PeerError | None = None
        if joining and self._sharded is not None:
            self._sharded.initial_model = model  # the first recovery decides which part of it this rank holds
            return
        self._set_up(job, model, resume, joining)

    @property
    def ranks(self) -> int:
        """Ranks of the current generation."""
        return self._context.size

    def _set_up(self, job: Job, model: nn.Module, resume: bytes | None, joining: bool) -> None:
        """(1): builds this rank's part of the model, and loads the checkpoint or the arena's state."""
        context, settings = self._context, self._settings
        tensors, metadata = deserialize(resume) if resume is not None else ({}, {"steps": 0})
        self._done = self._epoch_end = self._first_step = int(metadata["steps"])
        if metadata.get("evaluation"):
            self._progress.resume(Evaluation.from_row(metadata["evaluation"]))
            self._check_early_stop()
        if self._sharded is not None:
            self._sharded.start(tensors, self._done, context.size)
        try:
            setup = prepare(context, settings, job, self._data, self._vectors, EarlierSetup(model))
        except PeerError as error:
            self._setup_error = error  # ``train`` recovers from it as from any other loss
            self._first_tensors, self._first_size = tensors, context.size
            if self._sharded is not None:
                return
            self._vectors.free()  # a data parallel rank needs no other rank to set up
            # Not with ``model``: its parameters may be in the memory that was freed.
            setup = prepare(single_rank(context), settings, job, self._data, self._vectors)
        if self._sharded is None and not setup.strategy.replicated:
            self._shard_update().start(tensors, self._done, context.size)
        self._use_setup(setup)
        if tensors:
            self._role.restore(self._setup.model, tensors, self._done)
        if self._sharded is not None:
            self._sharded.set_live(self._setup, self._done)
            return
        kind = GpuInPlaceState if setup.executor.stage_states[0].resident else InPlaceState
        self._in_place = (CustomInPlaceState if isinstance(self._role, CustomRole) else kind)(
            setup=self._setup,
            vectors=self._vectors,
            arena_shards=self._startup.arena_shards,
            resumed=bool(tensors),
            persistent_memory=context.persistent_memory,
        )
        self._done = self._in_place.load_newest() if joining else self._in_place.commit(self._done)
        has_part = joining and self._done == NO_STATE and bool(self._startup.arena_shards)
        self._startup.has_only_a_part = has_part and settings.sharded_update == "auto"
        self._epoch_end = self._schedule.last_epoch_end(self._done) if joining else self._done

    def _new_sharded_state(self) -> ShardedStateManager:
        return ShardedStateManager(
            settings=self._settings,
            job=self._job,
            data=self._data,
            vectors=self._vectors,
            provenance=self._provenance,
            arena_shards=self._startup.arena_shards,
        )

    def _shard_update(self) -> ShardedStateManager:
        """Data parallel: the ranks have chosen to shard the update. They keep that choice until the end of the run."""
        self._settings = self._settings.with_sharded_update()
        self._sharded = self._new_sharded_state()
        return self._sharded

    @property
    def _shards_update(self) -> bool:
        """Data parallel: the ranks shard the update, by the settings or by their own choice."""
        strategy = parse(self._settings.strategy)
        return isinstance(strategy, DataParallel) and strategy.sharded

    def _use_setup(self, setup: TrainingSetup) -> None:
        self._setup, self.executor, self._role = setup, setup.executor, setup.role
        self._opened = setup.executor
        self._activity.attach(setup.executor)
        self._context.publish_activity(self._activity)
        self._role.attach_provenance(self._provenance)
        if self._sharded is None or setup.plan.sharded_update:
            setup.executor.prefetch(self._schedule.next_in_epoch)
        self._balancer = load_balancer_for(setup.strategy, setup.plan, self._settings.balance, self._context)

    # ---- the training loop

    def train(self) -> None:
        """Trains until all steps are done or all ranks have agreed to stop."""
        with self._denormals():
            self._emit_started() if self._setup_error is None else self._recover(self._setup_error)
            began = time.perf_counter()
            while True:
                try:
                    if self._epoch_end_due() and not self._stopped:
                        self._process_epoch_end()
                    if self._done >= self._schedule.total_steps or self._stopped:
                        self._finish()
                        break
                    self._train_steps()
                except RECOVERABLE as error:
                    if self._reassigning:
                        raise  # the coordinator has released this device, which leaves the job
                    self._recover(error if isinstance(error, PeerError) else PeerLost(str(error)))
            self._emit(account_event(self.executor, time.perf_counter() - began, self._done, self._stopped))

    def join(self) -> None:
        """Joins a running job: reports that it is ready, waits for a rank, gets the state, and trains."""
        self._startup.announce_ready(self._data, time.perf_counter() - self._created_at)
        with self._denormals():  # what it gets may be updated before the first step
            self._recover(FailedPrecondition("the coordinator assigned no rank to a device that was ready"))
        self._first_step = self._done
        self.train()

    def _denormals(self) -> AbstractContextManager[None]:
        """The context in which this rank computes: denormal numbers count as zero, if the settings want it."""
        return denormals_flushed(self._settings.flush_denormals, self._settings.threads_per_device)

    def _emit_started(self) -> None:
        """The reporting rank emits ``started``; again after a recovery, if the first event may have been lost."""
        if self._role.is_reporter and self._done - self._first_step <= self._role.stride:
            schedule, setup, data = self._schedule, self._setup, self._data
            self._startup.emit_started(
                ev.Started(
                    steps=schedule.total_steps,
                    done=self._first_step,
                    steps_an_epoch=schedule.steps_per_epoch,
                    samples=schedule.samples,
                    parameters=sum(one.numel() for one in setup.model.parameters()),
                    stages=setup.describe_stages(),
                    seconds=time.perf_counter() - self._created_at,
                    data=data.train.checksum,
                    same=fingerprint(data),
                    environment={} if self._settings.allow_mixed else rank_environment(),
                    costs=setup.step_costs,
                    sharded_update=self._shards_update,
                )
            )
            if setup.rounding:
                self._emit(ev.RoundingDiffers(setup.rounding))
            if self._settings.batch_size > schedule.samples:
                self._emit(
                    ev.Warned(
                        f"batch_size: {self._settings.batch_size} is more than the "
                        f"{counted(schedule.samples, 'training sample')}, so each step takes all of them"
                    )
                )

    def _train_steps(self) -> None:
        """(2): the steps until ranks synchronize."""
        executor = self.executor
        if self._sharded is not None:
            self._sharded.ensure_replicated(self._context)
            self._sharded.begin_steps()
        self._activity.begin_step(self._done - self._first_step < self._settings.trace_steps)
        began = time.perf_counter()
        works = self._schedule.next_steps(self._done, self._role.stride)
        losses = self._role.advance(works, self._should_stop())
        notes, self._role.notes = self._role.notes, []
        for note in notes if self._role.is_reporter else ():
            self._emit(ev.Warned(note))
        executor.rate = works[-1].rate
        done = self._done + len(works)
        if self._sharded is not None:
            known = losses if self._role.is_reporter else None
            agreed = self._sharded.commit(self._context, self._should_stop(), done, len(works), known)
            self._stopped, losses = agreed
        else:
            self._in_place.log_steps(done, losses)
        self._done = done
        self._activity.end_step(done, len(works))
        self._after_steps(losses, began)
        every_s = self._settings.host_replica_s
        if every_s and self._role.reads_checkpoints_later and self._context.persistent_memory:
            self._snapshots.replicate_later(partial(self._role.checkpoint_reader, self._setup.model), done, every_s)
        if self._reassignment_agreed and not self._stopped:
            self._reassign()

    def _after_steps(self, losses: list[float], began: float) -> None:
        """Reads the votes in the total's tail, adds progress rows, and balances the load.

        In data parallel the sum of the gradients tells every rank whether any rank wants to stop or to be reassigned.
        """
        executor, sees_stop_vote = self.executor, self._role.sees_stop_vote
        last = executor.stage_states.get(executor.last_stage)
        if sees_stop_vote and last is not None:
            self._reassignment_agreed = bool(last.tail[MOVE] > 0)
            if self._sharded is None:
                self._stopped = bool(last.tail[STOP] > 0)
        if losses:
            metrics = last.metrics() if last is not None else ()
            self._progress.add(self._done, losses, time.perf_counter() - began, metrics)
            self._report()
        if sees_stop_vote and self._balancer is not None and last is not None and not self._reassignment_agreed:
            plan = self._balancer.observe(last.tail)
            if plan is not None:
                executor.switch_plan(plan)
            for event in self._balancer.events(plan, self._done) if self._role.is_reporter else ():
                self._emit(event)

    def _report(self, force: bool = False) -> None:
        self._progress.report(self._rate(), self._role.is_reporter, force)

    def _epoch_end_due(self) -> bool:
        """True if an epoch has ended and has not been processed."""
        return self._schedule.is_epoch_end(self._done) and self._done > self._epoch_end

    def _process_epoch_end(self) -> None:
        """(3): evaluates and takes a snapshot, if the settings want it after this epoch."""
        settings, epoch = self._settings, self._schedule.epoch_number(self._done)
        final = self._done == self._schedule.total_steps
        self._report(force=True)
        self._role.refresh()
        due = final or (settings.evaluate_every and epoch % settings.evaluate_every == 0)
        if due and self._role.evaluates:
            self._evaluate(epoch)
        if not final and settings.checkpoint_every and epoch % settings.checkpoint_every == 0:
            self._snapshot(final=False)
        self._epoch_end = self._done

    def _evaluate(self, epoch: int) -> None:
        """Collective. Evaluates the model; all ranks stop together if early stopping says so."""
        accuracy: float | None
        began = time.perf_counter()
        if isinstance(self._role, CustomRole):
            found = evaluate_custom(self.executor, self._role.state, structured(self._data.test))
            loss, accuracy, metrics = found
        else:
            loss, accuracy = evaluate(self.executor, self._data.test)
            metrics = {}
        self.executor.profiler.record_other("evaluate", began)
        last, early_stopping = self._progress.evaluation, self._early_stopping
        before = last.stopping_before if last.steps == self._done else last.stopping
        stopping = early_stopping.next(before, early_stopping.value(loss, accuracy, metrics))
        evaluation = Evaluation(self._done, epoch, loss, accuracy, stopping, before, tuple(metrics.values()))
        if isinstance(self._role, CustomRole):
            self._role.on_evaluated(self._done, loss)
        self._progress.add_evaluation(evaluation, self._rate(), self._role.is_reporter)
        self._check_early_stop()

    def _check_early_stop(self) -> None:
        last = self._progress.evaluation
        if last.steps == self._done and self._early_stopping.is_over(last.stopping):
            self._stopped = True

    def _rate(self) -> float:
        """The learning rate of the last step, for reports."""
        return self._role.state.objects.rate if isinstance(self._role, CustomRole) else self.executor.rate

    def _finish(self) -> None:
        """(4): takes the final snapshot. Ranks synchronize after it: a loss before that would lose a part, or all."""
        self._report(force=True)
        self._role.refresh()
        self._snapshot(final=True)
        any_rank(self._context.communicator, False, np.zeros(0), self._settings.timeout_s)

    def _snapshot(self, final: bool) -> None:
        began = time.perf_counter()
        role, model, done, steps_per_epoch = self._role, self._setup.model, self._done, self._schedule.steps_per_epoch
        parts, evaluation = role.num_checkpoint_parts, self._progress.evaluation.to_row() if role.evaluates else ()
        if role.reads_checkpoints_later and not final:
            self._snapshots.publish_later(role.checkpoint_reader(model), done, steps_per_epoch, parts, evaluation)
        else:
            reshard_count = self._sharded.reshard_count if self._sharded is not None else 0
            tensors = role.checkpoint_tensors(model)
            self._snapshots.publish(tensors, done, steps_per_epoch, final, parts, reshard_count, evaluation)
        self.executor.profiler.record_other("snapshot", began)

    # ---- membership changes

    def _recover(self, error: HoopError, obstacle: HoopError | None = None) -> None:
        """Continues in the generation that the coordinator assigns this rank to next.

        ``obstacle``: why the ranks could not continue in the present one, if they have tried.

        No error in the meantime ends this rank's part in the job, because its state may be the only copy. The rank
        reports why the ranks could not continue and waits for the next generation; the coordinator decides whether the
        job is over.
        """
        began, context = time.perf_counter(), self._context
        log.info("step %d: waiting for a new rank: %s", self._done, error)
        while True:
            if context.wait_reassignment is None:
                raise error
            if self._sharded is not None and not self._settings.replicate:
                raise self._snapshots.state_lost(f"{error}; replication is off, and its part") from error
            try:
                context = context.wait_reassignment(REASSIGNMENT_TIMEOUT_S, obstacle)
            except DeadlineExceeded:
                raise obstacle or error from None
            try:
                self._enter_generation(context)
                break
            except StateLost as lost:
                obstacle = self._snapshots.state_lost(f"with the devices that are gone {lost}", lost.found)
            except RECOVERABLE as another:
                error, obstacle = another, None
            except HoopError as refused:
                obstacle = refused
            except DEVICE_ERRORS:
                raise  # this device's GPU failed, and the state on it is lost
            except Exception as bug:
                obstacle = InternalError("".join(traceback.format_exception(bug)))
        log.info("step %d: continuing as rank %d of %d", self._done, self._context.rank, self._context.size)
        self._emit_started()
        self._emit_change(ev.Recovered, began, str(error))

    def _reassign(self) -> None:
        """Planned membership change, data parallel: all ranks take their next ranks after the same step.

        No state is lost, and the old links stay open until every rank has arrived.
        """
        began = time.perf_counter()
        self._report(force=True)  # another rank may report from now on
        assert self._context.commit_reassignment is not None, "all ranks agreed on a reassignment"
        self._reassigning = True
        context, self._reassigning = self._context.commit_reassignment(), False
        try:
            self._enter_generation(context, planned=True)
        except StateLost as lost:  # the update is sharded, and an owner and its holder left together
            obstacle: HoopError = self._snapshots.state_lost(f"with the devices that are gone {lost}", lost.found)
            self._recover(obstacle, obstacle)
            return
        except RECOVERABLE:
            raise  # as a failure within a step
        except HoopError as refused:  # a device that joins has too little memory, for example
            self._recover(refused, refused)
            return
        self._emit_change(ev.Resized, began, "")

    def _enter_generation(self, context: RankContext, planned: bool = False) -> None:
        """Goes on with the ranks of ``context``: with the same state on all of them, or with a part of it on each.

        If the ranks of a data parallel job shard the update, all that know it say so first: a rank that began to join
        before they had chosen learns it here.
        """
        self._startup.joining = self._startup.joining or context.left_out  # until a recovery is complete
        if self._sharded is None:
            try:
                self._resume_replicas(context, planned)
                return
            except UpdateIsSharded:
                sharded = self._drop_whole_state()
        else:
            sharded = self._sharded
            if self._shards_update:
                status = RankStatus(context.device, NO_STATE, self._epoch_end, survived=True, offers=[])
                announce_sharded_update(context.communicator, status, self._settings.timeout_s)
        self._reshard(context, sharded)

    def _drop_whole_state(self) -> ShardedStateManager:
        """Data parallel: this rank has set up the whole state, and gets a part of that of the others instead."""
        self._role.close()
        self.executor.close()
        self._opened = None
        self._vectors.free()
        sharded = self._shard_update()
        if not self._startup.joining:  # it never was in step with the others
            sharded.start(self._first_tensors, self._first_step, self._first_size)
        self._done = self._epoch_end = self._first_step
        return sharded

    def _emit_change(self, kind: type[ev.Recovered | ev.Resized], began: float, text: str) -> None:
        if self._role.is_reporter:
            event = kind(
                step=self._done,
                pause_s=time.perf_counter() - began,
                text=text,
                missing=self._missing_shards,
                ranks=self._context.size,
                generation=self._context.communicator.endpoint.generation,
                sharded_update=self._shards_update,
            )
            self._emit(event)

    def _reshard(self, context: RankContext, sharded: ShardedStateManager) -> None:
        """Sharded: partitions the model for the ranks there are now, at the newest step whose state is complete."""
        self._context = context
        try:
            setup, plan = sharded.reshard(context, self._done, self._epoch_end, self._stopped)
        except UserError as error:
            raise FailedPrecondition(f"{error}; {self._snapshots.remedy}") from None
        context.close_previous_links()
        self._use_setup(setup)
        self._done, self._epoch_end, self._stopped = plan.step, plan.epoch_end, plan.stopped
        self._startup.complete(self._done, context, plan.source, plan.all_restarted, self._progress)
        self._check_early_stop()
        sharded.ensure_replicated(context)
        sharded.synchronize(context, self._should_stop(), self._done)
        sharded.confirm(plan)

    def _resume_replicas(self, context: RankContext, planned: bool = False) -> None:
        """Data parallel: gives all ranks the same state, and finishes the step under way without the lost ranks.

        Shards that are lost are computed again by other ranks; see ``fault_tolerance/recovery.py``.
        """
        executor, settings, schedule = self.executor, self._settings, self._schedule
        executor.set_context(context)
        self._context = context
        if self._done > NO_STATE:
            for loss in self._role.sync_for_recovery(self._done):
                self._count_step(loss)
            if self._startup.joining and not self._role.state_is_whole:
                self._forget_state()  # the others went on without this rank, which may have read what they wrote
        status = RankStatus(
            context.device,
            self._done,
            self._epoch_end,
            survived=not self._startup.joining,
            offers=[(self._done, [WHOLE])] if self._done > NO_STATE else [],
            computed=executor.computed,
            sharded_update=self._startup.has_only_a_part,
        )
        plan = synchronize_replicas(
            self._in_place, context, status, schedule.rate, settings.timeout_s, self._forget_state
        )
        self._role.on_state_change()
        if context.rank in plan.behind:
            self._count_finished_step()
        self._done, executor.computed = plan.step, list(plan.computed[context.rank])
        source = plan.source_of(context.rank)
        self._startup.complete(self._done, context, source, plan.all_restarted, self._progress)
        self._check_early_stop()
        self._epoch_end = plan.epoch_end
        if not planned:
            executor.stage_states[0].rotate_total_buffer()
        strategy = for_hosts(self._setup.strategy, context.hosts)
        usual = strategy.plan(context.size, settings.num_microbatches)
        executor.switch_plan(usual)
        if self._epoch_end_due():
            self._process_epoch_end()
        self._missing_shards = plan.missing_shards(settings.num_microbatches)
        if any(plan.computed):
            rest, holdings, kept = plan_rest_of_step(
                plan, settings.num_microbatches, max_gradient_slots(usual, settings.balance)
            )
            executor.switch_plan(rest, holdings)
            (work,) = schedule.next_steps(self._done, self._role.stride)
            executor.rate = work.rate
            executor.step(work.position, work.samples, self._should_stop(), kept[context.rank])
            self._count_finished_step()
            executor.switch_plan(usual)
        self._balancer = load_balancer_for(strategy, usual, settings.balance, context)

    def _forget_state(self) -> None:
        """Called before this rank's state, which is stale, is overwritten."""
        self._done = NO_STATE
        self._progress.forget()

    def _count_finished_step(self) -> None:
        """Counts a step that was finished outside of ``_train_steps``."""
        tail = self.executor.stage_states[0].tail
        self._count_step(self.executor.stage_states[0].mean_loss(tail))

    def _count_step(self, loss: float) -> None:
        self._done += 1
        self._progress.add(self._done, [loss], 0.0, self.executor.stage_states[0].metrics())

    def forget_gpu_state(self) -> None:
        """Called after an error of the GPU: a restarted device must not use what is on it."""
        accelerator = self._opened.accelerator if self._opened is not None else None
        if accelerator is not None and accelerator.kept is not None:
            accelerator.kept.end_keeper()

    def close(self) -> None:
        """Frees the arena's memory, except the last snapshots, which a client may still read, and the model."""
        self._snapshots.close()
        self._context.publish_activity(None)
        self._activity.attach(None)
        if self._opened is not None:
            self._role.close()
            self._opened.close()
        self._vectors.free() if self._sharded is None else self._sharded.close()


def account_event(executor: PlanExecutor, seconds: float, done: int, stopped: bool) -> ev.Account:
    """The last event of a rank: seconds by kind of instruction, bytes, memory, and the trace of the first steps."""
    return ev.Account(
        rank=executor.rank,
        seconds=seconds,
        shares=executor.profiler.seconds,
        instructions=executor.profiler.instructions,
        bytes_sent=executor.bytes_sent,
        memory=executor.context.arena.used,
        spans=executor.profiler.spans,
        done=done,
        stopped=stopped,
    )
