"""Every collective by every algorithm, against an oracle in plain NumPy, bit for bit and on every rank.

A case is one call of a collective by all ranks. Cases are run in batches: a test function prepares those
of one (collective, algorithm, N, transport), every rank's thread runs them one after the other, and
compares its own buffers whole: what the collective does not define must be as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ranks import LONG_S, SHARED, URIS, Ranks

from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import CATALOG, Operation
from hoop.memory.dtypes import DTYPES, DType


def is_slow(params: Mapping[str, Any]) -> bool:
    """test_hierarchical has more of hybrid, and inproc has all sizes."""
    scheme, size = params.get("ranks", ("", 0))
    return scheme == "hybrid" or (scheme in ("tcp", "shm") and size in (1, 4, 5))


pytestmark = pytest.mark.slow_if(when=is_slow)


Array = npt.NDArray[Any]
OPS = ("sum", "prod", "min", "max", "avg")
SIZES = (1, 2, 3, 4, 5)
ALGORITHMS = [(name, algorithm) for name, entry in CATALOG.items() for algorithm in entry.algorithms]
# Directly in arenas is not among them: it needs devices.
SHARED_ALGORITHMS = [
    (name, algorithm) for name, entry in CATALOG.items() for algorithm in entry.shared if algorithm != "direct"
]
GUARD = 3
"""Elements after the end of every buffer, which nobody may touch."""
SENTINEL = 77


def over_transports(schemes: Iterable[str], *sizes: int) -> pytest.MarkDecorator:
    """Runs a test with so many ranks, over each of these transports."""
    places = [pytest.param((scheme, size), id=f"{scheme}-{size}") for scheme in schemes for size in sizes]
    return pytest.mark.parametrize("ranks", places, indirect=True)


over_every_transport = over_transports(sorted(URIS), *SIZES)
over_every_transport_at_3 = over_transports(sorted(URIS), 3)


def over(pairs: list[tuple[str, str]]) -> pytest.MarkDecorator:
    """Runs a test for these collectives and algorithms."""
    params = [pytest.param(*pair, id="-".join(pair)) for pair in pairs]
    return pytest.mark.parametrize(("collective", "algorithm"), params)


every_algorithm = over(ALGORITHMS)
every_shared_algorithm = over(SHARED_ALGORITHMS)
every_reduction = over([pair for pair in ALGORITHMS if CATALOG[pair[0]].reduces])
# A chunked ring's rounds overlap, which is its point.
every_steppable = over([pair for pair in ALGORITHMS if pair[1] != "chunked_ring"])
every_all_reduce = pytest.mark.parametrize("algorithm", CATALOG["all_reduce"].algorithms)


def counts_for(n: int) -> list[int]:
    return sorted({0, 1, n - 1, n, n + 1, 2 * n + 3, 17})


# ---- element types: an oracle of its own for bfloat16, which NumPy does not have


def stored(values: Array, dtype: DType) -> Array:
    """Values as a buffer of this type holds them."""
    if dtype.name != "bfloat16":
        with np.errstate(all="ignore"):
            return values.astype(dtype.numpy)
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def values_of(buffer: Array, dtype: DType) -> Array:
    """A buffer as float64 or int64."""
    if dtype.name == "bfloat16":
        return (buffer.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return buffer.astype(np.float64 if buffer.dtype.kind == "f" else np.int64)


def is_float(dtype: DType) -> bool:
    return "float" in dtype.name


# ---- the oracle


def reduced(op: str, vectors: list[Array], dtype: DType) -> Array:
    """What the vectors come to, in 64 bits and then stored: exact, whatever the order, for small values."""
    stack = np.stack([values_of(vector, dtype) for vector in vectors])
    match op:
        case "sum":
            return stored(stack.sum(axis=0), dtype)
        case "prod":
            return stored(stack.prod(axis=0), dtype)
        case "min":
            return stored(stack.min(axis=0), dtype)
        case "max":
            return stored(stack.max(axis=0), dtype)
    total = values_of(stored(stack.sum(axis=0), dtype), dtype)  # AVG divides the sum, wrapped if it wraps
    mean = total / len(vectors)
    return stored(mean if is_float(dtype) else np.trunc(mean), dtype)


def oracle(operation: Operation, sources: list[Array]) -> dict[int, Array]:
    """What the destination of each rank begins with afterwards; a rank that is left out gets nothing."""
    n, root, peer, count = len(sources), operation.root, operation.peer, operation.count
    everyone = range(n)

    def block(rank: int, index: int) -> Array:
        return sources[rank][index * count : (index + 1) * count]

    def combined(index: int) -> Array:
        return reduced(operation.op, [block(rank, index) for rank in everyone], operation.dtype)

    match operation.collective:
        case "all_reduce":
            return dict.fromkeys(everyone, combined(0))
        case "reduce":
            return {root: combined(0)}
        case "reduce_scatter":
            return {rank: combined(rank) for rank in everyone}
        case "broadcast":
            return dict.fromkeys(everyone, block(root, 0))
        case "all_gather":
            return dict.fromkeys(everyone, np.concatenate([block(rank, 0) for rank in everyone]))
        case "gather":
            return {root: np.concatenate([block(rank, 0) for rank in everyone])}
        case "scatter":
            return {rank: block(root, rank) for rank in everyone}
        case "all_to_all":
            return {rank: np.concatenate([block(other, rank) for other in everyone]) for rank in everyone}
        case "send":
            return {peer: block(root, 0)}
        case "barrier":
            return {}
    raise NotImplementedError(f"the oracle does not know {operation.collective} yet: add it here")


# ---- cases


@dataclass
class Case:
    """One call, with every rank's buffers before and as they must be after."""

    operation: Operation
    in_place: bool = False
    before: list[tuple[Array, Array]] = field(default_factory=list)
    """For each rank its source and destination; in place the destination is a view into the source or
    the source into the destination, whichever is the larger."""
    after: list[tuple[Array, Array]] = field(default_factory=list)

    def __str__(self) -> str:
        one = self.operation
        return (
            f"{one}{', in place' if self.in_place else ''}, root {one.root}, peer {one.peer}, "
            f"chunks of {one.chunk_bytes or 'default'} bytes"
        )


def inputs(rng: np.random.Generator, op: str, dtype: DType, size: int) -> Array:
    """Values so small that every order of combination is exact in every type, for up to five ranks."""
    if op == "prod":
        choices = [1, 2] + ([-1] if dtype.name != "uint8" else []) + ([0.5] if is_float(dtype) else [])
        return stored(rng.choice(np.array(choices, np.float64), size), dtype)
    return stored(rng.integers(0 if dtype.name == "uint8" else -8, 9, size), dtype)


def prepare(case: Case, sources: list[Array]) -> Case:
    """Lays the sources out in buffers with guards, and the oracle's answer over copies of them."""
    one, n = case.operation, len(sources)
    answers = oracle(one, sources)
    for rank in range(n):
        needs, gets = one.extents(n, rank)
        if case.in_place:
            source, destination = in_one_buffer(one, rank, needs, gets)
        else:
            # Where the operation asks for nothing there is a buffer all the same: it must stay as it is.
            source, destination = (
                np.full(max(extent, one.count) + GUARD, SENTINEL, one.dtype.numpy) for extent in (needs, gets)
            )
        source[:needs] = sources[rank][:needs]
        case.before.append((source, destination))
    case.after = [same_layout(pair) for pair in case.before]
    for rank, answer in answers.items():
        case.after[rank][1][: answer.size] = answer
    return case


def in_one_buffer(one: Operation, rank: int, needs: int, gets: int) -> tuple[Array, Array]:
    """Source and destination as in-place operation wants them: the smaller is this rank's block of the larger."""
    whole = np.full(max(needs, gets, one.count) + GUARD, SENTINEL, one.dtype.numpy)
    at = rank * one.count
    if gets > needs > 0:  # (all_)gather
        return whole[at : at + needs], whole
    if needs > gets > 0:  # (reduce_)scatter
        return whole, whole[at : at + gets]
    return whole, whole


def same_layout(pair: tuple[Array, Array]) -> tuple[Array, Array]:
    """Copies, of which one is a view into the other where that was so."""
    larger = max(pair, key=len)
    copy = larger.copy()
    if not np.shares_memory(*pair):
        return tuple(copy if part is larger else part.copy() for part in pair)  # type: ignore[return-value]
    start = larger.__array_interface__["data"][0]

    def view(part: Array) -> Array:
        at = (part.__array_interface__["data"][0] - start) // part.itemsize
        return copy[at : at + part.size]

    return view(pair[0]), view(pair[1])


def targets(collective: str, n: int) -> Iterator[tuple[int, int]]:
    """Every root, and every pair of root and peer where there is one."""
    rooted = collective in {"broadcast", "reduce", "gather", "scatter", "send"}
    return itertools.product(range(n if rooted else 1), range(n if collective == "send" else 1))


def cases(collective: str, algorithm: str, n: int, thinned: bool) -> Iterator[Case]:
    """Every operation, type and count, in place and not; every root and pair of ranks with them, except that
    the roots of reductions, and chunk sizes, take turns.

    Thinned, every operation and count meet with a quarter of the types, another one each time.
    """
    entry = CATALOG[collective]
    rng = np.random.default_rng(sum(map(ord, collective + algorithm)) + n)
    everything = itertools.product(
        enumerate(OPS if entry.reduces else ("sum",)),
        enumerate(DTYPES.values() if collective != "barrier" else (DTYPES["float32"],)),
        enumerate(counts_for(n) if collective != "barrier" else (0,)),
    )
    for (i, op), (j, dtype), (k, count) in everything:
        if thinned and (i + j + k) % 4:
            continue
        chunk = (1, 2, 0)[(i + j + k) % 3] if algorithm == "chunked_ring" else 0
        roots = list(targets(collective, n))
        for root, peer in [roots[(i + j + k) % len(roots)]] if entry.reduces else roots:
            operation = Operation(collective, count, dtype, op, algorithm, root, peer, chunk * dtype.itemsize)
            sources = [inputs(rng, op, dtype, n * count) for _ in range(n)]
            yield prepare(Case(operation), sources)
            if collective != "all_to_all":
                yield prepare(Case(operation, in_place=True), sources)


def run(ranks: Ranks, batch: list[Case], stepped: bool = False) -> None:
    """Runs the cases on every rank and compares every buffer, guards included."""

    def job(one: Communicator) -> None:
        for case in batch:
            operation = case.operation
            plan = operation.plan(one.size, one.rank)
            try:
                for index in range(len(plan.rounds)) if stepped else (None,):
                    # What memory from the heap happens to hold must not matter.
                    np.full(plan.scratch, SENTINEL, operation.dtype.numpy)
                    one.run(operation, *case.before[one.rank], timeout=LONG_S, round_index=index)
            except BaseException as error:
                error.add_note(f"rank {one.rank}: {case}")
                raise
            compare(case, one.rank)

    ranks.run(job)


def compare(case: Case, rank: int) -> None:
    for name, found, wanted in zip(("source", "destination"), case.before[rank], case.after[rank], strict=True):
        if found.tobytes() != wanted.tobytes():
            raise AssertionError(f"rank {rank}: {name} of {case}\nis     {found}\nwanted {wanted}")


# ---- tests


@over_every_transport
@every_algorithm
def test_matches_the_oracle(ranks: Ranks, collective: str, algorithm: str) -> None:
    # Over one transport without exception. What is computed does not depend on it, so over the others a
    # quarter of the element types is enough for an operation and a count; the next count has other ones.
    batch = list(cases(collective, algorithm, ranks.size, thinned=ranks.scheme != "inproc"))
    assert batch
    run(ranks, batch)


@over_transports(SHARED, *SIZES)
@every_shared_algorithm
def test_matches_the_oracle_in_shared_memory(ranks: Ranks, collective: str, algorithm: str) -> None:
    run(ranks, list(cases(collective, algorithm, ranks.size, thinned=False)))


@over_transports(sorted(URIS), 2, 5)
@every_steppable
def test_stepping_round_by_round_comes_to_the_same(ranks: Ranks, collective: str, algorithm: str) -> None:
    n, rng, batch = ranks.size, np.random.default_rng(1), []
    for count in counts_for(n) if collective != "barrier" else (0,):
        for root, peer in targets(collective, n):
            operation = Operation(collective, count, algorithm=algorithm, op="avg", root=root, peer=peer)
            sources = [inputs(rng, "avg", operation.dtype, n * count) for _ in range(n)]
            batch.append(prepare(Case(operation), sources))
    run(ranks, batch, stepped=True)


def check_large_vectors(ranks: Ranks, collective: str, algorithm: str) -> None:
    count = 1_000_003 if collective != "barrier" else 0
    operation = Operation(collective, count, algorithm=algorithm, root=1, peer=2)
    rng = np.random.default_rng(2)
    sources = [inputs(rng, "sum", operation.dtype, ranks.size * count) for _ in range(ranks.size)]
    run(ranks, [prepare(Case(operation), sources)])
    if collective != "all_to_all":
        run(ranks, [prepare(Case(operation, in_place=True), sources)])


@over_every_transport_at_3
@every_algorithm
def test_large_vectors(ranks: Ranks, collective: str, algorithm: str) -> None:
    """Messages that no link takes at once, so that what is pending meets what is overwritten."""
    check_large_vectors(ranks, collective, algorithm)


@over_transports(SHARED, 3)
@every_shared_algorithm
def test_large_vectors_in_shared_memory(ranks: Ranks, collective: str, algorithm: str) -> None:
    """Piece by piece."""
    check_large_vectors(ranks, collective, algorithm)


@over_every_transport_at_3
def test_operations_follow_one_another(ranks: Ranks) -> None:
    """A rank that is ahead is already in the next operation, or the one after it; Hoop's own choice among them."""
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
    """As in C, and AVG is the wrapped sum divided, rounded towards zero."""
    extremes = {"int8": [100, 127, -128], "uint8": [200, 255, 129], "int32": [2**31 - 1, -(2**31), 2**30]}
    batch = []
    for (name, values), op in itertools.product(extremes.items(), ("sum", "prod", "avg")):
        operation = Operation(collective, 3, DTYPES[name], op, algorithm)
        base = np.array(values * 3, DTYPES[name].numpy)
        batch.append(prepare(Case(operation), [base, base, np.roll(base, 1)]))
    run(ranks, batch)


@over_every_transport_at_3
@every_reduction
def test_floats_overflow_to_infinity_in_silence(ranks: Ranks, collective: str, algorithm: str) -> None:
    """Also infinity less infinity is no warning but a NaN."""
    largest = {"float16": 65504.0, "float32": 3e38, "float64": 1e308, "bfloat16": 3e38}
    batch = []
    for (name, value), op in itertools.product(largest.items(), ("sum", "prod", "avg")):
        operation = Operation(collective, 1, DTYPES[name], op, algorithm)
        sources = [stored(np.full(3, value), DTYPES[name])] * 3
        with np.errstate(all="ignore"):
            batch.append(prepare(Case(operation), sources))
    run(ranks, batch)


@over_every_transport_at_3
@every_reduction
def test_a_nan_wins(ranks: Ranks, collective: str, algorithm: str) -> None:
    """In every operation, whoever has it: a rank that diverged is seen by all."""
    for dtype, op, owner in itertools.product(filter(is_float, DTYPES.values()), OPS, range(3)):
        operation = Operation(collective, 2, dtype, op, algorithm)

        def job(one: Communicator, operation: Operation = operation, owner: int = owner) -> Array:
            dtype = operation.dtype
            source = np.ones(6)
            source[::2] = np.nan if one.rank == owner else np.inf
            destination = stored(np.zeros(2), dtype)
            one.run(operation, stored(source, dtype), destination, LONG_S)
            return values_of(destination, dtype)

        results = ranks.run(job)
        for rank in range(3) if collective != "reduce" else (0,):
            assert list(np.isnan(results[rank])) == [True, False], f"rank {rank}: {operation}"


@over_every_transport
@every_all_reduce
def test_all_ranks_hold_the_same_bits(ranks: Ranks, algorithm: str) -> None:
    """Where the order of summation matters, it is the same for all, and again the next time."""
    for dtype in filter(is_float, DTYPES.values()):
        operation = Operation("all_reduce", 1001, dtype, "avg", algorithm, chunk_bytes=64)
        vectors = [stored(np.random.default_rng(rank).standard_normal(1001), dtype) for rank in range(ranks.size)]

        def job(one: Communicator, operation: Operation = operation, vectors: list[Array] = vectors) -> list[bytes]:
            results = []
            for _ in range(2):
                destination = np.empty(1001, operation.dtype.numpy)
                one.run(operation, vectors[one.rank], destination, LONG_S)
                results.append(destination.tobytes())
            return results

        held = set(itertools.chain(*ranks.run(job)))
        assert len(held) == 1, f"{len(held)} different results of {operation}"
        mean = values_of(np.frombuffer(held.pop(), dtype.numpy), dtype)
        exact = np.mean([values_of(vector, dtype) for vector in vectors], axis=0)
        np.testing.assert_allclose(mean, exact, atol={2: 0.05}.get(dtype.itemsize, 1e-6))


@over_every_transport
def test_the_naive_reduction_sums_in_rank_order(ranks: Ranks) -> None:
    """Beginning with the root's own: it is the reference for those who must know every rounding."""
    vectors = [np.random.default_rng(rank).standard_normal(100).astype(np.float32) for rank in range(ranks.size)]
    for root in range(ranks.size):
        operation = Operation("reduce", 100, algorithm="naive", root=root)
        expected = vectors[root].copy()
        for rank, vector in enumerate(vectors):
            if rank != root:
                expected += vector

        def job(one: Communicator, operation: Operation = operation) -> bytes:
            destination = np.zeros(100, np.float32)
            one.run(operation, vectors[one.rank], destination, LONG_S)
            return destination.tobytes()

        assert ranks.run(job)[root] == expected.tobytes(), f"root {root}"
