"""A worker executes one rank's part of a plan.

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

from hoop.collectives.shards import Holding, holding
from hoop.data.dataset import Dataset, Indices
from hoop.engine.clockwork import Clockwork, now
from hoop.engine.feed import Feed, Position
from hoop.engine.messages import Post
from hoop.engine.owed import Owed
from hoop.engine.settings import Settings
from hoop.engine.slots import most_slots
from hoop.engine.stages.accelerator import Accelerator
from hoop.engine.stages.chain import layers_of
from hoop.engine.stages.clipping import Norm
from hoop.engine.stages.flow import Flow
from hoop.engine.stages.held import NOTHING, Figures, Held
from hoop.engine.stages.joint import Joint, grouped, joinable
from hoop.engine.stages.losses import Criterion, Objective
from hoop.engine.stages.mirrored import holder
from hoop.engine.stages.totals import Totals
from hoop.engine.stages.weights import Vectors
from hoop.engine.world import World
from hoop.plan.instructions import GRADIENT_KINDS, Instruction, Kind
from hoop.plan.plan import Plan


class Worker:
    """One rank: its stages, its data, and the instructions it runs."""

    def __init__(
        self,
        world: World,
        settings: Settings,
        blocks: Sequence[nn.Module],
        cut: Sequence[int],
        plan: Plan,
        data: Dataset,
        criterion: Criterion,
        vectors: Vectors,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.world, self.settings, self.criterion, self.rank = world, settings, criterion, world.rank
        self.clock, self.last = Clockwork(), plan.stages - 1
        self.owed = Owed(self.clock)
        rows = -(-settings.batch_size // plan.micros)
        self.flow = Flow(Feed(data, settings.seed, rows), Post(world.communicator.endpoint))
        bounds, chain = [*cut, len(blocks)], layers_of(blocks) is not None
        self.held: dict[int, Held] = {}
        hold = holder(accelerator, plan, settings)
        for stage in plan.held_by(world.rank):
            low, high = bounds[stage], bounds[stage + 1]
            how = settings, f"stage{stage}.", not plan.servers, chain
            self.held[stage] = hold(vectors, blocks[low:high], low, *how)
        self._lowest = min(self.held, default=0)
        self._norm = Norm(world, settings, blocks, bounds)
        self._objective = Objective(criterion)
        self._totals: dict[int, Totals] = {}
        self._handlers: dict[Kind, Callable[[Instruction], None]] = {
            Kind.LOAD: self.flow.load,
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_OUTPUT: self.flow.send_output,
            Kind.RECV_INPUT: self.flow.recv_input,
            Kind.SEND_GRADIENT: self.flow.send_gradient,
            Kind.RECV_GRADIENT: self.flow.recv_gradient,
            Kind.REDUCE: self._reduce,
            Kind.UPDATE: self._update,
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
        self._joint: Joint | None = None
        self.joint_most = 1
        if plan.stages == 1 and self._objective.by_hand is not None:
            whole = self.held.get(0)
            self.joint_most = joinable(world, whole, rows, settings.timeout_s)
            if self.joint_most > 1 and whole is not None:
                self._joint = Joint(self.feed, whole, self.clock, rows)
        self.follow(plan)

    @property
    def feed(self) -> Feed:
        """Where samples come from."""
        return self.flow.feed

    @property
    def post(self) -> Post:
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

    def move(self, world: World) -> None:
        """The same rank's work among others: the members have changed."""
        self.sent += self.post.endpoint.bytes_sent
        self.world, self.rank = world, world.rank
        self.flow.post = Post(world.communicator.endpoint)
        self._norm.move(world)

    def follow(self, plan: Plan, holdings: Sequence[Holding] | None = None) -> None:
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
                holdings = [holding(plan.computed_by(rank, stage), plan.micros) for rank in ranks]
            mine: Holding = holdings[ranks.index(self.rank)]
            held.arrange(mine, most_slots(plan, self.settings.balance))
            if not plan.servers:  # who add up what they are sent
                group = self.world.communicator if len(ranks) == self.world.size else self.world.group(ranks)
                self._totals[stage] = Totals(group, holdings, plan.micros, held, deadline)
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

    def handle(self, handlers: Mapping[Kind, Callable[[Instruction], None]]) -> None:
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

    def _landed(self, held: Held, stage: int, micro: int, merged: bool = False) -> None:
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
