"""Parameter servers: workers compute gradients, servers own the weights, one slice of them each.

    worker (ServerClientRole)                      server (ParameterServerRole), one per slice
    GET: receive every slice of the weights   ◀──  GIVE: send its slice to a worker
    forward and backward of its shards
    PUSH: send its gradient, slice by slice   ──▶  TAKE: receive a worker's gradient of the slice
                                                   REDUCE, UPDATE: sum the gradients, update the slice

    bsp        a server gives to all workers, takes from all, sums the workers' tree nodes along the fixed tree, and
               updates once per step: the bits of data parallel
    asp, ssp   a server makes an update for each push, in the order of its rule (``strategies/parameter_server.py``)

The weights are cut into slices of consecutive elements (``ServerSlice``):

    | parameters … | buffers … | tail |        a gradient; the weights have no tail
    |  slice 0  |  slice 1  |  slice 2 |       cut at multiples of 64 elements; the last slice has the tail

Updates are elementwise, and no kernel has a remainder at a multiple of 64 elements. So the updates of the slices give
the same bits as one update of the whole vector. The last server has the tail, so it knows the losses and reports them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.reduction import Array
from hoop.collectives.shard_tree import Leaf, Sum, merge_plan, sum_expression
from hoop.engine.executor import PlanExecutor
from hoop.engine.fault_tolerance.checkpoint import MOMENT, restore, tensors_of
from hoop.engine.fault_tolerance.state_slices import FlatState, LiveSlice
from hoop.engine.job import names_of
from hoop.engine.optimizer_settings import OptimizerSettings
from hoop.engine.roles.base import RankRole
from hoop.engine.roles.rule_executor import RuleExecutor, expected_messages
from hoop.engine.stage.gradient_reduction import clip_scale
from hoop.engine.stage.optimizer import apply_update, make_update
from hoop.engine.stage.state import LOSS, PAD, TAIL, StateLayout, StateVectors, squared_norms
from hoop.engine.step_schedule import StepWork
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.plan import split_evenly
from hoop.strategies.base import Strategy
from hoop.transport.base import PendingSend

ASYNC_STRIDE = 32
"""Steps between two synchronisation points of an asynchronous strategy.

There, all ranks can agree to stop, and the model can be evaluated. At most this many steps are run again when a device
is lost.
"""


# ---- client side


class ServerClientRole(RankRole):
    """A worker: receives the weights, computes its shards, pushes their gradient.

    It holds a copy of the weights and gradient slots, but neither optimizer state nor a total. Weights are received
    directly into the model: a server sends them only to a worker that has pushed, and such a worker does not compute.
    """

    def __init__(self, executor: PlanExecutor, strategy: Strategy) -> None:
        super().__init__(executor)
        self._strategy = strategy
        self._stage_state = executor.stage_states[0]
        self._slices = server_slices(self._stage_state.layout, len(executor.plan.servers))
        mine = executor.plan.computed_by(executor.rank, 0)
        self._node_slots = [slot for _, slot in merge_plan(mine, executor.plan.num_microbatches).nodes]
        self._step, self._slices_received = -1, 0
        self._works: Sequence[StepWork] = ()
        self.stride = 1 if strategy.synchronous else ASYNC_STRIDE
        executor.register_handlers({InstructionKind.GET: self._get, InstructionKind.PUSH: self._push})

    @property
    def is_reporter(self) -> bool:
        return False

    @property
    def sees_stop_vote(self) -> bool:
        return False

    @property
    def num_checkpoint_parts(self) -> int:
        return 1 + len(self.executor.plan.servers)

    # ---- steps

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        executor = self.executor
        rule = self._strategy.rule(executor.plan, executor.rank, len(works))
        if rule is None:
            for work in works:
                executor.step(work.position, work.samples)
            return []
        self._works, self._step, self._slices_received = works, -1, 0
        expected = expected_messages(executor.plan, executor.rank, len(works))
        RuleExecutor(
            rule,
            executor.channel,
            expected,
            self._execute,
            executor.profiler,
            executor.settings.timeout_s,
            receiver=self._weights_of,
        ).run()
        return []

    def _execute(self, instruction: Instruction) -> None:
        """Execute an instruction of a rule, which numbers micro-batches over several steps."""
        if instruction.micro >= 0:
            step, micro = divmod(instruction.micro, self.executor.plan.num_microbatches)
            if step != self._step:
                self._step = step
                self.executor.begin(self._works[step].position, self._works[step].samples)
            instruction = instruction._replace(micro=micro)
        elif instruction.kind is InstructionKind.GET:  # a step begins with a GET of each slice
            self.executor.set_position(self._works[self._slices_received // len(self._slices)].position)
            self._slices_received += 1
        self.executor.execute(instruction)

    def _get(self, instruction: Instruction) -> None:
        self.executor.channel.expect(instruction, self.deadline(), self._weights_of(instruction))
        if instruction.stage == len(self._slices) - 1:
            self._stage_state.begin()  # shards start from the buffers that were received

    def _weights_of(self, message: Instruction) -> Tensor:
        """Return the elements of the weight vector into which a slice is received."""
        part = self._slices[message.stage]
        return self._stage_state.state[part.low : part.high]

    def _push(self, instruction: Instruction) -> None:
        stage_state, part = self._stage_state, self._slices[instruction.stage]
        if not self._strategy.synchronous and instruction.stage == 0:
            self._sum_nodes()
        nodes = self._node_slots if self._strategy.synchronous else self._node_slots[:1]
        rows = torch.from_numpy(stage_state.slots)[:, part.low : part.end]
        found = rows[nodes] if len(nodes) > 1 else rows[nodes[0]].unsqueeze(0)
        self.executor.channel.send(instruction, found, self.deadline())
        if instruction.stage == len(self._slices) - 1:
            self.executor.deferred_updates.submit(stage_state.advance_counters)

    def _sum_nodes(self) -> None:
        """Sum all shards of this worker. An asynchronous update is made of one worker's gradient only."""
        slots = self._stage_state.slots
        first, *others = self._node_slots
        for other in others:
            np.add(slots[first], slots[other], out=slots[first])

    def refresh(self) -> None:
        for number, server in enumerate(self.executor.plan.servers):
            self._get(Instruction(InstructionKind.GET, number, peer=server))

    # ---- for fault tolerance

    def flat_states(self) -> list[FlatState]:
        return []  # the weights are a copy

    def live_slices(self, model: nn.Module) -> list[LiveSlice]:
        """Return counters, which every worker with shards has and no server, and frozen parameters."""
        if not self.executor.plan.ranks[self.executor.rank]:
            return []
        names, layout = names_of(model), self._stage_state.layout
        tensors = [*layout.counters, *layout.frozen]
        return [LiveSlice(names[id(one)], 0, one.detach().contiguous().view(-1)) for one in tensors]


# ---- server side


class ParameterServerRole(RankRole):
    """A server: owns one slice of the weights and of the optimizer state."""

    def __init__(
        self, executor: PlanExecutor, strategy: Strategy, blocks: Sequence[nn.Module], vectors: StateVectors
    ) -> None:
        super().__init__(executor)
        plan = executor.plan
        self._strategy = strategy
        self._layout = StateLayout(blocks, plan.num_microbatches)
        self._number = plan.servers.index(executor.rank)
        self._is_last = self._number == len(plan.servers) - 1
        self._slices = server_slices(self._layout, len(plan.servers))
        self._pieces = parameter_pieces(self._layout, self._slices)
        self._active_workers = [rank for rank in plan.holders[0] if plan.ranks[rank]]
        self._rows, self._row_merges, self._total_row = _assign_rows(executor) if strategy.synchronous else ({}, [], 0)
        rows = sum(len(one) for one in self._rows.values()) or 1
        optimizer = executor.settings.optimizer
        self._shard = ServerShard(
            vectors, self._layout, self._slices[self._number], optimizer, rows, executor.update_device
        )
        self._pending_gives: list[PendingSend] = []
        self._pushes: Counter[int] = Counter()
        """Pushes received from each worker since the last synchronisation point."""
        self._works: Sequence[StepWork] = ()
        self._loss_sums: list[float] = []
        self._updates = 0
        """Number of updates since the first step, which Adam's bias correction needs."""
        self.stride = 1 if strategy.synchronous else ASYNC_STRIDE
        executor.register_handlers(
            {
                InstructionKind.GIVE: self._give,
                InstructionKind.TAKE: self._take,
                InstructionKind.REDUCE: self._reduce,
                InstructionKind.UPDATE: self._update,
            }
        )

    @property
    def is_reporter(self) -> bool:
        return self._is_last

    @property
    def sees_stop_vote(self) -> bool:
        return False

    @property
    def num_checkpoint_parts(self) -> int:
        return 1 + len(self.executor.plan.servers)

    # ---- steps

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        executor = self.executor
        self._works, self._loss_sums = works, [0.0] * len(works)
        self._pushes.clear()
        self.provenance.forget(works[0].position.done)
        updates_per_step = 1 if self._strategy.synchronous else len(self._active_workers)
        self._updates = works[0].position.done * updates_per_step
        rule = self._strategy.rule(executor.plan, executor.rank, len(works))
        if rule is None:
            for work in works:
                executor.step(work.position, work.samples)
        else:
            expected = expected_messages(executor.plan, executor.rank, len(works))
            RuleExecutor(
                rule,
                executor.channel,
                expected,
                self._execute,
                executor.profiler,
                executor.settings.timeout_s,
                receiver=self._rows_of,
            ).run()
        if not self._is_last:
            return []
        return [total / len(work.samples) for total, work in zip(self._loss_sums, works, strict=True)]

    def _execute(self, instruction: Instruction) -> None:
        if instruction.kind is InstructionKind.TAKE:
            self.executor.set_position(self._works[self._pushes[instruction.peer]].position)
        self.executor.execute(instruction)

    def _give(self, instruction: Instruction) -> None:
        pending = self.executor.channel.send(instruction, torch.from_numpy(self._shard.weights), self.deadline())
        if pending is not None:
            self._pending_gives.append(pending)

    def _take(self, instruction: Instruction) -> None:
        self.executor.channel.expect(instruction, self.deadline(), self._rows_of(instruction))
        self._step = self._pushes[instruction.peer]
        self._pushes[instruction.peer] += 1

    def _rows_of(self, message: Instruction) -> Tensor:
        """Return the gradient rows into which a worker's push is received."""
        rows = self._rows.get(message.peer, [0])
        return torch.from_numpy(self._shard.rows[rows[0] : rows[-1] + 1])

    def _reduce(self, instruction: Instruction) -> None:
        rows = self._shard.rows
        for into, other in self._row_merges:
            np.add(rows[into], rows[other], out=rows[into])

    def _update(self, instruction: Instruction) -> None:
        for pending in self._pending_gives:
            if not pending.done:
                pending.detach()  # copies the unsent bytes: the receiver gets the weights before this update
        self._pending_gives.clear()
        shard, clip = self._shard, self.executor.settings.optimizer.clip
        scale = 1.0
        if clip:
            gradient = torch.from_numpy(shard.rows[self._total_row]).to(self.executor.update_device)
            scale = float(clip_scale(squared_norms(self._layout.views_trained(gradient)), clip))
        shard.scale_gradient(self._total_row, scale)
        rate = self._works[self._step].rate
        self.executor.deferred_updates.submit(
            partial(shard.apply_update, self._total_row, rate, self._updates), instruction
        )
        self._updates += 1
        if self._is_last:
            tail = shard.tail(self._total_row)
            self._loss_sums[self._step] += float(tail[LOSS])
            self.provenance.record(self._works[self._step].position.done, tail[TAIL:], more=True)

    # ---- evaluation and checkpoints

    def refresh(self) -> None:
        for rank in self.executor.plan.holders[0]:
            self._give(Instruction(InstructionKind.GIVE, self._number, peer=rank))
        self._pending_gives.clear()
        self.executor.channel.endpoint.flush(self.deadline())

    def checkpoint_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the optimizer state of the parameters that begin in this slice.

        Elements of such a parameter in later slices are received from the servers of those slices.
        """
        channel, names, servers = self.executor.channel, names_of(model), self.executor.plan.servers
        for piece in self._pieces[self._number]:
            if piece.first_slice != self._number:
                for index in range(len(self._shard.moments)):
                    leaving = Instruction(InstructionKind.GIVE, piece.parameter, index, servers[piece.first_slice])
                    channel.send(leaving, self._moment(index, piece), self.deadline())
        found = {}
        for piece in self._pieces[self._number]:
            if piece.first_slice == self._number:
                parameter = self._layout.parameters[piece.parameter]
                for index in range(len(self._shard.moments)):
                    elements = [self._moment(index, piece)]
                    for number in range(self._number + 1, len(servers)):
                        if any(other.parameter == piece.parameter for other in self._pieces[number]):
                            arriving = Instruction(InstructionKind.GET, piece.parameter, index, servers[number])
                            elements.append(channel.expect(arriving, self.deadline()))
                    found[f"{MOMENT}{index}.{names[id(parameter)]}"] = torch.cat(elements).view(parameter.shape)
        channel.endpoint.flush(self.deadline())
        return found

    def _moment(self, index: int, piece: ParameterPiece) -> Tensor:
        low = self._shard.part.low
        return self._shard.moments[index][piece.low - low : piece.high - low]

    def restore(self, model: nn.Module, tensors: Mapping[str, Tensor], done: int) -> None:
        whole = self._whole_state()
        restore([whole], model, tensors)
        self._shard.load_weights(self._layout)
        self._shard.load_moments(whole.moments)

    def _whole_state(self) -> _WholeState:
        return _WholeState(self._layout, [torch.zeros(self._layout.trained) for _ in self._shard.moments])

    # ---- for fault tolerance

    def flat_states(self) -> list[FlatState]:
        return [self._shard.flat_state(self._total_row)]

    def live_slices(self, model: nn.Module) -> list[LiveSlice]:
        return self._shard.live_slices(self._layout, names_of(model))

    def restore_targets(self, model: nn.Module) -> dict[str, Tensor]:
        return tensors_of([self._whole_state()], names_of(model))


@dataclass
class _WholeState:
    """The weights of the whole model, and room for its optimizer state, while a checkpoint is read."""

    layout: StateLayout
    moments: list[Tensor]


def _assign_rows(executor: PlanExecutor) -> tuple[dict[int, list[int]], list[tuple[int, int]], int]:
    """Assign gradient rows to the tree nodes of all workers.

    Returns the rows of each worker; the merges (into, other) along the reduction tree; the row of the total.
    """
    plan = executor.plan
    ranks = plan.holders[0]
    holdings = [merge_plan(plan.computed_by(rank, 0), plan.num_microbatches) for rank in ranks]
    rows: dict[int, list[int]] = {}
    row_of: dict[Leaf, int] = {}
    for index, (rank, one) in enumerate(zip(ranks, holdings, strict=True)):
        for _, slot in one.nodes:
            rows.setdefault(rank, []).append(len(row_of))
            row_of[Leaf(index, slot)] = len(row_of)
    merges: list[tuple[int, int]] = []

    def build(part: Sum) -> int:
        if isinstance(part, Leaf):
            return row_of[part]
        left, right = build(part[0]), build(part[1])
        merges.append((left, right))
        return left

    total = build(sum_expression(holdings, plan.num_microbatches))
    return rows, merges, total


# ---- the shard of a server


@dataclass(frozen=True)
class ServerSlice:
    """Elements ``[low, high)`` of the weights; its gradient is ``[low, end)``, for the last slice with the tail."""

    low: int
    high: int
    end: int
    trained: int
    """Number of its elements that the optimizer updates; the rest are buffers."""

    @property
    def weights(self) -> int:
        return self.high - self.low

    @property
    def width(self) -> int:
        """Elements of its gradient."""
        return self.end - self.low


def server_slices(layout: StateLayout, servers: int) -> list[ServerSlice]:
    """Cut the weights into one slice per server; with fewer units of 64 elements, the last slices are empty."""
    found = []
    for part in split_evenly(layout.state // PAD, servers):
        low, high = part.start * PAD, part.stop * PAD
        found.append(ServerSlice(low, high, high, max(0, min(high, layout.trained) - low)))
    last = found[-1]
    found[-1] = ServerSlice(last.low, last.high, layout.total, last.trained)
    return found


@dataclass(frozen=True)
class ParameterPiece:
    """The elements of a parameter that are in one slice: ``[low, high)`` of the whole vector."""

    parameter: int
    low: int
    high: int
    first_slice: int
    """The slice in which the parameter begins."""


def parameter_pieces(layout: StateLayout, parts: list[ServerSlice]) -> list[list[ParameterPiece]]:
    """Return the pieces of parameters in each slice, in order."""
    found: list[list[ParameterPiece]] = [[] for _ in parts]
    for index, parameter in enumerate(layout.parameters):
        start = layout.offsets[index]
        stop = start + parameter.numel()
        first_slice = next((number for number, one in enumerate(parts) if one.low <= start < one.high), 0)
        for number, one in enumerate(parts):
            low, high = max(start, one.low), min(stop, one.high)
            if low < high:
                found[number].append(ParameterPiece(index, low, high, first_slice))
    return found


class ServerShard:
    """The state of one server in the arena: its slice of the weights, optimizer state, and rows for gradients."""

    def __init__(
        self,
        vectors: StateVectors,
        layout: StateLayout,
        part: ServerSlice,
        optimizer: OptimizerSettings,
        rows: int,
        device: torch.device,
    ) -> None:
        """``rows``: number of gradients that it holds at a time. ``device``: where updates are computed."""
        self.part = part
        self.weights: Array = vectors.new("slice.weights", part.weights)
        self._trained = torch.from_numpy(self.weights[: part.trained])
        self.moments = [
            torch.from_numpy(vectors.new(f"slice.moment{index}", part.trained))
            for index in range(optimizer.num_moments)
        ]
        self.rows: Array = vectors.new("slice.gradients", rows * part.width).reshape(rows, part.width)
        self._update = make_update(optimizer, self._trained, self.moments, device)
        self.load_weights(layout)

    def load_weights(self, layout: StateLayout) -> None:
        """Copy the slice out of the model's tensors."""
        whole = torch.zeros(layout.state)
        with torch.no_grad():
            for view, tensor in zip(layout.views(whole), layout.tensors, strict=True):
                view.copy_(tensor)
        np.copyto(self.weights, whole[self.part.low : self.part.high].numpy())

    def load_moments(self, wholes: list[Tensor]) -> None:
        for moment, whole in zip(self.moments, wholes, strict=True):
            moment.copy_(whole[self.part.low : self.part.low + self.part.trained])

    def scale_gradient(self, row: int, scale: float) -> None:
        if scale != 1.0:
            torch.from_numpy(self.rows[row, : self.part.trained]).mul_(scale)

    def apply_update(self, row: int, rate: float, step: int) -> None:
        """Update the slice with the gradient in a row."""
        apply_update(self._update, self.weights, self.part.trained, self.rows[row], rate, step)

    def tail(self, row: int) -> Array:
        """Return the tail of the gradient in a row; only the last slice has one."""
        return self.rows[row, self.part.weights :]

    def flat_state(self, row: int) -> FlatState:
        return FlatState(self.weights, self.part.trained, self.moments, self.rows[row, : self.part.weights])

    def live_slices(self, layout: StateLayout, names: Mapping[int, str]) -> list[LiveSlice]:
        """Return weights and optimizer state as slices of the model's tensors."""
        found = []
        part, vectors = self.part, [torch.from_numpy(self.weights), *self.moments]
        for index, (offset, tensor) in enumerate(zip(layout.offsets, layout.tensors, strict=True)):
            low, high = max(offset, part.low), min(offset + tensor.numel(), part.high)
            trained = index < len(layout.parameters)
            for number, vector in enumerate(vectors if trained else vectors[:1]):
                prefix = f"{MOMENT}{number - 1}." if number else ""
                if low < high:
                    elements = vector[low - part.low : high - part.low]
                    found.append(LiveSlice(prefix + names[id(tensor)], low - offset, elements))
        return found
