"""How many gradients a rank must have room for at once.

Updates that are put off until all ranks have met: then everybody has what it takes to make them, or nobody did.

What flows through a rank's stages: inputs and outputs forward, their gradients backward, from stage to stage.

A worker executes one rank's part of a plan.

run ── step(position, samples) ──▶ worker     (1) each instruction in order, a handler a kind
                                    │
    held stages ◀── forward/backward┤         (2) gradients go to slots in the arena
    other ranks ◀── post ───────────┤         (3) activations and their gradients travel
    other ranks ◀── ordered sum ────┘         (4) totals over shards and replicas; then the update
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from hoop.collectives.shard_tree import MergePlan, merge_plan
from hoop.data.dataset import Dataset, Indices
from hoop.engine.data_feed import DataFeed, Position
from hoop.engine.profiler import InstructionProfiler, now
from hoop.engine.rank_context import RankContext
from hoop.engine.settings import Settings
from hoop.engine.stage.autograd import Criterion, Objective
from hoop.engine.stage.batched_shards import BatchedShards, batchable, grouped
from hoop.engine.stage.gpu import Accelerator, holder
from hoop.engine.stage.gradient_reduction import GradientNorm, GradientReducer
from hoop.engine.stage.linear_chain import layers_of
from hoop.engine.stage.state import NOTHING, Figures, StageState, StateVectors
from hoop.engine.tensor_channel import TensorChannel
from hoop.plan.instructions import GRADIENT_KINDS, Instruction, InstructionKind
from hoop.plan.plan import Plan
from hoop.strategies.base import Strategy
from hoop.strategies.memory_fit import Gradients, Room


def most_slots(plan: Plan, balance: bool) -> int:
    """Where shards move, any share of them must fit, so that slots never do.

    With a parameter server shards stay where they are.
    """
    shares = {plan.computed_by(rank, stage) for stage, ranks in enumerate(plan.holders) for rank in ranks}
    if plan.stages == 1 and balance and plan.size > 1 and not plan.servers:
        shares |= {tuple(range(low, plan.micros)) for low in range(plan.micros)}
        shares |= {tuple(range(1, high)) for high in range(2, plan.micros)}
    return max(merge_plan(share, plan.micros).slots for share in shares)


def _gradients(balance: bool, strategy: Strategy, plan: Plan) -> Gradients:
    slots = most_slots(plan, balance)
    if plan.servers:
        nodes = sum(len(merge_plan(plan.computed_by(rank, 0), plan.micros).nodes) for rank in plan.holders[0])
        return Gradients(slots, nodes if strategy.synchronous else 1)
    # A device with several stages adds up one of them while the next step's gradients of another come in.
    several = any(len(plan.held_by(rank)) > 1 for rank in range(plan.size))
    return Gradients(1 + slots * (strategy.versions if several else 1), 0)


def room_for(balance: bool) -> Room:
    """For the memory check: what ranks of any strategy have room for, where shards may move or not."""
    return partial(_gradients, balance)


class DeferredUpdates:
    """One rank's."""

    def __init__(self, clock: InstructionProfiler) -> None:
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


Key = tuple[int, int]
"""A stage and a micro-batch."""


class ActivationFlow:
    """Tensors between stages, here or at another rank; of a micro-batch without samples there are none."""

    def __init__(self, feed: DataFeed, post: TensorChannel) -> None:
        self.feed, self.post = feed, post
        self.deadline = 0.0
        self.inputs: dict[Key, Tensor] = {}
        self.outputs: dict[Key, Tensor] = {}
        self.gradients: dict[Key, Tensor] = {}
        """Of a stage's output."""
        self.returns: dict[Key, Tensor] = {}
        """Of a stage's input."""

    def load(self, instruction: Instruction) -> None:
        if not self.feed.empty(instruction.micro):
            self.inputs[0, instruction.micro] = self.feed.inputs(instruction.micro)

    def input(self, stage: int, micro: int) -> Tensor:
        """What was loaded, received, or left by the stage before."""
        found = self.inputs.pop((stage, micro), None)
        return self.outputs.pop((stage - 1, micro)) if found is None else found

    def gradient(self, stage: int, micro: int) -> Tensor:
        """What the loss gave, was received, or was left by the stage after."""
        found = self.gradients.pop((stage, micro), None)
        return self.returns.pop((stage + 1, micro)) if found is None else found

    def send_output(self, one: Instruction) -> None:
        if not self.feed.empty(one.micro):
            self.post.send(one, self.outputs.pop((one.stage, one.micro)), self.deadline)

    def recv_input(self, one: Instruction) -> None:
        if not self.feed.empty(one.micro):
            self.inputs[one.stage, one.micro] = self.post.expect(one, self.deadline)

    def send_gradient(self, one: Instruction) -> None:
        if not self.feed.empty(one.micro):
            self.post.send(one, self.returns.pop((one.stage, one.micro)), self.deadline)

    def recv_gradient(self, one: Instruction) -> None:
        if not self.feed.empty(one.micro):
            self.gradients[one.stage, one.micro] = self.post.expect(one, self.deadline)


class PlanExecutor:
    """One rank: its stages, its data, and the instructions it runs."""

    def __init__(
        self,
        world: RankContext,
        settings: Settings,
        blocks: Sequence[nn.Module],
        cut: Sequence[int],
        plan: Plan,
        data: Dataset,
        criterion: Criterion,
        vectors: StateVectors,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.world, self.settings, self.criterion, self.rank = world, settings, criterion, world.rank
        self.clock, self.last = InstructionProfiler(), plan.stages - 1
        self.owed = DeferredUpdates(self.clock)
        rows = -(-settings.batch_size // plan.micros)
        self.flow = ActivationFlow(
            DataFeed(data, settings.seed, rows), TensorChannel(world.communicator.endpoint)
        )
        bounds, chain = [*cut, len(blocks)], layers_of(blocks) is not None
        self.held: dict[int, StageState] = {}
        hold = holder(accelerator, plan, settings)
        for stage in plan.held_by(world.rank):
            low, high = bounds[stage], bounds[stage + 1]
            how = settings, f"stage{stage}.", not plan.servers, chain
            self.held[stage] = hold(vectors, blocks[low:high], low, *how)
        self._lowest = min(self.held, default=0)
        self._norm = GradientNorm(world, settings, blocks, bounds)
        self._objective = Objective(criterion)
        self._totals: dict[int, GradientReducer] = {}
        self._handlers: dict[InstructionKind, Callable[[Instruction], None]] = {
            InstructionKind.LOAD: self.flow.load,
            InstructionKind.FORWARD: self._forward,
            InstructionKind.BACKWARD: self._backward,
            InstructionKind.BACKWARD_INPUT: self._backward_input,
            InstructionKind.BACKWARD_WEIGHT: self._backward_weight,
            InstructionKind.SEND_OUTPUT: self.flow.send_output,
            InstructionKind.RECV_INPUT: self.flow.recv_input,
            InstructionKind.SEND_GRADIENT: self.flow.send_gradient,
            InstructionKind.RECV_GRADIENT: self.flow.recv_gradient,
            InstructionKind.REDUCE: self._reduce,
            InstructionKind.UPDATE: self._update,
        }
        self._figures: dict[int, Figures] = {}
        self._waited, self._position = 0.0, Position(0, 0, 0)
        slow = settings.slowdown
        self.drag: float = slow[world.rank] - 1 if world.rank < len(slow) else 0
        self.rate, self.sent = 0.0, 0
        self.norm_scale: float | None = None
        self.computed: list[int] = []
        """Shards of the step under way that are in their slots, in the order they came."""
        self.updated = -1
        """Steps up to the last update."""
        self._joint: BatchedShards | None = None
        self.joint_most = 1
        if plan.stages == 1 and self._objective.by_hand is not None:
            whole = self.held.get(0)
            self.joint_most = batchable(world, whole, rows, settings.timeout_s)
            if self.joint_most > 1 and whole is not None:
                self._joint = BatchedShards(self.feed, whole, self.clock, rows)
        self.follow(plan)

    @property
    def feed(self) -> DataFeed:
        """Where samples come from."""
        return self.flow.feed

    @property
    def post(self) -> TensorChannel:
        """Where tensors for other ranks go."""
        return self.flow.post

    @property
    def bytes_sent(self) -> int:
        """Bytes that went to other ranks: over links, or through their memory."""
        return self.sent + self.post.endpoint.bytes_sent + sum(one.moved for one in self._totals.values())

    def close(self) -> None:
        """Ends the threads that add up."""
        for one in self._totals.values():
            one.close()

    # ---- plans

    def move(self, world: RankContext) -> None:
        """The same rank's work among others: the members have changed."""
        self.sent += self.post.endpoint.bytes_sent
        self.world, self.rank = world, world.rank
        self.flow.post = TensorChannel(world.communicator.endpoint)
        self._norm.move(world)

    def follow(self, plan: Plan, holdings: Sequence[MergePlan] | None = None) -> None:
        """Goes over to this plan, with all other ranks; the stages must be held by the same ranks.

        ``holdings``: what each rank holds in the end, where they have something already.
        """
        deadline = time.monotonic() + self.settings.timeout_s
        self.plan = plan
        self.sent += sum(one.moved for one in self._totals.values())
        self.close()
        for stage, held in sorted(self.held.items()):
            ranks = plan.holders[stage]
            if holdings is None:
                holdings = [merge_plan(plan.computed_by(rank, stage), plan.micros) for rank in ranks]
            mine: MergePlan = holdings[ranks.index(self.rank)]
            held.arrange(mine, most_slots(plan, self.settings.balance))
            if not plan.servers:  # who add up what they are sent
                group = self.world.communicator if len(ranks) == self.world.size else self.world.group(ranks)
                self._totals[stage] = GradientReducer(group, holdings, plan.micros, held, deadline)
            holdings = None
        most = self.joint_most if self._joint is not None else 1
        self._program = list(grouped(plan.ranks[self.rank], most))
        grads = [one for one in plan.ranks[self.rank] if one.kind in GRADIENT_KINDS]
        self._final_gradient = grads[-1] if grads else None
        self._share = len({one.micro for one in grads})

    # ---- a step

    def begin(
        self, position: Position, samples: Indices, stop: bool = False, computed: Sequence[int] = ()
    ) -> None:
        """A step on these samples; ``stop`` asks everybody to stop after it, ``computed`` shards are in their slots."""
        self._stop, self._position = stop, position
        self.feed.begin(position, samples, self.plan.micros)
        self.computed = list(computed)
        self._deadline = self.flow.deadline = time.monotonic() + self.settings.timeout_s
        self.norm_scale, self._busy = None, 0.0
        for held in self.held.values():
            held.begin()

    def step(
        self, position: Position, samples: Indices, stop: bool = False, computed: Sequence[int] = ()
    ) -> None:
        """Runs the plan on these samples."""
        self.begin(position, samples, stop, computed)
        clock, handlers, joint = self.clock, self._handlers, self._joint
        for run in self._program:
            if joint is not None and joint.possible(run):
                joint(run, self._spent, self._joined)
                continue
            for instruction in run:
                started, self._waited = now(), 0.0
                handlers[instruction.kind](instruction)
                clock.note(instruction, started, now(), self._waited)
        self.post.endpoint.flush(self._deadline)

    def handle(self, handlers: Mapping[InstructionKind, Callable[[Instruction], None]]) -> None:
        """These kinds are somebody else's business from now on: a role's."""
        self._handlers |= handlers

    def before(self, look: Callable[[int, Instruction], None]) -> None:
        """``look`` sees every instruction first, with its step, from 1; shards are computed one by one then."""

        def seen(handler: Callable[[Instruction], None], instruction: Instruction) -> None:
            look(self._position.done + 1, instruction)
            handler(instruction)

        self._handlers = {kind: partial(seen, handler) for kind, handler in self._handlers.items()}
        self._joint = None

    def at(self, position: Position) -> None:
        """What follows belongs to this step, for code that looks at instructions; ``begin`` implies it."""
        self._position = position

    def do(self, instruction: Instruction) -> None:
        """One instruction, for whoever decides what comes next."""
        self._handlers[instruction.kind](instruction)

    def _forward(self, instruction: Instruction) -> None:
        stage, micro = instruction.stage, instruction.micro
        if self.feed.empty(micro):
            return
        started = now()
        outputs = self.held[stage].forward(micro, self.flow.input(stage, micro), self.feed.seed(micro))
        if stage == self.last:
            self._measure(micro, outputs)
        else:
            self.flow.outputs[stage, micro] = outputs
        self._spent(started)

    def _measure(self, micro: int, outputs: Tensor) -> None:
        """The loss of a micro-batch and the gradient it starts backward with."""
        targets = self.held[self.last].near(self.feed.targets(micro))
        loss, gradient = self._objective(outputs, targets, self.feed.batch_size)
        self._figures[micro] = (loss, 0.0, float(len(targets)))
        self.flow.gradients[self.last, micro] = gradient

    def _backward(self, instruction: Instruction) -> None:
        stage, micro = key = instruction.stage, instruction.micro
        held = self.held[stage]
        if self.feed.empty(micro):
            held.skipped(micro)
            self.computed.append(micro)
        else:
            started = now()
            totals = self._totals.get(stage) if instruction is self._final_gradient else None
            early = totals is not None and bool(totals.buckets)
            after = partial(totals.start, micro=micro, deadline=self._deadline) if totals and early else None
            gradient = held.near(self.flow.gradient(*key))
            given = held.stage.backward(micro, gradient, held.into(micro), stage > 0, after)
            if given is not None:
                self.flow.returns[key] = given
            self._landed(held, stage, micro, merged=early)
            self._spent(started)
        self._tell_speed(instruction)

    def _backward_input(self, instruction: Instruction) -> None:
        stage, micro = key = instruction.stage, instruction.micro
        if not self.feed.empty(micro):
            started = now()
            held = self.held[stage]
            given = held.stage.backward_input(micro, held.near(self.flow.gradient(*key)), stage > 0)
            if given is not None:
                self.flow.returns[key] = given
            self._spent(started)

    def _backward_weight(self, instruction: Instruction) -> None:
        stage, micro = instruction.stage, instruction.micro
        held = self.held[stage]
        if self.feed.empty(micro):
            held.skipped(micro)
            self.computed.append(micro)
        else:
            started = now()
            held.stage.backward_weight(micro, held.into(micro))
            self._landed(held, stage, micro)
            self._spent(started)
        self._tell_speed(instruction)

    def _landed(self, held: StageState, stage: int, micro: int, merged: bool = False) -> None:
        figures = self._figures.pop(micro, NOTHING) if stage == self.last else NOTHING
        held.landed(micro, figures, self.feed.full, self.feed.prints.get(micro, 0), merged)
        self.computed.append(micro)
        if stage == self._lowest:
            self.feed.release(micro)

    def _spent(self, started: float) -> None:
        """Computed since then; a device that is to be slow takes its time."""
        seconds = now() - started
        if self.drag:
            time.sleep(min(self.drag * seconds, 2.0))  # one that was stopped did not compute all the time
        self._busy += (1 + self.drag) * seconds

    def _joined(self, instruction: Instruction) -> None:
        self.computed.append(instruction.micro)
        self._tell_speed(instruction)

    def _tell_speed(self, instruction: Instruction) -> None:
        """With the last gradient: how long a shard takes here. Everybody learns it by the sum."""
        if instruction is self._final_gradient:
            seconds, asked = self._busy / max(1, self._share), (self._stop, self.world.moving())
            self.held[instruction.stage].tell(instruction.micro, self.rank, seconds, *asked)

    def _reduce(self, instruction: Instruction) -> None:
        self._waited = self._totals[instruction.stage](self._deadline)

    def _update(self, instruction: Instruction) -> None:
        if self.norm_scale is None:
            self.norm_scale = self._norm.scale(self.held, self.plan)
        held, done = self.held[instruction.stage], self._position.done
        held.summed(done, self.norm_scale)
        self.owed(partial(held.finish, self.rate, done), instruction)
        self.computed, self.updated = [], done + 1
