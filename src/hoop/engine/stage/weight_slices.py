"""Slices of a model's weight vector, for ranks that update one slice each: parameter servers, and sharded updates.

    | parameters … | buffers … | tail |        a gradient; the weights have no tail
    |  slice 0  |  slice 1  |  slice 2 |       cut at multiples of 64 elements; the last slice has the tail

Updates are elementwise, and no kernel has a remainder at a multiple of 64 elements. So the updates of the slices give
the same bits as one update of the whole vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hoop.engine.stage.state import PAD, StateLayout
from hoop.engine.tensor_channel import TensorChannel
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.plan import split_evenly


@dataclass(frozen=True)
class WeightSlice:
    """Elements ``[low, high)`` of the weights; its gradient is ``[low, end)``, for the last slice with the tail."""

    low: int
    high: int
    end: int
    trained: int
    """Number of elements of the slice that the optimizer updates; the rest are buffers."""

    @property
    def weights(self) -> int:
        return self.high - self.low

    @property
    def width(self) -> int:
        """Elements of its gradient."""
        return self.end - self.low


def weight_slices(layout: StateLayout, count: int) -> list[WeightSlice]:
    """Cut the weights into ``count`` slices; with fewer units of 64 elements, the last slices are empty."""
    found = []
    for part in split_evenly(layout.state // PAD, count):
        low, high = part.start * PAD, part.stop * PAD
        found.append(WeightSlice(low, high, high, max(0, min(high, layout.trained) - low)))
    last = found[-1]
    found[-1] = WeightSlice(last.low, last.high, layout.total, last.trained)
    return found


@dataclass(frozen=True)
class ParameterPiece:
    """The elements of a parameter that are in one slice: ``[low, high)`` of the whole vector."""

    parameter: int
    low: int
    high: int
    first_slice: int
    """Number of the slice in which the parameter begins."""


def parameter_pieces(layout: StateLayout, parts: Sequence[WeightSlice]) -> list[list[ParameterPiece]]:
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


def collect_moments(
    channel: TensorChannel,
    ranks: Sequence[int],
    number: int,
    pieces: Sequence[Sequence[ParameterPiece]],
    moments: int,
    moment_of: Callable[[int, ParameterPiece], Tensor],
    deadline: float,
) -> Iterator[tuple[int, int, Tensor]]:
    """Collective over ``ranks``, which have one slice each. Yield the moments of parameters that begin in mine.

    Elements of such a parameter in later slices are received from the ranks of those slices. ``number``: of my slice.
    ``pieces``: of each slice. ``moment_of(index, piece)``: elements of a moment in my slice. Yields the number of the
    moment, the number of the parameter, and all elements. The caller flushes the endpoint.
    """
    for piece in pieces[number]:
        if piece.first_slice != number:
            for index in range(moments):
                leaving = Instruction(InstructionKind.GIVE, piece.parameter, index, ranks[piece.first_slice])
                channel.send(leaving, moment_of(index, piece), deadline)
    for piece in pieces[number]:
        if piece.first_slice == number:
            for index in range(moments):
                elements = [moment_of(index, piece)]
                for later in range(number + 1, len(ranks)):
                    if any(other.parameter == piece.parameter for other in pieces[later]):
                        arriving = Instruction(InstructionKind.GET, piece.parameter, index, ranks[later])
                        elements.append(channel.expect(arriving, deadline))
                yield index, piece.parameter, torch.cat(elements)
