"""Partitions a model: ordered blocks into contiguous stages, so that the slowest stage is as fast as possible.

    blocks    0   1 │ 2   3   4 │ 5   6          cuts [2, 5], 3 stages

Each stage gets a ``StageDevice`` with a speed, a memory limit, and the number of micro-batches whose activations it
holds at a time. A stage needs memory for its weights, gradients and optimizer state, plus that number times its
activations.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hoop.config import format_size
from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.texts import counted


@dataclass(frozen=True)
class Block:
    """Costs of one block of a model; bytes as stored on the device."""

    name: str
    seconds: float
    """Seconds of forward and backward of one micro-batch on a device of speed 1."""
    weight_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    """Bytes of the activations of one micro-batch, kept from its forward to its backward."""
    output_bytes: int = 0
    """Bytes of the output for one micro-batch, passed to the next block."""
    gradient_bytes: int | None = None
    """Bytes of the gradients; None: ``weight_bytes``."""
    forward_seconds: float | None = None
    """The forward's part of ``seconds``; None: not measured separately."""

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer state."""
        gradients = self.weight_bytes if self.gradient_bytes is None else self.gradient_bytes
        return self.weight_bytes + gradients + self.optimizer_bytes


@dataclass(frozen=True)
class StageDevice:
    """The device that runs a stage."""

    name: str
    speed: float = 1.0
    memory: int | None = None
    """Memory of the device in bytes; None: unlimited. Stages with the same device name share it."""
    in_flight: int = 1
    """Number of micro-batches whose activations the stage holds at a time."""
    versions: int = 1
    """Number of versions of the weights that the device keeps."""


@dataclass(frozen=True)
class StageCut:
    """One stage of a partition: its blocks, device, time per micro-batch, and memory."""

    blocks: range
    device: StageDevice
    seconds: float
    bytes: int


def partition(blocks: Sequence[Block], devices: Sequence[StageDevice]) -> list[StageCut]:
    """One stage per device, in order, such that the slowest stage is as fast as possible.

    Among the fastest partitions it takes one with the fewest bytes across cuts, and among those the most even one. The
    result is optimal with one exception: where several stages share a device and its memory is the limit, each stage
    gets an equal part of the memory, and a better partition may exist.
    """
    _check(blocks, devices)
    limits = [device.memory for device in devices]
    stages = _best(blocks, devices, limits)
    if stages is None or over_capacity(stages):
        shared = [None if m is None else m // _num_sharing(devices, index) for index, m in enumerate(limits)]
        stages = _best(blocks, devices, shared)
    if stages is None:
        raise FailedPrecondition(_does_not_fit(blocks, devices))
    return stages


def partition_at(blocks: Sequence[Block], devices: Sequence[StageDevice], cuts: Sequence[int]) -> list[StageCut]:
    """The partition with given cuts: ``[2, 5]`` begins stages at blocks 0, 2 and 5."""
    _check(blocks, devices)
    bounds = [0, *cuts, len(blocks)]
    if len(cuts) != len(devices) - 1:
        raise InvalidArgument(
            f"cuts: {list(cuts)} makes {counted(len(cuts) + 1, 'stage')}; there are {counted(len(devices), 'device')}"
        )
    if any(low >= high for low, high in itertools.pairwise(bounds)):
        raise InvalidArgument(f"cuts: {list(cuts)} must go up within 1..{len(blocks) - 1}, one block a stage at least")
    stages = [
        _stage(blocks, range(low, high), device)
        for (low, high), device in zip(itertools.pairwise(bounds), devices, strict=True)
    ]
    problems = over_capacity(stages)
    if problems:
        raise FailedPrecondition(f"cuts: {list(cuts)} does not fit: {'; '.join(problems)}")
    return stages


def over_capacity(stages: Sequence[StageCut]) -> list[str]:
    """One sentence for each device whose stages need more memory than it has."""
    required: dict[str, int] = {}
    for stage in stages:
        required[stage.device.name] = required.get(stage.device.name, 0) + stage.bytes
    limits = {stage.device.name: stage.device.memory for stage in stages}
    return [
        f"{name} needs {format_size(size)} and has {format_size(limit)}"
        for name, size in required.items()
        if (limit := limits[name]) is not None and size > limit
    ]


def required_bytes(blocks: Sequence[Block], device: StageDevice) -> int:
    """Memory that these blocks need on a device."""
    state = sum(block.state_bytes + (device.versions - 1) * block.weight_bytes for block in blocks)
    return state + device.in_flight * sum(block.activation_bytes for block in blocks)


def _stage(blocks: Sequence[Block], indices: range, device: StageDevice) -> StageCut:
    own = blocks[indices.start : indices.stop]
    return StageCut(indices, device, sum(block.seconds for block in own) / device.speed, required_bytes(own, device))


def _check(blocks: Sequence[Block], devices: Sequence[StageDevice]) -> None:
    if not devices:
        raise InvalidArgument("devices: none; there is at least one stage")
    if len(blocks) < len(devices):
        raise InvalidArgument(
            f"stages: {len(devices)} are more than the model's {counted(len(blocks), 'block')}; "
            "use fewer devices or slices, or cut the model finer"
        )
    for device in devices:
        if not device.speed > 0:
            raise InvalidArgument(f"speed: {device.speed} of {device.name} is not above 0")
    for block in blocks:
        if not 0 <= block.seconds < math.inf or block.state_bytes < 0 or block.activation_bytes < 0:
            raise InvalidArgument(f"block: {block} has a cost that is negative or no number")


def _num_sharing(devices: Sequence[StageDevice], index: int) -> int:
    """Number of stages on the same device as stage ``index``."""
    return sum(device.name == devices[index].name for device in devices)


def _best(
    blocks: Sequence[Block], devices: Sequence[StageDevice], memory: Sequence[int | None]
) -> list[StageCut] | None:
    """Dynamic programme from the last stage to the first; None if no partition fits.

    The first pass finds the time of the slowest stage, the second the best cuts within that time. A stage only gets
    slower and larger with every block, so each search ends where the stage becomes too slow or too large.
    """
    count, last = len(blocks), len(devices)
    sums: list[list[float]] = [list(itertools.accumulate((block.seconds for block in blocks), initial=0.0))]
    memory_sums: dict[tuple[int, int], list[float]] = {}  # equal for devices with equal in_flight and versions
    for device in devices:
        key = device.in_flight, device.versions
        if key not in memory_sums:
            each = (required_bytes([block], device) for block in blocks)
            memory_sums[key] = list(itertools.accumulate(each, initial=0))
        sums.append(memory_sums[key])

    def stage_ends(stage: int, low: int, bound: float) -> Iterator[tuple[int, float]]:
        """Possible ends of a stage that begins at block ``low``, each with the stage's time."""
        limit = memory[stage]
        first = max(low + 1, windows[stage + 1][0]) if stage < last - 1 else count
        for high in range(first, count - last + stage + 2):
            seconds = (sums[0][high] - sums[0][low]) / devices[stage].speed
            if seconds > bound or (limit is not None and sums[stage + 1][high] - sums[stage + 1][low] > limit):
                return
            yield high, seconds

    widest = [(stage, count - last + stage) for stage in range(last)]
    unlimited = all(limit is None or sums[stage + 1][-1] <= limit for stage, limit in enumerate(memory))
    if unlimited and len({device.speed for device in devices}) == 1:
        windows, bound = _best_equal(sums[0], devices[0].speed, last)
    else:
        windows = widest
        fastest: dict[tuple[int, int], float] = {(last, count): 0.0}
        for stage, low in _stage_starts(widest):
            best = math.inf
            for high, seconds in stage_ends(stage, low, best):
                if seconds >= best:
                    break
                best = min(best, max(seconds, fastest.get((stage + 1, high), math.inf)))
            fastest[stage, low] = best
        bound = fastest[0, 0]
    if bound == math.inf:
        return None
    ends: dict[tuple[int, int], tuple[int, float, int]] = {(last, count): (0, 0.0, count)}
    for stage, low in _stage_starts(windows):
        for high, seconds in stage_ends(stage, low, bound):
            rest = ends.get((stage + 1, high))
            if rest is not None:
                cut_bytes = blocks[high - 1].output_bytes if high < count else 0
                found = (rest[0] + cut_bytes, rest[1] + seconds**2, high)
                ends[stage, low] = min(found, ends.get((stage, low), found))
    low, stages = 0, []
    for stage, device in enumerate(devices):
        high = ends[stage, low][2]
        stages.append(_stage(blocks, range(low, high), device))
        low = high
    return stages


def _stage_starts(windows: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Pairs of a stage and a block at which it may begin, the last stage first."""
    for stage in reversed(range(len(windows))):
        yield from ((stage, low) for low in range(windows[stage][0], windows[stage][1] + 1))


def _best_equal(sums: Sequence[float], speed: float, stages: int) -> tuple[list[tuple[int, int]], float]:
    """Where each stage may begin, and the time of the slowest one, for equally fast devices without memory limits.

    Filling stages greedily from the front reaches as far as any partition within a time bound. So a bisection over
    bounds finds the smallest one, until no float lies between a sufficient and an insufficient bound.
    """
    count = len(sums) - 1

    def seconds(low: int, high: int) -> float:
        return (sums[high] - sums[low]) / speed

    def latest_starts(bound: float) -> tuple[list[int], float] | None:
        """The last block at which each stage may begin, and the slowest stage's time; None: the bound is too small."""
        lows, low, worst = [], 0, 0.0
        for stage in range(stages):
            lows.append(low)
            highs = range(low + 1, count - stages + stage + 2)
            fits = bisect.bisect_right(highs, bound, key=functools.partial(seconds, low))
            if not fits:
                return None
            worst, low = max(worst, seconds(low, low + fits)), low + fits
        return (lows, worst) if low == count else None

    below = max(seconds(index, index + 1) for index in range(count))
    found = latest_starts(below)
    if found is None:
        found = latest_starts(math.inf)
        assert found is not None, "without a bound the end is reached"
        while below < (middle := (below + found[1]) / 2) < found[1]:
            tried = latest_starts(middle)
            below, found = (middle, found) if tried is None else (below, tried)
    latest, bound = found
    earliest, high, end = [], count, count
    for stage in reversed(range(stages)):
        while high > stage and seconds(high - 1, end) <= bound:
            high -= 1
        end = high
        earliest.append(high)
    return list(zip(reversed(earliest), latest, strict=True)), bound


def _does_not_fit(blocks: Sequence[Block], devices: Sequence[StageDevice]) -> str:
    """The error for a model that no partition fits: needs of the fastest partition, and the largest block."""
    fastest = _best(blocks, devices, [None] * len(devices))
    assert fastest is not None, "without limits every cut fits"
    problems = "; ".join(over_capacity(fastest))
    if len(devices) == 1:
        return f"memory: {problems}, in one stage of {counted(len(blocks), 'block')}"
    if not any(device.memory is None for device in devices):
        largest = max(devices, key=lambda device: device.memory or 0)
        block = max(blocks, key=lambda block: required_bytes([block], largest))
        problems += (
            f"; the largest block, {block.name}, needs {format_size(required_bytes([block], largest))} and "
            f"{largest.name} has {format_size(largest.memory or 0)}"
        )
    cut = f"{counted(len(blocks), 'block')} into {counted(len(devices), 'stage')}"
    return f"memory: no cut of {cut} fits; with the fastest {problems}"
