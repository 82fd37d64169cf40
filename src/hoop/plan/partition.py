"""Where to cut a model: ordered blocks into contiguous stages, so that the slowest stage is as fast as can be.

    blocks    0   1 │ 2   3   4 │ 5   6          cuts [2, 5], 3 stages

Each stage has a place: a device with a speed and a memory, and the number of micro-batches whose activations it holds
at a time. What a stage needs is its weights, gradients and optimizer state, and its activations times that number.
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


@dataclass(frozen=True)
class Block:
    """What one block of a model costs; bytes are of float storage as the device holds it."""

    name: str
    seconds: float
    """Forward and backward of one micro-batch, on a device of speed 1."""
    weight_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    """What it keeps of one micro-batch from its forward to its backward."""
    output_bytes: int = 0
    """What it hands on of one micro-batch."""
    gradient_bytes: int | None = None
    """None: as many as the weights have."""
    forward_seconds: float | None = None
    """Of the seconds, the forward's; None: nobody measured it apart."""

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer state."""
        gradients = self.weight_bytes if self.gradient_bytes is None else self.gradient_bytes
        return self.weight_bytes + gradients + self.optimizer_bytes


@dataclass(frozen=True)
class StageDevice:
    """Where a stage goes."""

    device: str
    speed: float = 1.0
    memory: int | None = None
    """Bytes; None: no limit. Stages on one device share it."""
    in_flight: int = 1
    """Micro-batches whose activations the stage holds at a time."""
    versions: int = 1
    """How many versions of the weights are kept."""


@dataclass(frozen=True)
class StageCut:
    """A stage of a partition: which blocks, how slow, how large."""

    blocks: range
    place: StageDevice
    seconds: float
    bytes: int


def partition(blocks: Sequence[Block], places: Sequence[StageDevice]) -> list[StageCut]:
    """One stage a place, in order, with the slowest as fast as can be.

    Among the cuts that are, it takes one across which least is handed on, and among those the evenest. This is exact,
    but for one case: where several stages share a device and its memory binds, each gets an equal part of it, and a
    better cut may exist.
    """
    _check(blocks, places)
    whole = [place.memory for place in places]
    stages = _best(blocks, places, whole)
    if stages is None or overfull(stages):
        shared = [None if m is None else m // _sharing(places, at) for at, m in enumerate(whole)]
        stages = _best(blocks, places, shared)
    if stages is None:
        raise FailedPrecondition(_does_not_fit(blocks, places))
    return stages


def cut(blocks: Sequence[Block], places: Sequence[StageDevice], cuts: Sequence[int]) -> list[StageCut]:
    """The stages of cuts made by hand: ``[2, 5]`` begins stages at blocks 0, 2 and 5."""
    _check(blocks, places)
    bounds = [0, *cuts, len(blocks)]
    if len(cuts) != len(places) - 1:
        raise InvalidArgument(
            f"cuts: {list(cuts)} makes {len(cuts) + 1} stages; there are {len(places)} places"
        )
    if any(low >= high for low, high in itertools.pairwise(bounds)):
        raise InvalidArgument(
            f"cuts: {list(cuts)} must go up within 1..{len(blocks) - 1}, one block a stage at least"
        )
    stages = [
        _stage(blocks, range(low, high), place)
        for (low, high), place in zip(itertools.pairwise(bounds), places, strict=True)
    ]
    full = overfull(stages)
    if full:
        raise FailedPrecondition(f"cuts: {list(cuts)} does not fit: {'; '.join(full)}")
    return stages


def overfull(stages: Sequence[StageCut]) -> list[str]:
    """Devices that the stages ask too much of, with the numbers."""
    needs: dict[str, int] = {}
    for stage in stages:
        needs[stage.place.device] = needs.get(stage.place.device, 0) + stage.bytes
    caps = {stage.place.device: stage.place.memory for stage in stages}
    return [
        f"{device} needs {format_size(need)} and has {format_size(cap)}"
        for device, need in needs.items()
        if (cap := caps[device]) is not None and need > cap
    ]


def needs(blocks: Sequence[Block], place: StageDevice) -> int:
    """Bytes that these blocks need at a place."""
    state = sum(block.state_bytes + (place.versions - 1) * block.weight_bytes for block in blocks)
    return state + place.in_flight * sum(block.activation_bytes for block in blocks)


def _stage(blocks: Sequence[Block], held: range, place: StageDevice) -> StageCut:
    mine = blocks[held.start : held.stop]
    return StageCut(held, place, sum(block.seconds for block in mine) / place.speed, needs(mine, place))


def _check(blocks: Sequence[Block], places: Sequence[StageDevice]) -> None:
    if not places:
        raise InvalidArgument("places: none; there is at least one stage")
    if len(blocks) < len(places):
        raise InvalidArgument(
            f"stages: {len(places)} are more than the model's {len(blocks)} blocks; "
            "use fewer devices or slices, or cut the model finer"
        )
    for place in places:
        if not place.speed > 0:
            raise InvalidArgument(f"speed: {place.speed} of {place.device} is not above 0")
    for block in blocks:
        if not 0 <= block.seconds < math.inf or block.state_bytes < 0 or block.activation_bytes < 0:
            raise InvalidArgument(f"block: {block} has a cost that is negative or no number")


def _sharing(places: Sequence[StageDevice], at: int) -> int:
    return sum(place.device == places[at].device for place in places)


def _best(
    blocks: Sequence[Block], places: Sequence[StageDevice], memory: Sequence[int | None]
) -> list[StageCut] | None:
    """The dynamic programme, from the last stage to the first: the slowest stage's time, then the best cuts within it.

    A stage only gets slower and larger with every block, so each search ends where a stage is too slow or too large.
    """
    count, last = len(blocks), len(places)
    sums: list[list[float]] = [list(itertools.accumulate((block.seconds for block in blocks), initial=0.0))]
    kinds: dict[tuple[int, int], list[float]] = {}  # places that hold as much alike need alike
    for place in places:
        kind = place.in_flight, place.versions
        if kind not in kinds:
            each = (needs([block], place) for block in blocks)
            kinds[kind] = list(itertools.accumulate(each, initial=0))
        sums.append(kinds[kind])

    def stages(at: int, low: int, bound: float) -> Iterator[tuple[int, float]]:
        """Where a stage that begins at ``low`` may end, and how long it then takes."""
        cap = memory[at]
        first = max(low + 1, windows[at + 1][0]) if at < last - 1 else count
        for high in range(first, count - last + at + 2):
            seconds = (sums[0][high] - sums[0][low]) / places[at].speed
            if seconds > bound or (cap is not None and sums[at + 1][high] - sums[at + 1][low] > cap):
                return
            yield high, seconds

    widest = [(at, count - last + at) for at in range(last)]
    roomy = all(cap is None or sums[at + 1][-1] <= cap for at, cap in enumerate(memory))
    if roomy and len({place.speed for place in places}) == 1:
        windows, bound = _alike(sums[0], places[0].speed, last)
    else:
        windows = widest
        fastest: dict[tuple[int, int], float] = {(last, count): 0.0}
        for at, low in _beginnings(widest):
            best = math.inf
            for high, seconds in stages(at, low, best):
                if seconds >= best:
                    break
                best = min(best, max(seconds, fastest.get((at + 1, high), math.inf)))
            fastest[at, low] = best
        bound = fastest[0, 0]
    if bound == math.inf:
        return None
    ends: dict[tuple[int, int], tuple[int, float, int]] = {(last, count): (0, 0.0, count)}
    for at, low in _beginnings(windows):
        for high, seconds in stages(at, low, bound):
            rest = ends.get((at + 1, high))
            if rest is not None:
                handed = blocks[high - 1].output_bytes if high < count else 0
                found = (rest[0] + handed, rest[1] + seconds**2, high)
                ends[at, low] = min(found, ends.get((at, low), found))
    low, found_stages = 0, []
    for at, place in enumerate(places):
        high = ends[at, low][2]
        found_stages.append(_stage(blocks, range(low, high), place))
        low = high
    return found_stages


def _beginnings(windows: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Each stage with the blocks at which it may begin, the last stage first."""
    for at in reversed(range(len(windows))):
        yield from ((at, low) for low in range(windows[at][0], windows[at][1] + 1))


def _alike(sums: Sequence[float], speed: float, stages: int) -> tuple[list[tuple[int, int]], float]:
    """Where all places are as fast and large enough: the slowest stage's time, and where stages may begin within it.

    Stages that take all they can from the front reach as far as any within a bound, so bounds are halved until there
    is no number between one that is enough and one that is not.
    """
    count = len(sums) - 1

    def takes(low: int, high: int) -> float:
        return (sums[high] - sums[low]) / speed

    def furthest(bound: float) -> tuple[list[int], float] | None:
        """The last block at which each stage may begin, and the slowest's time; None: the end is not reached."""
        lows, low, worst = [], 0, 0.0
        for at in range(stages):
            lows.append(low)
            highs = range(low + 1, count - stages + at + 2)
            fits = bisect.bisect_right(highs, bound, key=functools.partial(takes, low))
            if not fits:
                return None
            worst, low = max(worst, takes(low, low + fits)), low + fits
        return (lows, worst) if low == count else None

    below = max(takes(at, at + 1) for at in range(count))
    found = furthest(below)
    if found is None:
        found = furthest(math.inf)
        assert found is not None, "without a bound the end is reached"
        while below < (middle := (below + found[1]) / 2) < found[1]:
            tried = furthest(middle)
            below, found = (middle, found) if tried is None else (below, tried)
    latest, bound = found
    earliest, high, end = [], count, count
    for at in reversed(range(stages)):
        while high > at and takes(high - 1, end) <= bound:
            high -= 1
        end = high
        earliest.append(high)
    return list(zip(reversed(earliest), latest, strict=True)), bound


def _does_not_fit(blocks: Sequence[Block], places: Sequence[StageDevice]) -> str:
    """Why no cut fits, with the numbers: what the fastest one asks of each device, and a block that is too large."""
    fastest = _best(blocks, places, [None] * len(places))
    assert fastest is not None, "without limits every cut fits"
    said = "; ".join(overfull(fastest))
    if len(places) == 1:
        return f"memory: {said}, in one stage of {len(blocks)} blocks"
    if not any(place.memory is None for place in places):
        largest = max(places, key=lambda place: place.memory or 0)
        block = max(blocks, key=lambda block: needs([block], largest))
        said += (
            f"; the largest block, {block.name}, needs {format_size(needs([block], largest))} and "
            f"{largest.device} has {format_size(largest.memory or 0)}"
        )
    return f"memory: no cut of {len(blocks)} blocks into {len(places)} stages fits; with the fastest {said}"
