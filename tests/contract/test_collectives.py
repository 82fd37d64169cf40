"""Compares every collective and algorithm with an oracle in plain NumPy: bit for bit, on every rank.

A case is one call of a collective by all ranks. A test prepares the cases of one (collective, algorithm, N, transport);
each rank's thread runs them in order and compares its whole buffers, including the elements that must not change.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ranks import LONG_S, SHARED_MEMORY, URIS, Ranks

from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import CATALOG, Operation
from hoop.memory.dtypes import DTYPES, DType


def is_slow(params: Mapping[str, Any]) -> bool:
    """test_hierarchical covers hybrid, and inproc runs every size."""
    scheme, size = params.get("ranks", ("", 0))
    return scheme == "hybrid" or (scheme in ("tcp", *SHARED_MEMORY) and size in (1, 4, 5))


pytestmark = pytest.mark.slow_if(when=is_slow)


Array = npt.NDArray[Any]
OPS = ("sum", "prod", "min", "max", "avg")
SIZES = (1, 2, 3, 4, 5)
SCHEMES = sorted(URIS)
ALGORITHMS = [(name, algorithm) for name, entry in CATALOG.items() for algorithm in entry.algorithms]
# Without "direct", which needs the arenas of devices.
SHARED_ALGORITHMS = [
    (name, algorithm) for name, entry in CATALOG.items() for algorithm in entry.shared if algorithm != "direct"
]
GUARD = 3
"""Elements after the end of every buffer; no operation may change them."""
SENTINEL = 77
LARGE = 1_000_003
"""Elements of the large vectors."""


def over_transports(schemes: Iterable[str], *sizes: int) -> pytest.MarkDecorator:
    """Runs a test over each of these transports, with each of these world sizes."""
    params = [pytest.param((scheme, size), id=f"{scheme}-{size}") for scheme in schemes for size in sizes]
    return pytest.mark.parametrize("ranks", params, indirect=True)


over_every_transport = over_transports(SCHEMES, *SIZES)
over_every_transport_at_3 = over_transports(SCHEMES, 3)


def for_algorithms(pairs: list[tuple[str, str]]) -> pytest.MarkDecorator:
    """Runs a test for these collectives and algorithms."""
    params = [pytest.param(*pair, id="-".join(pair)) for pair in pairs]
    return pytest.mark.parametrize(("collective", "algorithm"), params)


every_algorithm = for_algorithms(ALGORITHMS)
every_shared_algorithm = for_algorithms(SHARED_ALGORITHMS)
every_reduction = for_algorithms([pair for pair in ALGORITHMS if CATALOG[pair[0]].reduces])
# Not chunked_ring, whose rounds overlap.
every_steppable = for_algorithms([pair for pair in ALGORITHMS if pair[1] != "chunked_ring"])
every_all_reduce = pytest.mark.parametrize("algorithm", CATALOG["all_reduce"].algorithms)


def counts_for(n: int) -> list[int]:
    return sorted({0, 1, n - 1, n, n + 1, 2 * n + 3, 17})


# ---- element types; NumPy has no bfloat16, so the conversion is here


def as_dtype(values: Array, dtype: DType) -> Array:
    """Converts values to the buffer representation of this type."""
    if dtype.name != "bfloat16":
        with np.errstate(all="ignore"):
            return values.astype(dtype.numpy)
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def values_of(buffer: Array, dtype: DType) -> Array:
    """Converts a buffer to float64 or int64."""
    if dtype.name == "bfloat16":
        return (buffer.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return buffer.astype(np.float64 if buffer.dtype.kind == "f" else np.int64)


def is_float(dtype: DType) -> bool:
    return "float" in dtype.name


# ---- the oracle


def reduced(op: str, vectors: list[Array], dtype: DType) -> Array:
    """Reduces in 64 bits, then converts: exact for small values, whatever the order."""
    stack = np.stack([values_of(vector, dtype) for vector in vectors])
    match op:
        case "sum":
            return as_dtype(stack.sum(axis=0), dtype)
        case "prod":
            return as_dtype(stack.prod(axis=0), dtype)
        case "min":
            return as_dtype(stack.min(axis=0), dtype)
        case "max":
            return as_dtype(stack.max(axis=0), dtype)
    total = values_of(as_dtype(stack.sum(axis=0), dtype), dtype)  # AVG divides the sum, which may have wrapped around
    mean = total / len(vectors)
    return as_dtype(mean if is_float(dtype) else np.trunc(mean), dtype)


def oracle(operation: Operation, sources: list[Array]) -> dict[int, Array]:
    """The expected first elements of each rank's destination; a rank without an entry receives nothing."""
    n, root, peer, count = len(sources), operation.root, operation.peer, operation.count
    all_ranks = range(n)

    def block(rank: int, index: int) -> Array:
        return sources[rank][index * count : (index + 1) * count]

    def combined(index: int) -> Array:
        return reduced(operation.op, [block(rank, index) for rank in all_ranks], operation.dtype)

    match operation.collective:
        case "all_reduce":
            return dict.fromkeys(all_ranks, combined(0))
        case "reduce":
            return {root: combined(0)}
        case "reduce_scatter":
            return {rank: combined(rank) for rank in all_ranks}
        case "broadcast":
            return dict.fromkeys(all_ranks, block(root, 0))
        case "all_gather":
            return dict.fromkeys(all_ranks, np.concatenate([block(rank, 0) for rank in all_ranks]))
        case "gather":
            return {root: np.concatenate([block(rank, 0) for rank in all_ranks])}
        case "scatter":
            return {rank: block(root, rank) for rank in all_ranks}
        case "all_to_all":
            return {rank: np.concatenate([block(other, rank) for other in all_ranks]) for rank in all_ranks}
        case "send":
            return {peer: block(root, 0)}
        case "barrier":
            return {}
    raise NotImplementedError(f"the oracle does not know {operation.collective} yet: add it here")


# ---- cases


@dataclass
class Case:
    """One call: every rank's buffers before it, and their expected contents afterwards."""

    operation: Operation
    in_place: bool = False
    before: list[tuple[Array, Array]] = field(default_factory=list)
    """Each rank's source and destination; in place, the smaller of the two is a view of the larger."""
    after: list[tuple[Array, Array]] = field(default_factory=list)

    def __str__(self) -> str:
        operation = self.operation
        return (
            f"{operation}{', in place' if self.in_place else ''}, root {operation.root}, peer {operation.peer}, "
            f"chunks of {operation.chunk_bytes or 'default'} bytes"
        )


def inputs(rng: np.random.Generator, op: str, dtype: DType, size: int) -> Array:
    """Values so small that the result is exact in every type and order, for up to five ranks."""
    if op == "prod":
        choices = [1, 2] + ([-1] if dtype.name != "uint8" else []) + ([0.5] if is_float(dtype) else [])
        return as_dtype(rng.choice(np.array(choices, np.float64), size), dtype)
    return as_dtype(rng.integers(0 if dtype.name == "uint8" else -8, 9, size, np.int8), dtype)


def needed_inputs(rng: np.random.Generator, operation: Operation, n: int) -> list[Array]:
    """For each rank as many values as the operation reads there: large vectors take long to draw."""
    return [inputs(rng, operation.op, operation.dtype, operation.extents(n, rank)[0]) for rank in range(n)]


@functools.lru_cache(maxsize=1)
def large_vectors(collective: str, n: int) -> tuple[list[Array], dict[int, Array]]:
    """The inputs of ``check_large_vectors`` and the oracle's results, which all algorithms of a collective share."""
    operation = Operation(collective, LARGE if collective != "barrier" else 0, root=1, peer=2)
    sources = needed_inputs(np.random.default_rng(2), operation, n)
    return sources, oracle(operation, sources)


def prepare(case: Case, sources: list[Array], expected: Mapping[int, Array] | None = None) -> Case:
    """Copies the sources into buffers with guards, and the oracle's results into copies of the buffers.

    ``expected``: these results, where a caller has them already.
    """
    operation, n = case.operation, len(sources)
    expected = oracle(operation, sources) if expected is None else expected
    for rank in range(n):
        source_size, destination_size = operation.extents(n, rank)
        if case.in_place:
            source, destination = in_one_buffer(operation, rank, source_size, destination_size)
        else:
            # A rank that needs no source or destination still passes a buffer, which must not change.
            source, destination = (
                np.full(max(extent, operation.count) + GUARD, SENTINEL, operation.dtype.numpy)
                for extent in (source_size, destination_size)
            )
        source[:source_size] = sources[rank][:source_size]
        case.before.append((source, destination))
    case.after = [same_layout(pair) for pair in case.before]
    for rank, result in expected.items():
        case.after[rank][1][: result.size] = result
    return case


def in_one_buffer(operation: Operation, rank: int, source_size: int, destination_size: int) -> tuple[Array, Array]:
    """Source and destination for an in-place call: the smaller is this rank's block of the larger."""
    buffer = np.full(max(source_size, destination_size, operation.count) + GUARD, SENTINEL, operation.dtype.numpy)
    offset = rank * operation.count
    if destination_size > source_size > 0:  # (all_)gather
        return buffer[offset : offset + source_size], buffer
    if source_size > destination_size > 0:  # (reduce_)scatter
        return buffer, buffer[offset : offset + destination_size]
    return buffer, buffer


def same_layout(pair: tuple[Array, Array]) -> tuple[Array, Array]:
    """Copies both buffers; a view stays a view of the other copy."""
    larger = max(pair, key=len)
    copy = larger.copy()
    if not np.shares_memory(*pair):
        return tuple(copy if part is larger else part.copy() for part in pair)  # type: ignore[return-value]
    start = larger.__array_interface__["data"][0]

    def view(part: Array) -> Array:
        offset = (part.__array_interface__["data"][0] - start) // part.itemsize
        return copy[offset : offset + part.size]

    return view(pair[0]), view(pair[1])


def targets(collective: str, n: int) -> Iterator[tuple[int, int]]:
    """Every root, or every pair of root and peer for send."""
    rooted = collective in {"broadcast", "reduce", "gather", "scatter", "send"}
    return itertools.product(range(n if rooted else 1), range(n if collective == "send" else 1))


def cases(collective: str, algorithm: str, n: int, one_in: int = 1, turn: int = 0) -> Iterator[Case]:
    """Every operation, type, count, root and peer, in place and not; reductions take turns with the roots, chunked_ring
    with chunk sizes.

    ``one_in``: every pair of operation and count runs with a share of the types, 1 / ``one_in``, another share each
    time; ``turn``: the share of the first pair.
    """
    entry = CATALOG[collective]
    rng = np.random.default_rng(sum(map(ord, collective + algorithm)) + n)
    combinations = itertools.product(
        enumerate(OPS if entry.reduces else ("sum",)),
        enumerate(DTYPES.values() if collective != "barrier" else (DTYPES["float32"],)),
        enumerate(counts_for(n) if collective != "barrier" else (0,)),
    )
    for (i, op), (j, dtype), (k, count) in combinations:
        if (i + j + k + turn) % one_in and collective != "barrier":  # of which there is one
            continue
        chunk = (1, 2, 0)[(i + k) % 3] if algorithm == "chunked_ring" else 0
        roots = list(targets(collective, n))
        for root, peer in [roots[(i + k) % len(roots)]] if entry.reduces else roots:
            operation = Operation(collective, count, dtype, op, algorithm, root, peer, chunk * dtype.itemsize)
            sources = [inputs(rng, op, dtype, n * count) for _ in range(n)]
            expected = oracle(operation, sources)
            yield prepare(Case(operation), sources, expected)
            if collective != "all_to_all":
                yield prepare(Case(operation, in_place=True), sources, expected)


def run(ranks: Ranks, batch: list[Case], stepped: bool = False) -> None:
    """Runs the cases on every rank and compares every buffer, including the guards."""

    def worker(comm: Communicator) -> None:
        for case in batch:
            operation = case.operation
            plan = operation.plan(comm.size, comm.rank)
            try:
                for index in range(len(plan.rounds)) if stepped else (None,):
                    # Fill the heap memory that scratch will reuse: its contents must not matter.
                    np.full(plan.scratch, SENTINEL, operation.dtype.numpy)
                    comm.run(operation, *case.before[comm.rank], timeout=LONG_S, round_index=index)
            except BaseException as error:
                error.add_note(f"rank {comm.rank}: {case}")
                raise
            compare(case, comm.rank)

    ranks.run(worker)


def compare(case: Case, rank: int) -> None:
    for name, actual, expected in zip(("source", "destination"), case.before[rank], case.after[rank], strict=True):
        if actual.tobytes() != expected.tobytes():
            raise AssertionError(f"rank {rank}: {name} of {case}\nis     {actual}\nwanted {expected}")


# ---- tests


@over_every_transport
@every_algorithm
def test_matches_the_oracle(ranks: Ranks, collective: str, algorithm: str) -> None:
    # All cases over one transport, with three ranks. The arithmetic depends neither on the transport nor on the number
    # of ranks, so the others run one element type per operation and count, another one for each count, transport and
    # number of ranks, with every root and peer. The rest is slow.
    one_in, turn = (1, 0) if (ranks.scheme, ranks.size) == ("inproc", 3) else (len(DTYPES), SCHEMES.index(ranks.scheme))
    batch = list(cases(collective, algorithm, ranks.size, one_in, turn + ranks.size))
    assert batch
    run(ranks, batch)


@over_transports(SHARED_MEMORY, *SIZES)
@every_shared_algorithm
def test_matches_the_oracle_in_shared_memory(ranks: Ranks, collective: str, algorithm: str) -> None:
    run(ranks, list(cases(collective, algorithm, ranks.size, one_in=4 if ranks.size > 2 else 1)))


@pytest.mark.slow
@over_transports(["inproc"], 1, 2, 4, 5)
@every_algorithm
def test_every_combination_matches_the_oracle(ranks: Ranks, collective: str, algorithm: str) -> None:
    """Also those that are left out above, with fewer and more than three ranks."""
    run(ranks, list(cases(collective, algorithm, ranks.size)))


@pytest.mark.slow
@over_transports(SHARED_MEMORY, 3, 4, 5)
@every_shared_algorithm
def test_every_combination_matches_the_oracle_in_shared_memory(ranks: Ranks, collective: str, algorithm: str) -> None:
    run(ranks, list(cases(collective, algorithm, ranks.size)))


@over_transports(sorted(URIS), 2, 5)
@every_steppable
def test_stepping_round_by_round_gives_the_same_result(ranks: Ranks, collective: str, algorithm: str) -> None:
    n, rng, batch = ranks.size, np.random.default_rng(1), []
    for count in counts_for(n) if collective != "barrier" else (0,):
        for root, peer in targets(collective, n):
            operation = Operation(collective, count, algorithm=algorithm, op="avg", root=root, peer=peer)
            sources = [inputs(rng, "avg", operation.dtype, n * count) for _ in range(n)]
            batch.append(prepare(Case(operation), sources))
    run(ranks, batch, stepped=True)


def check_large_vectors(ranks: Ranks, collective: str, algorithm: str) -> None:
    sources, expected = large_vectors(collective, ranks.size)
    operation = Operation(collective, LARGE if collective != "barrier" else 0, algorithm=algorithm, root=1, peer=2)
    run(ranks, [prepare(Case(operation), sources, expected)])
    if collective != "all_to_all":
        run(ranks, [prepare(Case(operation, in_place=True), sources, expected)])


@over_every_transport_at_3
@every_algorithm
def test_large_vectors(ranks: Ranks, collective: str, algorithm: str) -> None:
    """No link takes these messages at once, so sends are pending while buffers are overwritten."""
    check_large_vectors(ranks, collective, algorithm)


@over_transports(SHARED_MEMORY, 3)
@every_shared_algorithm
def test_large_vectors_in_shared_memory(ranks: Ranks, collective: str, algorithm: str) -> None:
    """The vectors are larger than a window."""
    check_large_vectors(ranks, collective, algorithm)


@over_every_transport_at_3
def test_consecutive_operations_do_not_mix(ranks: Ranks) -> None:
    """A fast rank may be one or two operations ahead. Some calls leave the algorithm to Hoop."""
    rng = np.random.default_rng(3)
    pairs = ALGORITHMS + [(name, "") for name in CATALOG]
    batch = []
    for collective, algorithm in pairs * 20:
        count = int(rng.integers(0, 50)) if collective != "barrier" else 0
        root, peer = map(int, rng.integers(0, 3, 2))
        operation = Operation(collective, count, algorithm=algorithm, root=root, peer=peer)
        sources = [inputs(rng, "sum", operation.dtype, ranks.size * count) for _ in range(ranks.size)]
        batch.append(prepare(Case(operation), sources))
    run(ranks, [batch[index] for index in rng.permutation(len(batch))])


# ---- tests: the edges of arithmetic


@over_every_transport_at_3
@every_reduction
def test_integers_wrap(ranks: Ranks, collective: str, algorithm: str) -> None:
    """As in C; AVG divides the wrapped sum and rounds towards zero."""
    extremes = {"int8": [100, 127, -128], "uint8": [200, 255, 129], "int32": [2**31 - 1, -(2**31), 2**30]}
    batch = []
    for (name, values), op in itertools.product(extremes.items(), ("sum", "prod", "avg")):
        operation = Operation(collective, 3, DTYPES[name], op, algorithm)
        base = np.array(values * 3, DTYPES[name].numpy)
        batch.append(prepare(Case(operation), [base, base, np.roll(base, 1)]))
    run(ranks, batch)


@over_every_transport_at_3
@every_reduction
def test_floats_overflow_to_infinity_without_a_warning(ranks: Ranks, collective: str, algorithm: str) -> None:
    """Infinity minus infinity gives a NaN, also without a warning."""
    largest = {"float16": 65504.0, "float32": 3e38, "float64": 1e308, "bfloat16": 3e38}
    batch = []
    for (name, value), op in itertools.product(largest.items(), ("sum", "prod", "avg")):
        operation = Operation(collective, 1, DTYPES[name], op, algorithm)
        sources = [as_dtype(np.full(3, value), DTYPES[name])] * 3
        with np.errstate(all="ignore"):
            batch.append(prepare(Case(operation), sources))
    run(ranks, batch)


@over_every_transport_at_3
@every_reduction
def test_a_nan_reaches_every_result(ranks: Ranks, collective: str, algorithm: str) -> None:
    """In every operation, whichever rank contributes it: every rank sees that one diverged."""
    for dtype, op, owner in itertools.product(filter(is_float, DTYPES.values()), OPS, range(3)):
        operation = Operation(collective, 2, dtype, op, algorithm)

        def worker(comm: Communicator, operation: Operation = operation, owner: int = owner) -> Array:
            dtype = operation.dtype
            source = np.ones(6)
            source[::2] = np.nan if comm.rank == owner else np.inf
            destination = as_dtype(np.zeros(2), dtype)
            comm.run(operation, as_dtype(source, dtype), destination, LONG_S)
            return values_of(destination, dtype)

        results = ranks.run(worker)
        for rank in range(3) if collective != "reduce" else (0,):
            assert list(np.isnan(results[rank])) == [True, False], f"rank {rank}: {operation}"


@over_every_transport
@every_all_reduce
def test_all_ranks_hold_the_same_bits(ranks: Ranks, algorithm: str) -> None:
    """The order of summation is the same on every rank and in every call."""
    for dtype in filter(is_float, DTYPES.values()):
        operation = Operation("all_reduce", 1001, dtype, "avg", algorithm, chunk_bytes=64)
        vectors = [as_dtype(np.random.default_rng(rank).standard_normal(1001), dtype) for rank in range(ranks.size)]

        def worker(comm: Communicator, operation: Operation = operation, vectors: list[Array] = vectors) -> list[bytes]:
            results = []
            for _ in range(2):
                destination = np.empty(1001, operation.dtype.numpy)
                comm.run(operation, vectors[comm.rank], destination, LONG_S)
                results.append(destination.tobytes())
            return results

        distinct = set(itertools.chain(*ranks.run(worker)))
        assert len(distinct) == 1, f"{len(distinct)} different results of {operation}"
        mean = values_of(np.frombuffer(distinct.pop(), dtype.numpy), dtype)
        exact = np.mean([values_of(vector, dtype) for vector in vectors], axis=0)
        np.testing.assert_allclose(mean, exact, atol={2: 0.05}.get(dtype.itemsize, 1e-6))


@over_every_transport
def test_the_naive_reduction_sums_in_rank_order(ranks: Ranks) -> None:
    """Starting with the root's own vector: naive is the reference for rounding."""
    vectors = [np.random.default_rng(rank).standard_normal(100).astype(np.float32) for rank in range(ranks.size)]
    for root in range(ranks.size):
        operation = Operation("reduce", 100, algorithm="naive", root=root)
        expected = vectors[root].copy()
        for rank, vector in enumerate(vectors):
            if rank != root:
                expected += vector

        def worker(comm: Communicator, operation: Operation = operation) -> bytes:
            destination = np.zeros(100, np.float32)
            comm.run(operation, vectors[comm.rank], destination, LONG_S)
            return destination.tobytes()

        assert ranks.run(worker)[root] == expected.tobytes(), f"root {root}"
