"""Parameter servers: workers compute gradients, servers own the weights, one slice of them each.

    worker (ServerClientRole)                      server (ParameterServerRole), one per slice
    GET: receive every slice of the weights   ◀──  GIVE: send its slice to a worker
    forward and backward of its shards
    PUSH: send its gradient, slice by slice   ──▶  TAKE: receive a worker's gradient of the slice
                                                   REDUCE, UPDATE: sum the gradients, update the slice

    bsp        a server gives to all workers, takes from all, sums the workers' tree nodes along the fixed tree, and
               updates once per step: the bits of data parallel
    asp, ssp   a server makes an update for each push, in the order of its rule (``strategies/parameter_server.py``)

The weights are cut into slices of consecutive elements (``stage/weight_slices.py``); ``server_shard.py`` has the state
of one. The last server has the tail, so it knows the losses and reports them.

On GPUs of one host, weights and gradients go from GPU to GPU (``peer_tensors.py``), and servers sum on their GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.reduction import Array
from hoop.collectives.shard_tree import Leaf, Sum, merge_plan, sum_expression
from hoop.engine.executor import PlanExecutor
from hoop.engine.fault_tolerance.checkpoint_format import MOMENT, restore, tensors_of
from hoop.engine.fault_tolerance.state_slices import FlatState, LiveSlice
from hoop.engine.job import names_of
from hoop.engine.roles.base import RankRole
from hoop.engine.roles.rule_executor import RuleExecutor
from hoop.engine.roles.server_shard import GpuServerShard, PeerServerShard, ServerShard, ServerShardSpec
from hoop.engine.stage.gpu_stage import GpuStageState
from hoop.engine.stage.gradient_reduction import clip_scale
from hoop.engine.stage.state import LOSS, TAIL, StateLayout, StateVectors, squared_norms
from hoop.engine.stage.weight_slices import (
    ParameterPiece,
    collect_moments,
    parameter_pieces,
    weight_slices,
)
from hoop.engine.step_schedule import StepWork
from hoop.engine.tensor_channel import TensorReceiver
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.strategies.base import Strategy
from hoop.transport.base import PendingSend

ASYNC_STRIDE = 32
"""Number of steps between two synchronisation points of an asynchronous strategy. There, all ranks can agree to stop,
and the model can be evaluated. At most this many steps are run again when a device is lost."""


class _ServerStrategyRole(RankRole):
    """A rank of a parameter server strategy, worker or server."""

    def __init__(self, executor: PlanExecutor, strategy: Strategy) -> None:
        super().__init__(executor)
        self._strategy = strategy
        self._works: Sequence[StepWork] = ()
        self.stride = 1 if strategy.synchronous else ASYNC_STRIDE

    @property
    def sees_stop_vote(self) -> bool:
        return False

    @property
    def num_checkpoint_parts(self) -> int:
        return 1 + len(self.executor.plan.servers)

    def _run(self, works: Sequence[StepWork], execute: Callable[[Instruction], None], receiver: TensorReceiver) -> None:
        """Run these steps: the plan's list of instructions, or ``execute`` those of the strategy's rule."""
        executor = self.executor
        rule = self._strategy.rule(executor.plan, executor.rank, len(works))
        if rule is not None:
            RuleExecutor(executor, rule, len(works), execute, receiver=receiver).run()
            return
        for work in works:
            executor.step(work.position, work.samples)


# ---- client side


class ServerClientRole(_ServerStrategyRole):
    """A worker: receives the weights, computes its shards, pushes their gradient.

    It holds a copy of the weights and gradient slots, but neither optimizer state nor a total. Weights are received
    directly into the model: a server sends them only to a worker that has pushed, and such a worker does not compute.
    """

    def __init__(self, executor: PlanExecutor, strategy: Strategy) -> None:
        super().__init__(executor, strategy)
        self._stage_state = executor.stage_states[0]
        self._slices = weight_slices(self._stage_state.layout, len(executor.plan.servers))
        mine = executor.plan.computed_by(executor.rank, 0)
        self._node_slots = [slot for _, slot in merge_plan(mine, executor.plan.num_microbatches).nodes]
        self._device_state: GpuStageState | None = None
        """State of the stage, if the servers read gradients on its GPU, and write weights there; else None."""
        if isinstance(self._stage_state, GpuStageState) and shares_memory(executor, executor.plan.servers):
            self._device_state = self._stage_state
            self._device_state.keep_rows()
        self._step, self._slices_received = -1, 0
        executor.register_handlers({InstructionKind.GET: self._get, InstructionKind.PUSH: self._push})

    @property
    def is_reporter(self) -> bool:
        return False

    # ---- steps

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        self._works, self._step, self._slices_received = works, -1, 0
        self._run(works, self._execute, self._weights_of)
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
            if self._device_state is None:
                self._stage_state.on_arena_change()
            self._stage_state.begin()  # shards start from the buffers that were received

    def _weights_of(self, message: Instruction) -> Tensor:
        """Return the elements of the weight vector into which a slice is received."""
        part, device_state = self._slices[message.stage], self._device_state
        weights = self._stage_state.state if device_state is None else device_state.received_weights()
        return weights[part.low : part.high]

    def _push(self, instruction: Instruction) -> None:
        stage_state, part = self._stage_state, self._slices[instruction.stage]
        if not self._strategy.synchronous and instruction.stage == 0:
            self._sum_nodes()
        nodes = self._node_slots if self._strategy.synchronous else self._node_slots[:1]
        if self._device_state is not None:
            self.executor.activations.send(instruction, self._device_state.pushed(nodes, part), self.deadline())
        else:
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
            if self._device_state is not None:
                self._device_state.add_slots(first, other)
            else:
                np.add(slots[first], slots[other], out=slots[first])

    def refresh(self) -> None:
        for number, server in enumerate(self.executor.plan.servers):
            self._get(Instruction(InstructionKind.GET, number, peer=server))

    # ---- for fault tolerance

    def flat_states(self) -> list[FlatState]:
        return []  # the weights are a copy

    def totals(self) -> list[Array]:
        return []

    def live_slices(self, model: nn.Module) -> list[LiveSlice]:
        """Return counters, which every worker with shards has and no server, and frozen parameters."""
        if not self.executor.plan.ranks[self.executor.rank]:
            return []
        names, layout = names_of(model), self._stage_state.layout
        tensors = [*layout.counters, *layout.frozen]
        return [LiveSlice(names[id(one)], 0, one.detach().contiguous().view(-1)) for one in tensors]


# ---- server side


class ParameterServerRole(_ServerStrategyRole):
    """A server: owns one slice of the weights and of the optimizer state."""

    def __init__(
        self, executor: PlanExecutor, strategy: Strategy, blocks: Sequence[nn.Module], vectors: StateVectors
    ) -> None:
        super().__init__(executor, strategy)
        plan = executor.plan
        self._layout = StateLayout(blocks, plan.num_microbatches)
        self._number = plan.servers.index(executor.rank)
        self._is_last = self._number == len(plan.servers) - 1
        self._slices = weight_slices(self._layout, len(plan.servers))
        self._pieces = parameter_pieces(self._layout, self._slices)
        self._active_workers = [rank for rank in plan.holders[0] if plan.ranks[rank]]
        self._rows, self._row_merges, self._total_row = _assign_rows(executor) if strategy.synchronous else ({}, [], 0)
        rows = sum(len(one) for one in self._rows.values()) or 1
        part = self._slices[self._number]
        spec = ServerShardSpec(part, self._layout, executor.settings.optimizer, rows)
        self._shard = _make_shard(executor, self._active_workers, vectors, spec)
        self._pending_gives: list[PendingSend] = []
        self._pushes: Counter[int] = Counter()
        """Number of pushes received from each worker since the last synchronisation point."""
        self._loss_sums: list[float] = []
        self._updates = 0
        """Number of updates since the first step, which Adam's bias correction needs."""
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

    # ---- steps

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        self._works, self._loss_sums = works, [0.0] * len(works)
        self._pushes.clear()
        self.provenance.forget(works[0].position.done)
        updates_per_step = 1 if self._strategy.synchronous else len(self._active_workers)
        self._updates = works[0].position.done * updates_per_step
        self._run(works, self._execute, self._rows_of)
        if not self._is_last:
            return []
        return [total / len(work.samples) for total, work in zip(self._loss_sums, works, strict=True)]

    def _execute(self, instruction: Instruction) -> None:
        if instruction.kind is InstructionKind.TAKE:
            self.executor.set_position(self._works[self._pushes[instruction.peer]].position)
        self.executor.execute(instruction)

    def _give(self, instruction: Instruction) -> None:
        shard = self._shard
        pending = self.executor.channel.send_or_copy(
            instruction,
            shard.device_weights(),
            lambda: torch.from_numpy(shard.current_weights()),
            self.deadline(),
        )
        if pending is not None:
            self._pending_gives.append(pending)

    def _take(self, instruction: Instruction) -> None:
        self.executor.channel.expect(instruction, self.deadline(), self._rows_of(instruction))
        self._step = self._pushes[instruction.peer]
        self._pushes[instruction.peer] += 1

    def _rows_of(self, message: Instruction) -> Tensor:
        """Return the gradient rows into which a worker's push is received."""
        rows = self._rows.get(message.peer, [0])
        return self._shard.received(rows[0], rows[-1])

    def _reduce(self, instruction: Instruction) -> None:
        for into, other in self._row_merges:
            self._shard.add_rows(into, other)

    def _update(self, instruction: Instruction) -> None:
        for pending in self._pending_gives:
            if not pending.done:
                pending.detach()  # copies the unsent bytes: the receiver gets the weights before this update
        self._pending_gives.clear()
        shard = self._shard
        shard.on_total(self._total_row)
        if clip := self.executor.settings.optimizer.clip:
            gradient = shard.gradient(self._total_row)
            shard.scale_gradient(
                self._total_row, float(clip_scale(squared_norms(self._layout.views_trained(gradient)), clip))
            )
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
        self._shard.download()
        channel, names, servers = self.executor.channel, names_of(model), self.executor.plan.servers
        count, deadline = len(self._shard.moments), self.deadline()
        moments = collect_moments(channel, servers, self._number, self._pieces, count, self._moment, deadline)
        found = {}
        for index, number, elements in moments:
            parameter = self._layout.parameters[number]
            found[f"{MOMENT}{index}.{names[id(parameter)]}"] = elements.view(parameter.shape)
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
        self._shard.on_arena_change()

    def _whole_state(self) -> _WholeState:
        return _WholeState(self._layout, [torch.zeros(self._layout.trained) for _ in self._shard.moments])

    # ---- for fault tolerance

    def flat_states(self) -> list[FlatState]:
        return [self._shard.flat_state()]

    def totals(self) -> list[Array]:
        return [self._shard.host_total(self._total_row)]

    def live_slices(self, model: nn.Module) -> list[LiveSlice]:
        self._shard.download()
        return self._shard.live_slices(self._layout, names_of(model))

    def restore_targets(self, model: nn.Module) -> dict[str, Tensor]:
        return tensors_of([self._whole_state()], names_of(model))


def _make_shard(
    executor: PlanExecutor, workers: Sequence[int], vectors: StateVectors, spec: ServerShardSpec
) -> ServerShard:
    """Make the state of a server: in the arena, or on a GPU; ``workers``: those that push."""
    if executor.accelerator is None:
        return ServerShard(vectors, spec)
    kind = PeerServerShard if shares_memory(executor, workers) else GpuServerShard
    return kind(executor.accelerator, vectors, spec)


def shares_memory(executor: PlanExecutor, ranks: Sequence[int]) -> bool:
    """Whether this rank and these ranks read each other's memory on their GPUs."""
    return executor.peer_memory is not None and executor.peer_memory.peers.issuperset(ranks)


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
