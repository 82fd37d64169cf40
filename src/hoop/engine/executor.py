"""Executes one rank's part of a plan.

role ── step(position, samples) ──▶ PlanExecutor    (1) the rank's instructions in order, one handler per kind
                                          │
    StageState     ◀── forward, backward ─┤         (2) writes gradients to slots in the arena
    TensorChannel  ◀── activations ───────┤         (3) sends activations and their gradients to other ranks
    GradientReducer ◀── all-reduce ───────┤         (4) sums gradients over shards and replicas
    DeferredUpdates ◀── update ───────────┘         (5) updates the weights, now or at the commit of the step

A plan (``plan/plan.py``) is a list of instructions for each rank. A rule (``plan/rules.py``) decides at run time
instead: then a role calls ``begin`` and ``execute``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from hoop.collectives.rank_context import RankContext
from hoop.collectives.shard_tree import MergePlan, merge_plan
from hoop.data.dataset import Dataset, Indices
from hoop.engine.custom.loss import CustomLoss
from hoop.engine.data_feed import DataFeed, Position
from hoop.engine.gradient_slots import max_gradient_slots
from hoop.engine.peer_tensors import PeerTensors
from hoop.engine.prefetcher import Prefetcher
from hoop.engine.profiler import InstructionProfiler, now
from hoop.engine.settings import Settings
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.autograd import CPU, Criterion, Objective
from hoop.engine.stage.batched_shards import BatchedShards, agree_max_batched_shards, group_shards
from hoop.engine.stage.device_reduction import DeviceGradientReducer, open_device_reducer
from hoop.engine.stage.gpu_resident_state import ResidentStageState
from hoop.engine.stage.gpu_stage import GpuStageState, stage_state_factory
from hoop.engine.stage.gradient_reduction import GradientNorm, GradientReducer
from hoop.engine.stage.linear_chain import layers_of
from hoop.engine.stage.peer_memory import PeerMemory, open_peer_memory
from hoop.engine.stage.sharded_update import ShardedGradientReducer, ShardedStageState
from hoop.engine.stage.state import NO_METRICS, ShardMetrics, StageSpec, StageState, StateVectors
from hoop.engine.step_schedule import StepWork
from hoop.engine.tensor_channel import TensorChannel
from hoop.plan.instructions import GRADIENT_KINDS, Instruction, InstructionKind
from hoop.plan.plan import Plan

MIN_PREFETCH_RANKS = 4
"""Minimum number of ranks for prefetching, which paid with 8 and 16 ranks and not with 2 (benchmarks/training); in
between it was not measured."""


class DeferredUpdates:
    """Weight updates of one rank that wait for the commit of the step.

    They are applied once every rank has replicated its gradient. So a failure leaves either all ranks before the
    step, or all ranks able to finish it. If ``enabled`` is False, updates are applied immediately.
    """

    def __init__(self, profiler: InstructionProfiler) -> None:
        self._profiler = profiler
        self.enabled = False
        self._pending: list[tuple[Callable[[], None], Instruction | None]] = []

    def submit(self, update: Callable[[], None], instruction: Instruction | None = None) -> None:
        """Apply an update now, or append it to the pending ones.

        ``instruction``: the profiler records a deferred update under it; None: the update is not recorded.
        """
        if self.enabled:
            self._pending.append((update, instruction))
        else:
            update()

    def apply_all(self) -> None:
        """Apply the pending updates in the order of their submission."""
        pending, self._pending = self._pending, []
        for update, instruction in pending:
            started = now()
            update()
            if instruction is not None:
                self._profiler.record_deferred(instruction, started, now())


StageMicrobatch = tuple[int, int]
"""A stage and a micro-batch."""
Reducer = GradientReducer | ShardedGradientReducer | DeviceGradientReducer


class ActivationFlow:
    """Activations and their gradients between stages, on this rank or another one.

    A micro-batch without samples has none: its instructions do nothing. What a worker pushes to a parameter server goes
    the same way (``send``).
    """

    def __init__(self, feed: DataFeed, channel: TensorChannel, accelerator: Accelerator | None) -> None:
        self.feed, self.channel, self._accelerator = feed, channel, accelerator
        self.deadline = 0.0
        self.inputs: dict[StageMicrobatch, Tensor] = {}
        self.outputs: dict[StageMicrobatch, Tensor] = {}
        self.output_gradients: dict[StageMicrobatch, Tensor] = {}
        """Gradients with respect to a stage's output: from the loss, or received."""
        self.input_gradients: dict[StageMicrobatch, Tensor] = {}
        """Gradients with respect to a stage's input: computed here, for the previous stage."""

    def load(self, instruction: Instruction) -> None:
        if not self.feed.empty(instruction.micro):
            self.inputs[0, instruction.micro] = self.feed.inputs(instruction.micro)

    def input(self, stage: int, micro: int) -> Tensor:
        """Take the input of a stage: loaded, received, or the output of the previous stage on this rank."""
        found = self.inputs.pop((stage, micro), None)
        return self.outputs.pop((stage - 1, micro)) if found is None else found

    def output_gradient(self, stage: int, micro: int) -> Tensor:
        """Take the gradient of a stage's output: from the loss, received, or of the next stage on this rank."""
        found = self.output_gradients.pop((stage, micro), None)
        return self.input_gradients.pop((stage + 1, micro)) if found is None else found

    def send_output(self, instruction: Instruction) -> None:
        if not self.feed.empty(instruction.micro):
            self.send(instruction, self.outputs.pop((instruction.stage, instruction.micro)), self.deadline)

    def recv_input(self, instruction: Instruction) -> None:
        if not self.feed.empty(instruction.micro):
            self.inputs[instruction.stage, instruction.micro] = self.channel.expect(instruction, self.deadline)

    def send_gradient(self, instruction: Instruction) -> None:
        if not self.feed.empty(instruction.micro):
            self.send(instruction, self.input_gradients.pop((instruction.stage, instruction.micro)), self.deadline)

    def send(self, instruction: Instruction, tensor: Tensor, deadline: float) -> None:
        """Send a tensor that this rank has computed: from its GPU, if the peer can read it there, or from the host."""
        if self._accelerator is None:
            self.channel.send(instruction, tensor, deadline)
        else:
            self.channel.send_or_copy(instruction, tensor, partial(self._accelerator.download, tensor), deadline)

    def recv_gradient(self, instruction: Instruction) -> None:
        if not self.feed.empty(instruction.micro):
            self.output_gradients[instruction.stage, instruction.micro] = self.channel.expect(
                instruction, self.deadline
            )


@dataclass(frozen=True)
class RankRuntime:
    """What one rank computes with, whatever the model."""

    context: RankContext
    settings: Settings
    vectors: StateVectors
    """Allocator of the state's vectors in the arena."""
    accelerator: Accelerator | None = None


@dataclass(frozen=True)
class PartitionedModel:
    """The blocks of a model, cut into stages."""

    blocks: Sequence[nn.Module]
    bounds: Sequence[int]
    """Number of the first block of each stage."""

    def stage(self, number: int) -> tuple[int, int]:
        """The first block of a stage, and the one after its last."""
        return self.bounds[number], [*self.bounds[1:], len(self.blocks)][number]


@dataclass(frozen=True)
class CustomParts:
    """What custom training has in place of the executor's: ``CustomRole`` computes its shards."""

    feed: DataFeed
    state: StageState


class PlanExecutor:
    """The stages, data and communication of one rank, and the loop over its instructions. ``setup.py`` makes it."""

    def __init__(
        self,
        runtime: RankRuntime,
        model: PartitionedModel,
        plan: Plan,
        data: Dataset,
        criterion: Criterion | CustomLoss,
        resident: bool = False,
        custom: CustomParts | None = None,
    ) -> None:
        """``resident``: the state stays on the accelerator, and ``ResidentRole`` runs the steps."""
        context, settings, accelerator = runtime.context, runtime.settings, runtime.accelerator
        self.context, self.settings, self.criterion, self.rank = context, settings, criterion, context.rank
        self.profiler, self.last_stage = InstructionProfiler(), plan.stages - 1
        self.deferred_updates = DeferredUpdates(self.profiler)
        self.peer_memory: PeerMemory | None = None
        """Memory of this host's accelerators, with a partitioned model; None without one, or with a single rank."""
        if accelerator is not None and not resident and custom is None and context.size > 1:
            used = bool(plan.held_by(context.rank)) or context.rank in plan.servers
            self.peer_memory = open_peer_memory(
                context.communicator, accelerator, runtime.vectors, used, settings.timeout_s
            )
        peer_tensors: PeerTensors | None = None
        if self.peer_memory is not None and (plan.stages > 1 or plan.servers):
            peer_tensors = PeerTensors(self.peer_memory, context.communicator, settings.timeout_s)
        channel = TensorChannel(context.communicator.endpoint, peer_tensors)
        rows = -(-settings.batch_size // plan.num_microbatches)
        feed = custom.feed if custom is not None else DataFeed(data, settings.seed, rows)
        self.activations = ActivationFlow(feed, channel, accelerator)
        self.stage_states = _make_stage_states(runtime, model, plan, resident) if custom is None else {0: custom.state}
        """States of the stages that this rank holds, by number of the stage."""
        self._first_stage = min(self.stage_states, default=0)
        self.accelerator, self._usual_batch = accelerator, min(settings.batch_size, len(data))
        self.update_device = accelerator.device if accelerator is not None else CPU
        """Device on which the updates of the weights are computed."""
        self._norm = GradientNorm(
            context, settings, model.blocks, [*model.bounds, len(model.blocks)], self.update_device
        )
        self.objective = Objective(criterion) if isinstance(criterion, Criterion) else None
        self._reducers: dict[int, Reducer] = {}
        self._handlers = self._make_handlers()
        self._metrics: dict[int, ShardMetrics] = {}
        self._waited, self._position = 0.0, Position(0, 0, 0)
        self._prefetcher: Prefetcher | None = None
        self._prefetch_seconds = 0.0
        """Seconds of the current instruction in which this rank loaded samples of the next step."""
        slow = settings.slowdown
        self.extra_slowdown: float = slow[context.rank] - 1 if context.rank < len(slow) else 0
        """Seconds to sleep for each second of computation, for experiments."""
        self.rate = 0.0
        """Learning rate of the step."""
        self.extra_bytes_sent = 0
        """Sent bytes that no open endpoint counts: through shared memory, or over endpoints that are closed."""
        self.gradient_scale: float | None = None
        """Clipping factor of the step; None until the first stage is updated."""
        self.computed: list[int] = []
        """Shards of the current step whose gradients are in their slots, in the order of computation."""
        self.steps_updated = -1
        """Number of steps whose update was made or submitted; -1 before the first."""
        self.instruction_hooks: list[Callable[[int, Instruction], None]] = []
        """Hooks that are called with the step and each instruction, before it is executed."""
        self._batched: BatchedShards | None = None
        self.max_batched_shards = 1
        """Maximum number of shards that are computed as one batch."""
        by_hand = self.objective is not None and self.objective.by_hand is not None
        if plan.stages == 1 and by_hand and not resident:
            whole = self.stage_states.get(0)
            self.max_batched_shards = agree_max_batched_shards(context, whole, rows, settings.timeout_s)
            if self.max_batched_shards > 1 and whole is not None:
                self._batched = BatchedShards(self.feed, whole, self.profiler, rows)
        self.plan = plan
        if not context.future_size:  # else the first recovery switches to the plan that this rank trains with
            self.switch_plan(plan)

    def _make_handlers(self) -> dict[InstructionKind, Callable[[Instruction], None]]:
        return {
            InstructionKind.LOAD: self.activations.load,
            InstructionKind.FORWARD: self._forward,
            InstructionKind.BACKWARD: self._backward,
            InstructionKind.BACKWARD_INPUT: self._backward_input,
            InstructionKind.BACKWARD_WEIGHT: self._backward_weight,
            InstructionKind.SEND_OUTPUT: self.activations.send_output,
            InstructionKind.RECV_INPUT: self.activations.recv_input,
            InstructionKind.SEND_GRADIENT: self.activations.send_gradient,
            InstructionKind.RECV_GRADIENT: self.activations.recv_gradient,
            InstructionKind.REDUCE: self._reduce,
            InstructionKind.UPDATE: self._update,
        }

    @property
    def position(self) -> Position:
        """The step under way."""
        return self._position

    @property
    def feed(self) -> DataFeed:
        """The samples of the current step."""
        return self.activations.feed

    @property
    def channel(self) -> TensorChannel:
        """Tensors to and from other ranks."""
        return self.activations.channel

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other ranks, over links and through shared memory. Any thread may read it."""
        return (
            self.extra_bytes_sent
            + self.channel.endpoint.bytes_sent
            + self.channel.bytes_shared
            + sum(one.bytes_moved for one in list(self._reducers.values()))
        )

    def close(self) -> None:
        """Stop the threads of the reducers, free the memory on the GPU, and drop the handlers.

        They refer to this object: with them, an ended job's model and data would stay until a garbage collection.
        """
        self._close_reducers()
        self._handlers, self._batched, self._prefetcher = {}, None, None
        for stage_state in self.stage_states.values():
            stage_state.close()
        self.channel.close()
        if self.peer_memory is not None:
            self.peer_memory.close()
        if self.accelerator is not None:
            self.accelerator.close()

    def _close_reducers(self) -> None:
        for one in self._reducers.values():
            one.close()

    # ---- plans

    def set_context(self, context: RankContext) -> None:
        """Continue in the next generation, with another rank number and other peers."""
        self.extra_bytes_sent += self.channel.endpoint.bytes_sent
        self.context, self.rank = context, context.rank
        self.activations.channel = TensorChannel(context.communicator.endpoint)
        self._norm.set_context(context)

    def switch_plan(self, plan: Plan, holdings: Sequence[MergePlan] | None = None) -> None:
        """Switch to another plan. Collective. The stages must be held by the same ranks as before.

        ``holdings``: the tree nodes that each rank will hold, if ranks have already computed shards of the step.
        """
        deadline = time.monotonic() + self.settings.timeout_s
        self.plan, rest_of_step = plan, holdings is not None
        self.extra_bytes_sent += sum(one.bytes_moved for one in self._reducers.values())
        self._close_reducers()
        for stage, stage_state in sorted(self.stage_states.items()):
            ranks = plan.holders[stage]
            if stage_state.resident:  # ``ResidentRole`` sums its gradients
                continue
            if holdings is None:
                holdings = [merge_plan(plan.computed_by(rank, stage), plan.num_microbatches) for rank in ranks]
            mine: MergePlan = holdings[ranks.index(self.rank)]
            stage_state.allocate_slots(mine, max_gradient_slots(plan, self.settings.balance))
            if not plan.servers:  # servers reduce the gradients that workers push
                self._reducers[stage] = self._make_reducer(ranks, holdings, stage_state, deadline)
            holdings = None
        most = self.max_batched_shards if self._batched is not None else 1
        self._program = list(group_shards(plan.ranks[self.rank], most))
        gradients = [one for one in plan.ranks[self.rank] if one.kind in GRADIENT_KINDS]
        self._final_gradient = gradients[-1] if gradients else None
        self._num_shards = len({one.micro for one in gradients})
        # A plan for the rest of a step says nothing about the next step.
        first = self._program[0][::3] if self._program and not rest_of_step else []
        self._first_load = [one for one in first if one.kind is InstructionKind.LOAD]

    def _make_reducer(
        self, ranks: Sequence[int], holdings: Sequence[MergePlan], stage_state: StageState, deadline: float
    ) -> Reducer:
        """Collective over ``ranks``, which hold the stage: on the GPU, if they are on one host."""
        group = self.context.communicator if len(ranks) == self.context.size else self.context.group(ranks)
        shards, memory = self.plan.num_microbatches, self.peer_memory
        if isinstance(stage_state, ShardedStageState):
            return ShardedGradientReducer(group, holdings, shards, stage_state, deadline)
        found = None
        if isinstance(stage_state, GpuStageState) and memory is not None and group.size > 1:
            found = open_device_reducer(group, ranks, holdings, shards, stage_state, memory, deadline)
        return found or GradientReducer(group, holdings, shards, stage_state, deadline)

    # ---- a step

    def begin(self, position: Position, samples: Indices, stop: bool = False, computed: Sequence[int] = ()) -> None:
        """Begin a step on these samples, without executing anything.

        ``stop``: this rank asks all ranks to stop after the step. ``computed``: shards whose gradients are already in
        their slots.
        """
        self._stop, self._position = stop, position
        self.feed.begin(position, samples, self.plan.num_microbatches)
        self.computed = list(computed)
        self._deadline = self.activations.deadline = time.monotonic() + self.settings.timeout_s
        self.gradient_scale, self._busy = None, 0.0
        self.select_kernels(len(samples))
        for stage_state in self.stage_states.values():
            stage_state.begin()

    def select_kernels(self, samples: int | None = None) -> None:
        """Select the GPU's kernels for a step of this many samples, or for other computations (None)."""
        if self.accelerator is not None:
            self.accelerator.select_kernels(samples is None or samples == self._usual_batch)

    def step(self, position: Position, samples: Indices, stop: bool = False, computed: Sequence[int] = ()) -> None:
        """Run the plan on these samples; the parameters are those of ``begin``."""
        self.begin(position, samples, stop, computed)
        profiler, handlers, batched = self.profiler, self._handlers, self._batched
        profiler.record_overhead()
        for run in self._program:
            if batched is not None and batched.can_batch(run):
                batched(run, self.add_compute_time, self._on_batched_shard)
                continue
            for instruction in run:
                started, self._waited, self._prefetch_seconds = now(), 0.0, 0.0
                handlers[instruction.kind](instruction)
                if self._prefetch_seconds:
                    profiler.record_prefetch(self._first_load[0], started, self._prefetch_seconds)
                profiler.record(instruction, started + self._prefetch_seconds, now(), self._waited)
        self.channel.endpoint.flush(self._deadline)

    def register_handlers(self, handlers: Mapping[InstructionKind, Callable[[Instruction], None]]) -> None:
        """Replace the handlers of these kinds of instruction. Roles call it."""
        self._handlers |= handlers

    def reducer(self, stage: int) -> Reducer:
        """Return the reducer of a stage, of the current plan. Roles call it."""
        return self._reducers[stage]

    def handler(self, kind: InstructionKind) -> Callable[[Instruction], None]:
        """Return the handler of a kind of instruction."""
        return self._handlers[kind]

    def add_instruction_hook(self, hook: Callable[[int, Instruction], None]) -> None:
        """Call ``hook(step, instruction)`` before each instruction; the first step is 1. Disables batched shards."""

        def hooked(handler: Callable[[Instruction], None], instruction: Instruction) -> None:
            hook(self._position.done + 1, instruction)
            handler(instruction)

        self._handlers = {kind: partial(hooked, handler) for kind, handler in self._handlers.items()}
        self._batched = None
        self.instruction_hooks.append(hook)

    def set_position(self, position: Position) -> None:
        """Set the step of the next instructions, for instruction hooks; ``begin`` also does."""
        self._position = position

    def execute(self, instruction: Instruction) -> None:
        """Execute one instruction. For roles that follow a rule instead of the plan's list."""
        self._handlers[instruction.kind](instruction)

    def _forward(self, instruction: Instruction) -> None:
        stage, micro = instruction.stage, instruction.micro
        if self.feed.empty(micro):
            return
        started = now()
        outputs = self.stage_states[stage].forward(micro, self.activations.input(stage, micro), self.feed.seed(micro))
        if stage == self.last_stage:
            self._compute_loss(micro, outputs)
        else:
            self.activations.outputs[stage, micro] = outputs
        self.add_compute_time(started)

    def _compute_loss(self, micro: int, outputs: Tensor) -> None:
        """Compute the loss of a micro-batch, and the gradient with which its backward starts."""
        targets = self.stage_states[self.last_stage].to_device(self.feed.targets(micro))
        assert self.objective is not None, "CustomRole computes losses itself"
        loss, gradient = self.objective(outputs, targets, self.feed.batch_size)
        self._metrics[micro] = (loss, 0.0, float(len(targets)))
        self.activations.output_gradients[self.last_stage, micro] = gradient

    def _backward(self, instruction: Instruction) -> None:
        stage, micro = key = instruction.stage, instruction.micro
        stage_state = self.stage_states[stage]
        if self.feed.empty(micro):
            stage_state.on_empty_shard(micro)
            self.computed.append(micro)
        else:
            started = now()
            # After the last shard, the reducer starts with each bucket as soon as the backward has written it.
            reducer = self._reducers.get(stage) if instruction is self._final_gradient else None
            overlap = reducer is not None and bool(reducer.num_buckets)
            on_segment = partial(reducer.start, micro=micro, deadline=self._deadline) if reducer and overlap else None
            gradient = stage_state.to_device(self.activations.output_gradient(*key))
            input_gradient = stage_state.stage.backward(
                micro, gradient, stage_state.gradient_views(micro), stage > 0, on_segment
            )
            if input_gradient is not None:
                self.activations.input_gradients[key] = input_gradient
            self._on_gradient(stage_state, stage, micro, merged=overlap)
            self.add_compute_time(started)
        self.after_shard(instruction)

    def _backward_input(self, instruction: Instruction) -> None:
        stage, micro = key = instruction.stage, instruction.micro
        if not self.feed.empty(micro):
            started = now()
            stage_state = self.stage_states[stage]
            input_gradient = stage_state.stage.backward_input(
                micro, stage_state.to_device(self.activations.output_gradient(*key)), stage > 0
            )
            if input_gradient is not None:
                self.activations.input_gradients[key] = input_gradient
            self.add_compute_time(started)

    def _backward_weight(self, instruction: Instruction) -> None:
        stage, micro = instruction.stage, instruction.micro
        stage_state = self.stage_states[stage]
        if self.feed.empty(micro):
            stage_state.on_empty_shard(micro)
            self.computed.append(micro)
        else:
            started = now()
            stage_state.stage.backward_weight(micro, stage_state.gradient_views(micro))
            self._on_gradient(stage_state, stage, micro)
            self.add_compute_time(started)
        self.after_shard(instruction)

    def _on_gradient(self, stage_state: StageState, stage: int, micro: int, merged: bool = False) -> None:
        metrics = self._metrics.pop(micro, NO_METRICS) if stage == self.last_stage else NO_METRICS
        stage_state.on_gradient(micro, metrics, self.feed.num_nonempty, self.feed.fingerprints.get(micro, 0), merged)
        self.computed.append(micro)
        if stage == self._first_stage:
            self.feed.release(micro)

    def add_compute_time(self, started: float) -> None:
        """Add the time since ``started`` to the rank's compute time; sleep if the rank is slowed down on purpose."""
        seconds = now() - started
        if self.extra_slowdown:
            # At most 2 s: a process that was stopped (SIGSTOP) did not compute all the time.
            time.sleep(min(self.extra_slowdown * seconds, 2.0))
        self._busy += (1 + self.extra_slowdown) * seconds

    def _on_batched_shard(self, instruction: Instruction) -> None:
        self.computed.append(instruction.micro)
        self.after_shard(instruction)

    def after_shard(self, instruction: Instruction) -> None:
        """Called after each shard: with the last one, report this rank's seconds per shard to all ranks."""
        if instruction is self._final_gradient:
            self.stage_states[instruction.stage].report_speed(
                instruction.micro,
                self.rank,
                seconds=self._busy / max(1, self._num_shards),
                stop=self._stop,
                move=self.context.reassignment_ready(),
            )

    def prefetch(self, next_step: Callable[[int], StepWork | None]) -> None:
        """Prefetch samples of the next step while this rank waits for the others, in data parallel training.

        ``next_step(done)`` returns the step after ``done`` finished steps; None: its samples must not be prefetched.
        """
        if self._may_prefetch:
            self._prefetcher = Prefetcher(self.feed, next_step)

    @property
    def prefetches(self) -> bool:
        """Whether this rank prefetches samples while it waits for the sum of gradients."""
        return self._may_prefetch and self.plan.size >= MIN_PREFETCH_RANKS

    @property
    def _may_prefetch(self) -> bool:
        return self.plan.stages == 1 and not self.plan.servers and self.feed.can_prefetch

    def _reduce(self, instruction: Instruction) -> None:
        reducer, prefetcher = self._reducers[instruction.stage], self._prefetcher
        if prefetcher is None or self.plan.size < MIN_PREFETCH_RANKS:
            self._waited = reducer(self._deadline)
            return
        prefetcher.begin(self._position.done + 1, [one.micro for one in self._first_load], self.plan.num_microbatches)
        self._waited = reducer(self._deadline, prefetcher)
        self._prefetch_seconds = prefetcher.seconds

    def _update(self, instruction: Instruction) -> None:
        if self.gradient_scale is None:
            self.gradient_scale = self._norm.scale(self.stage_states, self.plan)
        stage_state, done = self.stage_states[instruction.stage], self._position.done
        stage_state.on_total(done, self.gradient_scale)
        self.deferred_updates.submit(partial(stage_state.apply_update, self.rate, done), instruction)
        self.computed, self.steps_updated = [], done + 1


def _make_stage_states(
    runtime: RankRuntime, model: PartitionedModel, plan: Plan, resident: bool
) -> dict[int, StageState]:
    """Make the states of the stages that this rank holds, by number."""
    rank, accelerator, settings = runtime.context.rank, runtime.accelerator, runtime.settings
    make: Callable[..., StageState] = stage_state_factory(accelerator, plan, settings)
    if accelerator is not None and resident:
        make = partial(ResidentStageState, accelerator)
    if plan.sharded_update:
        ranks = plan.holders[0]
        make = partial(ShardedStageState, ranks.index(rank), len(ranks))
    chain = layers_of(model.blocks) is not None
    found: dict[int, StageState] = {}
    for stage in plan.held_by(rank):
        low, high = model.stage(stage)
        spec = StageSpec(model.blocks[low:high], low, f"stage{stage}.", updates=not plan.servers, chain=chain)
        found[stage] = make(runtime.vectors, spec, settings)
    return found
