"""Data parallel with a sharded update (ZeRO stage 1): every rank holds the whole model and updates a slice of it.

    GATHER    the other ranks' slices of the weights, if they were updated since      at the beginning of a step
    LOAD, FORWARD, BACKWARD                                                           as in data parallel
    REDUCE    sum the gradients of the slice (reduce-scatter), and the tail
    UPDATE    update the slice: at the commit, when the gradient is at the holder of the slice's replica

The slice of weights and optimizer state is this rank's part of the state, as of a rank of a pipeline: it is replicated,
and moves when the membership changes (``fault_tolerance/manager.py``). The rest of the weights is a copy, which no rank
offers in a recovery. So a loss while ranks gather the weights does no harm.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hoop.collectives.reduction import Array
from hoop.engine.executor import PlanExecutor
from hoop.engine.fault_tolerance.checkpoint_format import MOMENT, restore, tensors_of
from hoop.engine.fault_tolerance.state_slices import FlatState, LiveSlice, slices_of_part
from hoop.engine.job import names_of
from hoop.engine.roles.base import RankRole
from hoop.engine.stage.sharded_update import ShardedGradientReducer, ShardedStageState
from hoop.engine.stage.weight_slices import ParameterPiece, collect_moments, parameter_pieces
from hoop.engine.step_schedule import StepWork
from hoop.errors import FailedPrecondition
from hoop.plan.instructions import Instruction, InstructionKind


class ShardedDataRole(RankRole):
    """A rank that holds the whole model, computes shards, and updates one slice of the weights."""

    def __init__(self, executor: PlanExecutor) -> None:
        super().__init__(executor)
        state = executor.stage_states[0]
        assert isinstance(state, ShardedStageState), "the plan has a sharded update"
        self._state = state
        self._ranks = executor.plan.holders[0]
        self._number = self._ranks.index(executor.rank)
        self._pieces = parameter_pieces(state.layout, state.parts)

    @property
    def num_checkpoint_parts(self) -> int:
        return len(self._ranks)

    # ---- steps

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        self.refresh()
        return super().advance(works, stop)

    def refresh(self) -> None:
        """Collective. Get the slices of the weights that other ranks have updated. All ranks are at the same step."""
        if not self._state.stale:
            return
        reducer, started = self.executor.reducer(0), time.perf_counter()
        assert isinstance(reducer, ShardedGradientReducer), "the plan has a sharded update"
        waited = reducer.gather(self.deadline())
        instruction = Instruction(InstructionKind.GATHER, 0)
        self.executor.profiler.record(instruction, started, time.perf_counter(), waited)

    # ---- checkpoints

    def checkpoint_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the moments of parameters that begin in my slice; the first rank adds weights and buffers."""
        executor, state, names = self.executor, self._state, names_of(model)
        found = tensors_of([state], names) if self._number == 0 else {}
        count, deadline = len(state.slice_moments), self.deadline()
        moments = collect_moments(
            executor.channel, self._ranks, self._number, self._pieces, count, self._moment, deadline
        )
        for index, number, elements in moments:
            parameter = state.layout.parameters[number]
            found[f"{MOMENT}{index}.{names[id(parameter)]}"] = elements.view(parameter.shape)
        executor.channel.endpoint.flush(deadline)
        return found

    def _moment(self, index: int, piece: ParameterPiece) -> Tensor:
        low = self._state.part.low
        return self._state.slice_moments[index][piece.low - low : piece.high - low]

    def restore(self, model: nn.Module, tensors: Mapping[str, Tensor], done: int) -> None:
        state, names = self._state, names_of(model)
        restore([state], model, tensors)
        for piece in self._pieces[self._number]:
            parameter, start = state.layout.parameters[piece.parameter], state.layout.offsets[piece.parameter]
            for index in range(len(state.slice_moments)):
                name = f"{MOMENT}{index}.{names[id(parameter)]}"
                if name not in tensors or tensors[name].shape != parameter.shape:
                    raise FailedPrecondition(
                        f"checkpoint: no {name} of {list(parameter.shape)}; is it of another model or optimizer?"
                    )
                elements = tensors[name].reshape(-1)[piece.low - start : piece.high - start]
                self._moment(index, piece).copy_(elements)
        state.stale = False

    # ---- for fault tolerance

    def live_slices(self, model: nn.Module) -> list[LiveSlice]:
        """Return the slice of weights and moments, and what every rank has: counters and frozen parameters."""
        executor, state, names = self.executor, self._state, names_of(model)
        part = state.part
        weights = state.state[part.low : part.high]
        found = slices_of_part(state.layout, (part.low, part.high), weights, state.slice_moments, names)
        # Without shards, this rank's counters do not advance.
        counters = state.layout.counters if executor.plan.computed_by(executor.rank, 0) else []
        return found + [
            LiveSlice(names[id(one)], 0, one.detach().contiguous().view(-1))
            for one in (*counters, *state.layout.frozen)
        ]

    def flat_states(self) -> list[FlatState]:
        state, part = self._state, self._state.part
        weights = state.state_array[part.low : part.high]
        return [FlatState(weights, part.trained, state.slice_moments)]

    def totals(self) -> list[Array]:
        return [self._state.slice_total[: self._state.part.weights]]

    def restore_targets(self, model: nn.Module) -> dict[str, Tensor]:
        """Return all weights, and the moments of parameters of which a piece is in my slice."""
        names, parameters = names_of(model), self._state.layout.parameters
        found = tensors_of([self._state], names)
        for piece in self._pieces[self._number]:
            parameter = parameters[piece.parameter]
            for index in range(len(self._state.slice_moments)):
                found[f"{MOMENT}{index}.{names[id(parameter)]}"] = torch.empty(parameter.shape)
        return found
