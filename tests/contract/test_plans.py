"""Plans as data: they match between ranks, have the documented costs, and an invalid call sends nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ranks import LONG_S, URIS, Ranks

from hoop.collectives.communicator import Communicator
from hoop.collectives.plan import (
    DESTINATION,
    SOURCE,
    CollectivePlan,
    Copy,
    Finish,
    Meet,
    Range,
    Recv,
    Reduce,
    Send,
    Shape,
    pieces,
    split_range,
    verify,
)
from hoop.collectives.registry import CATALOG, MAX_ELEMENTS, Collective, Operation
from hoop.errors import InvalidArgument
from hoop.memory.dtypes import dtype
from hoop.transport import open_transport

SIZES = range(1, 10)
COUNTS = (*range(21), 27, 28, 35, 40)
"""Every count up to more than twice the most ranks, and some of several times as many."""
ALGORITHMS = [(name, algorithm) for name, entry in CATALOG.items() for algorithm in entry.algorithms]
SHARED_ALGORITHMS = [(name, algorithm) for name, entry in CATALOG.items() for algorithm in entry.shared]


def for_algorithms(pairs: list[tuple[str, str]]) -> pytest.MarkDecorator:
    """Runs a test for these collectives and algorithms."""
    params = [pytest.param(*pair, id="-".join(pair)) for pair in pairs]
    return pytest.mark.parametrize(("collective", "algorithm"), params)


every_algorithm = for_algorithms(ALGORITHMS)
# Not chunked_ring, whose rounds overlap.
every_steppable = for_algorithms([pair for pair in ALGORITHMS if pair[1] != "chunked_ring"])


def shapes(collective: str, algorithm: str) -> Iterator[Shape]:
    """Every size and count, with every root, peer and chunk that the collective has."""
    for n, count in itertools.product(SIZES, COUNTS if collective != "barrier" else (0,)):
        rooted = collective in {"broadcast", "reduce", "gather", "scatter", "send"}
        for root, peer in itertools.product(range(n if rooted else 1), range(n if collective == "send" else 1)):
            for chunk in (0, 1, 2, 3, 7, 100) if algorithm == "chunked_ring" else (0,):
                yield Shape(n, count, root, peer, chunk)


def plans(collective: str, algorithm: str, shape: Shape) -> list[CollectivePlan]:
    entry = CATALOG[collective]
    function = {**entry.algorithms, **entry.shared}[algorithm]
    return [function(shape, rank) for rank in range(shape.size)]


# ---- plans of all ranks match


@every_algorithm
def test_every_plan_verifies(collective: str, algorithm: str) -> None:
    for shape in shapes(collective, algorithm):
        problems = verify(plans(collective, algorithm, shape))
        assert not problems, f"{shape}: {problems}"


@for_algorithms(SHARED_ALGORITHMS)
def test_every_plan_in_shared_memory_verifies_and_sends_nothing(collective: str, algorithm: str) -> None:
    for shape in shapes(collective, algorithm):
        rank_plans = plans(collective, algorithm, shape)
        problems = verify(rank_plans)
        assert not problems, f"{shape}: {problems}"
        assert not any(plan.messages or plan.elements for plan in rank_plans)


@every_algorithm
def test_plans_stay_within_their_buffers(collective: str, algorithm: str) -> None:
    """Ranges are within the buffers that the catalog requires; only destination and scratch are written."""
    entry = CATALOG[collective]
    for shape in shapes(collective, algorithm):
        for rank, plan in enumerate(plans(collective, algorithm, shape)):
            problem = find_violation(entry, shape, rank, plan)
            assert not problem, f"{shape}, rank {rank}: {problem}"


def find_violation(entry: Collective, shape: Shape, rank: int, plan: CollectivePlan) -> str:
    """The first instruction that is out of bounds, if any."""
    extents = (entry.source(shape, rank), entry.destination(shape, rank), plan.scratch)
    read: Range
    written: Range | None
    for instruction in plan:
        match instruction:
            case Copy(source, destination):
                read, written = source, destination
                if source.length != destination.length:
                    return f"{instruction} copies {source.length} elements to {destination.length}"
            case Send(peer, where):
                read, written = where, None
            case Recv(peer, where) | Reduce(peer, where):
                read, written = where, where
            case Finish(where):
                read, written = where, where
        if isinstance(instruction, Send | Recv | Reduce) and (peer == rank or not 0 <= peer < shape.size):
            return f"{instruction} has no such peer"
        for touched in (read, written):
            if touched is not None and not 0 <= touched.start <= touched.stop <= extents[touched.buffer]:
                return f"{instruction} leaves a buffer of {extents[touched.buffer]}"
        if written is not None and written.buffer == SOURCE and written.length:
            return f"{instruction} writes to the source"
    return ""


@every_steppable
def test_every_round_verifies_on_its_own(collective: str, algorithm: str) -> None:
    """So a collective can run one round at a time."""
    for shape in shapes(collective, algorithm):
        all_rounds = [plan.rounds for plan in plans(collective, algorithm, shape)]
        assert len(set(map(len, all_rounds))) == 1, f"{shape}: ranks differ in rounds {[*map(len, all_rounds)]}"
        for index, together in enumerate(zip(*all_rounds, strict=True)):
            problems = verify([CollectivePlan((instructions,)) for instructions in together])
            assert not problems, f"{shape}, round {index}: {problems}"


@pytest.mark.parametrize("parts", range(1, 8))
def test_split_covers_everything_in_nearly_equal_parts(parts: int) -> None:
    for count in COUNTS:
        ranges = split_range(count, parts)
        assert [index for start, stop in ranges for index in range(start, stop)] == list(range(count))
        lengths = [stop - start for start, stop in ranges]
        assert len(lengths) == parts
        assert sorted(lengths, reverse=True) == lengths
        assert lengths[0] - lengths[-1] <= 1
        for chunk in range(1, 9):
            cut = [piece for bounds in ranges for piece in pieces(*bounds, chunk)]
            assert [index for start, stop in cut for index in range(start, stop)] == list(range(count))
            assert all(0 < stop - start <= chunk for start, stop in cut)


# ---- verify finds injected errors


SEGMENT, OTHER = Range(DESTINATION, 0, 4), Range(DESTINATION, 0, 3)


def without_first(plan: CollectivePlan, kind: type) -> CollectivePlan:
    """The plan without its first instruction of a kind."""
    position = next(index for index, instruction in enumerate(plan) if isinstance(instruction, kind))
    return CollectivePlan((tuple(instruction for index, instruction in enumerate(plan) if index != position),))


def test_verify_finds_a_missing_receive() -> None:
    ring = plans("all_reduce", "ring", Shape(3, 9))
    ring[1] = without_first(ring[1], Recv)
    assert "1 messages 0 -> 1 are never received" in verify(ring)


def test_verify_finds_a_missing_send() -> None:
    ring = plans("all_reduce", "ring", Shape(3, 9))
    ring[1] = without_first(ring[1], Send)
    assert [problem for problem in verify(ring) if problem.startswith("rank 2: waits for ever at Re")]


def test_verify_finds_a_wrong_length() -> None:
    wrong = [CollectivePlan(((Send(1, SEGMENT),),)), CollectivePlan(((Recv(0, OTHER),),))]
    assert verify(wrong) == [f"rank 1: {Recv(0, OTHER)} gets 4 elements"]
    ring = plans("all_reduce", "ring", Shape(3, 9))
    ring[2] = plans("all_reduce", "ring", Shape(3, 10))[2]
    assert verify(ring)


def test_verify_finds_a_deadlock() -> None:
    """Both ranks receive before they send. The reverse order is correct: a send does not wait."""
    programs: list[tuple[Recv | Reduce | Send, ...]]
    programs = [(Recv(1, SEGMENT), Send(1, SEGMENT)), (Reduce(0, SEGMENT), Send(0, SEGMENT))]
    assert verify([CollectivePlan((steps,)) for steps in programs]) == [
        f"rank 0: waits for ever at {Recv(1, SEGMENT)}",
        f"rank 1: waits for ever at {Reduce(0, SEGMENT)}",
    ]
    assert verify([CollectivePlan((steps[::-1],)) for steps in programs]) == []


def test_verify_finds_a_missing_barrier() -> None:
    barriers = plans("barrier", "staged", Shape(3, 0))
    barriers[1] = CollectivePlan(())
    assert verify(barriers) == [f"rank {rank}: waits for ever at {Meet()}" for rank in (0, 2)]


def test_verify_finds_a_swapped_order() -> None:
    wrong = [
        CollectivePlan(((Send(1, SEGMENT), Send(1, OTHER)),)),
        CollectivePlan(((Recv(0, OTHER), Recv(0, SEGMENT)),)),
    ]
    assert len(verify(wrong)) == 2


def test_verify_finds_different_counts() -> None:
    for collective, algorithm in ALGORITHMS:
        if collective == "barrier":
            continue
        shape = Shape(3, 9, root=0, peer=1)
        mixed = plans(collective, algorithm, shape)
        mixed[1] = plans(collective, algorithm, replace(shape, count=12))[1]
        assert verify(mixed), f"{collective} by {algorithm}"


# ---- costs


def log2_up(n: int) -> int:
    return math.ceil(math.log2(n))


Cost = list[tuple[int, int]]
"""For each rank, the messages and the elements that it sends."""


def ring_all_reduce(shape: Shape) -> Cost:
    """A rank sends 2(n-1) messages and 2(n-1)/n · S elements: all segments but two are sent twice."""
    n, lengths = shape.size, [stop - start for start, stop in split_range(shape.count, shape.size)]
    sent = [
        [lengths[(rank - step) % n] for step in range(2 * n - 2)]  # r, r-1, …, and on around the ring
        for rank in range(n)
    ]
    chunk = shape.chunk or max(shape.count, 1)
    return [(sum(math.ceil(length / chunk) for length in segments), sum(segments)) for segments in sent]


def halving_doubling(shape: Shape) -> Cost:
    """m is the largest power of two up to n. A rank below m sends in halving all that it does not keep, in doubling all
    that it has; a rank from m on sends S once and gets the result from its partner."""
    n, count, m = shape.size, shape.count, 1 << (shape.size.bit_length() - 1)
    segments = split_range(count, m)

    def aligned(index: int, width: int) -> int:
        """Elements of the aligned group of ``width`` segments that contains ``index``."""
        first = index // width * width
        return segments[first + width - 1][1] - segments[first][0]

    cost = []
    for rank in range(n):
        widths = [1 << level for level in range(m.bit_length() - 1)] if rank < m else []
        sent = [aligned(segment, width) for width in widths for segment in (rank ^ width, rank)]
        sent += [count] if rank >= m or rank < n - m else []
        cost.append((sum(map(bool, sent)), sum(sent)))
    return cost


def per_rank(messages: Callable[[Shape, int], int]) -> Callable[[Shape], Cost]:
    """The cost if each rank sends this number of messages of S; none if S is 0."""

    def cost(shape: Shape) -> Cost:
        counts = [messages(shape, rank) if shape.count else 0 for rank in range(shape.size)]
        return [(count, count * shape.count) for count in counts]

    return cost


def binomial_children(n: int, distance: int) -> int:
    """Number of children in the binomial tree of the rank at this distance from the root."""
    low = distance & -distance if distance else 1 << log2_up(n)
    return sum(distance + (1 << k) < n for k in range(low.bit_length() - 1))


COSTS: dict[tuple[str, str], Callable[[Shape], Cost]] = {
    ("all_reduce", "ring"): lambda shape: ring_all_reduce(replace(shape, chunk=0)),
    ("all_reduce", "chunked_ring"): ring_all_reduce,
    ("all_reduce", "naive"): per_rank(lambda shape, rank: 1 if rank else shape.size - 1),
    ("all_reduce", "tree"): per_rank(
        lambda shape, rank: (rank > 0) + binomial_children(shape.size, rank)  # up once, down to each child
    ),
    ("all_reduce", "halving_doubling"): halving_doubling,
    ("broadcast", "naive"): per_rank(lambda shape, rank: shape.size - 1 if rank == shape.root else 0),
    ("broadcast", "tree"): per_rank(
        lambda shape, rank: binomial_children(shape.size, (rank - shape.root) % shape.size)
    ),
    ("reduce", "naive"): per_rank(lambda shape, rank: int(rank != shape.root)),
    ("reduce", "tree"): per_rank(lambda shape, rank: int(rank != shape.root)),
    ("all_gather", "ring"): per_rank(lambda shape, rank: shape.size - 1),
    ("reduce_scatter", "ring"): per_rank(lambda shape, rank: shape.size - 1),
    ("gather", "naive"): per_rank(lambda shape, rank: int(rank != shape.root)),
    ("scatter", "naive"): per_rank(lambda shape, rank: shape.size - 1 if rank == shape.root else 0),
    ("all_to_all", "pairwise"): per_rank(lambda shape, rank: shape.size - 1),
    ("barrier", "tree"): lambda shape: [(log2_up(shape.size), 0)] * shape.size,
    ("send", "naive"): per_rank(lambda shape, rank: int(rank == shape.root != shape.peer)),
}


@every_algorithm
def test_every_rank_sends_the_expected_messages_and_elements(collective: str, algorithm: str) -> None:
    expected = COSTS[collective, algorithm]
    for shape in shapes(collective, algorithm):
        rank_plans = plans(collective, algorithm, shape)
        assert [(plan.messages, plan.elements) for plan in rank_plans] == expected(shape), shape


TOTALS: dict[tuple[str, str], Callable[[int], int]] = {
    ("all_reduce", "naive"): lambda n: 2 * (n - 1),
    ("all_reduce", "tree"): lambda n: 2 * (n - 1),
    ("broadcast", "naive"): lambda n: n - 1,
    ("broadcast", "tree"): lambda n: n - 1,
    ("reduce", "naive"): lambda n: n - 1,
    ("reduce", "tree"): lambda n: n - 1,
    ("all_gather", "ring"): lambda n: n * (n - 1),
    ("reduce_scatter", "ring"): lambda n: n * (n - 1),
    ("gather", "naive"): lambda n: n - 1,
    ("scatter", "naive"): lambda n: n - 1,
    ("all_to_all", "pairwise"): lambda n: n * (n - 1),
}
"""Messages of S in total, as documented in the docstrings."""


@pytest.mark.parametrize(("collective", "algorithm"), TOTALS)
def test_total_messages_and_elements(collective: str, algorithm: str) -> None:
    for shape in shapes(collective, algorithm):
        rank_plans = plans(collective, algorithm, shape)
        total = TOTALS[collective, algorithm](shape.size)
        assert sum(plan.messages for plan in rank_plans) == (total if shape.count else 0), shape
        assert sum(plan.elements for plan in rank_plans) == total * shape.count, shape


def test_cost_of_rings() -> None:
    for n, k in itertools.product(SIZES, range(1, 6)):
        for plan in plans("all_reduce", "ring", Shape(n, n * k)):
            assert (plan.messages, plan.elements) == (2 * (n - 1), 2 * (n - 1) * k)
            assert n == 1 or len(plan.rounds) == 2 * (n - 1)
        for chunk in (1, 2, 3, 7):
            for plan in plans("all_reduce", "chunked_ring", Shape(n, n * k, chunk=chunk)):
                assert (plan.messages, plan.elements) == (2 * (n - 1) * math.ceil(k / chunk), 2 * (n - 1) * k)
    for shape in shapes("all_reduce", "ring"):
        rank_plans = plans("all_reduce", "ring", shape)
        assert sum(plan.elements for plan in rank_plans) == 2 * (shape.size - 1) * shape.count


def test_cost_of_halving_and_doubling() -> None:
    for n, k in itertools.product((1, 2, 4, 8), range(1, 6)):
        for plan in plans("all_reduce", "halving_doubling", Shape(n, n * k)):
            assert (plan.messages, plan.elements) == (2 * log2_up(n), 2 * (n - 1) * k)


def test_empty_segments_are_not_sent() -> None:
    """With S < n only S segments are sent; with S = 0 only a barrier sends messages."""
    for n in SIZES:
        for count in range(n):
            rank_plans = plans("all_reduce", "ring", Shape(n, count))
            assert sum(plan.messages for plan in rank_plans) == 2 * (n - 1) * count
    for collective, algorithm in ALGORITHMS:
        for shape in shapes(collective, algorithm):
            if shape.count == 0 and collective != "barrier":
                assert not any(plan.messages for plan in plans(collective, algorithm, shape)), (
                    collective,
                    shape,
                )


@pytest.mark.parametrize(("collective", "depth"), [("all_reduce", 2), ("reduce", 1), ("broadcast", 1), ("barrier", 1)])
def test_a_tree_takes_log2_n_rounds_of_messages(collective: str, depth: int) -> None:
    for n in SIZES:
        rank_plans = plans(collective, "tree", Shape(n, 5))
        sending_rounds = {
            index
            for plan in rank_plans
            for index, steps in enumerate(plan.rounds)
            if any(isinstance(step, Send) for step in steps)
        }
        assert len(sending_rounds) == depth * log2_up(n), n


def test_a_pairwise_exchange_has_one_sender_per_receiver() -> None:
    """In no round do several ranks send to the same one."""
    for n in SIZES:
        for together in zip(*(plan.rounds for plan in plans("all_to_all", "pairwise", Shape(n, 2))), strict=True):
            peers = [step.peer for steps in together for step in steps if isinstance(step, Send)]
            assert len(peers) == len(set(peers))


@pytest.mark.parametrize(
    "ranks",
    [pytest.param((scheme, size), id=f"{scheme}-{size}") for scheme in sorted(URIS) for size in (1, 4)],
    indirect=True,
)
@every_algorithm
def test_messages_and_bytes_sent_match_the_plan(ranks: Ranks, collective: str, algorithm: str) -> None:
    n = ranks.size
    for name, count in itertools.product(("int8", "float32", "float64"), (0, 3, 4, 10)):
        if collective == "barrier":
            count = 0
        kind = dtype(name)
        operation = Operation(
            collective, count, kind, algorithm=algorithm, root=n - 1, peer=n // 2, chunk_bytes=kind.itemsize
        )

        def worker(comm: Communicator, operation: Operation = operation) -> Any:
            source, destination = (np.zeros(comm.size * operation.count, operation.dtype.numpy) for _ in "ab")
            return comm.run(operation, source, destination, LONG_S)

        for rank, report in enumerate(ranks.run(worker)):
            plan = operation.plan(n, rank)
            sent = (report.messages_sent, report.bytes_sent, report.algorithm)
            assert sent == (plan.messages, plan.elements * kind.itemsize, algorithm), f"rank {rank}: {operation}"
            assert report.seconds >= 0


# ---- invalid calls


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"collective": "all_red"}, r"collective: 'all_red' is unknown; known: all_reduce, "),
        (
            {"algorithm": "star"},
            r"algorithm: all_reduce has no 'star'; it has ring, chunked_ring, naive, tree",
        ),
        ({"op": "xor"}, r"op: 'xor' is unknown; known: sum, prod, min, max, avg"),
        ({"count": -1}, r"count: -1 is not in 0..2\^48 elements"),
        ({"count": MAX_ELEMENTS + 1}, rf"count: {MAX_ELEMENTS + 1} is not in"),
        ({"chunk_bytes": 3}, r"chunk_bytes: 3 holds no float32; at least 4"),
        ({"chunk_bytes": -8}, r"chunk_bytes: -8 holds no float32; at least 4"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_an_operation_is_checked_when_it_is_constructed(call: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Operation(**{"collective": "all_reduce", "count": 4, **call})


@pytest.fixture
def alone() -> Iterator[Communicator]:
    """Rank 1 of three; the other two do not exist."""
    with open_transport(URIS["inproc"]) as transport:
        comm = Communicator(transport.endpoint(1, 1, 1, [transport.address] * 3))
        yield comm
        assert (comm.endpoint.messages_sent, comm.endpoint.bytes_sent) == (0, 0), "something was sent"
        comm.close()


def vector(size: int, kind: type = np.float32) -> Any:
    return np.zeros(size, kind)


@pytest.mark.parametrize(
    ("call", "buffers", "message"),
    [
        ({"root": 3}, (vector(4), vector(4)), r"root: rank 3 is not in 0..2"),
        ({"root": -1}, (vector(4), vector(4)), r"root: rank -1 is not in 0..2"),
        ({"peer": 3}, (vector(4), vector(4)), r"peer: rank 3 is not in 0..2"),
        (
            {},
            (vector(3), vector(4)),
            r"rank 1: all_reduce sum of 4 float32\b.* needs 4 .* of source, got 3",
        ),
        (
            {},
            (vector(4), vector(3)),
            r"rank 1: all_reduce sum of 4 .* needs 4 elements of destination, got 3",
        ),
        (
            {"collective": "all_gather"},
            (vector(4), vector(11)),
            r"all_gather of 4 float32\b.* needs 12 elements of destination, got 11",
        ),
        ({}, (vector(4, np.float64), vector(4)), r"rank 1: source must be .* float32"),
        ({}, (vector(4), vector(4, np.int32)), r"rank 1: destination must be .* float32"),
        ({}, (vector(8)[::2], vector(4)), r"rank 1: source must be a contiguous vector of float32"),
        ({}, (vector(4), vector(4).reshape(2, 2)), r"rank 1: destination must be a contiguous vector"),
    ],
    ids=[
        "root too large",
        "root negative",
        "peer too large",
        "source too short",
        "destination too short",
        "destination too short for all",
        "source of another type",
        "destination of another type",
        "source with gaps",
        "destination a matrix",
    ],
)
def test_a_call_is_checked_before_anything_is_sent(
    alone: Communicator, call: dict[str, Any], buffers: tuple[Any, Any], message: str
) -> None:
    operation = Operation(**{"collective": "all_reduce", "count": 4, **call})
    with pytest.raises(InvalidArgument, match=message):
        alone.run(operation, *buffers, timeout=LONG_S)


def test_the_error_names_the_wrong_element_type(alone: Communicator) -> None:
    with pytest.raises(InvalidArgument, match=r"source must be .* float32, (got|it is) .*float64"):
        alone.run(Operation("all_reduce", 4), vector(4, np.float64), vector(4), timeout=LONG_S)


def test_a_read_only_destination_is_rejected(alone: Communicator) -> None:
    destination = vector(4)
    destination.flags.writeable = False
    with pytest.raises(InvalidArgument, match="destination"):
        alone.run(Operation("all_reduce", 4), vector(4), destination, timeout=LONG_S)


OVERLAPS = [
    ("all_reduce", 0, 4, 1),
    ("all_reduce", 1, 4, 0),
    ("broadcast", 0, 4, 3),
    ("reduce", 3, 4, 0),
    ("all_gather", 0, 12, 0),  # rank 1's own block begins at 4, not at 0
    ("all_gather", 5, 12, 0),
    ("gather", 8, 12, 0),
    ("reduce_scatter", 0, 4, 0),
    ("reduce_scatter", 0, 4, 8),
    ("scatter", 0, 4, 5),
    ("all_to_all", 0, 12, 0),
    ("all_to_all", 0, 12, 1),
]


@pytest.mark.parametrize(("collective", "source_at", "gets", "destination_at"), OVERLAPS)
def test_overlapping_operands_are_rejected(
    alone: Communicator, collective: str, source_at: int, gets: int, destination_at: int
) -> None:
    memory = np.arange(32, dtype=np.float32)
    operation = Operation(collective, 4, root=1)
    needs, _ = operation.extents(3, 1)
    operands = memory[source_at : source_at + needs], memory[destination_at : destination_at + gets]
    with pytest.raises(InvalidArgument, match=rf"rank 1: source and destination of {collective}.* overlap; use"):
        alone.run(operation, *operands, timeout=LONG_S)
    assert memory.tolist() == list(range(32))


IN_PLACE = {"all_gather": (4, 0), "gather": (4, 0), "reduce_scatter": (0, 4), "scatter": (0, 4)}


@every_algorithm
def test_adjacent_and_in_place_operands_are_accepted(alone: Communicator, collective: str, algorithm: str) -> None:
    memory = np.zeros(24, np.float32)
    operation = Operation(collective, 4 if collective != "barrier" else 0, algorithm=algorithm, root=1, peer=1)
    needs, gets = operation.extents(3, 1)
    alone.check(operation, memory[:needs], memory[needs : needs + gets])
    alone.check(operation, memory[gets : gets + needs], memory[:gets])
    if collective != "all_to_all":
        source_at, destination_at = IN_PLACE.get(collective, (0, 0))
        alone.check(
            operation,
            memory[source_at : source_at + needs],
            memory[destination_at : destination_at + gets],
        )
