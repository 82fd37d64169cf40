"""The native core beside the NumPy path, its oracle: the same bits, and the same errors.

Skipped where the native core is not built. Which of two NaNs a reduction returns, and which zero MIN and MAX return of
0 and -0, is not specified (NumPy itself differs between processors); everything else is compared bit for bit.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ranks import LONG_S, NUMPY, PROMPT_S, Ranks, deadline_in, endpoints_of, native_core, outcomes

from hoop.collectives.communicator import Communicator
from hoop.collectives.native_all_reduce import flat_bytes, sum_steps
from hoop.collectives.ordered_all_reduce import OrderedAllReduce
from hoop.collectives.reduction import OPERATIONS, Reduction
from hoop.collectives.registry import Operation
from hoop.collectives.shard_tree import Leaf, merge_plan
from hoop.errors import DeadlineExceeded, PeerLost
from hoop.memory import Arena
from hoop.memory.dtypes import DTYPES, DType
from hoop.native import build, library
from hoop.topology import Address
from hoop.transport import open_transport
from hoop.transport.base import SharedEndpoint
from hoop.transport.shm_listener import ShmTransport

Array = npt.NDArray[Any]
with native_core(True):
    needs_core = pytest.mark.skipif(library.load() is None, reason=f"the native core is {library.status()}")


def random_vectors(kind: DType, count: int, ranks: int, seed: int = 1) -> list[Array]:
    """Vectors of random bits: all numbers, subnormal ones, infinities and NaNs."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, count * kind.itemsize, np.uint8).view(kind.numpy) for _ in range(ranks)]


def comparable(values: Array, kind: DType) -> Array:
    """The bits, with one NaN for all NaNs and one zero for both zeros."""
    bits = values.view(f"u{kind.itemsize}").copy()
    if "float" in kind.name:
        wide = (bits.astype(np.uint32) << 16).view(np.float32) if kind.name == "bfloat16" else values
        bits[np.isnan(wide)] = 1
        bits[wide == 0] = 0
    return bits


@needs_core
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("kind", DTYPES.values(), ids=str)
def test_folds_have_the_bits_of_numpy(kind: DType, op: str) -> None:
    with native_core(True):
        core = library.load()
    assert core is not None
    for ranks in (2, 3, 4, 5, 8, 16):
        for count in (1, 7, 33, 4096 // kind.itemsize + 1, 9999):
            vectors = random_vectors(kind, count, ranks)
            expected, found = np.empty(count, kind.numpy), np.empty(count, kind.numpy)
            Reduction(op, kind).fold(vectors, [expected])
            state = library.AllReduceState(
                endpoint=ctypes.addressof(endpoint := library.EndpointState(size=ranks)),
                count=count,
                dtype=library.DTYPES.index(kind.name),
                operator=library.OPERATORS.index("sum" if op == "avg" else op),
                itemsize=kind.itemsize,
                average=op == "avg",
                temporaries=ctypes.addressof(temporaries := ctypes.create_string_buffer(2 * library.BLOCK_BYTES)),
            )
            parts = library.addresses([vector.ctypes.data for vector in vectors])
            core.fold(ctypes.addressof(state), ctypes.addressof(parts), found.ctypes.data)
            assert np.array_equal(comparable(found, kind), comparable(expected, kind)), f"{ranks} vectors of {count}"
            del endpoint, temporaries


def test_element_types_and_structures_are_those_of_the_library() -> None:
    assert set(library.DTYPES) == set(DTYPES)
    assert {*library.OPERATORS, "avg"} == set(OPERATIONS)


# ---- all_reduce between ranks


def counts(ranks: int, kind: DType) -> list[int]:
    """None, one, fewer and more than ranks, odd ones, the last flat and the first staged one, several pieces."""
    flat = flat_bytes(ranks) // kind.itemsize
    return [0, 1, ranks - 1, ranks + 1, 17, flat, flat + 1, 5000, (3 << 20) // kind.itemsize + 3]


def sums(ranks: Ranks, vectors: list[list[Array]], kind: DType, op: str, in_place: bool) -> list[list[Array]]:
    """The results of all counts, by rank. ``vectors``: for each count those of all ranks."""

    def worker(comm: Communicator) -> list[Array]:
        found = []
        for of_ranks in vectors:
            source = of_ranks[comm.rank].copy()
            count = len(source)
            destination = source if in_place else np.zeros_like(source)
            comm.run(Operation("all_reduce", count, kind, op), source, destination, LONG_S)
            comm.prepare(Operation("all_reduce", count, kind, "max"), destination, destination)(deadline_in())
            found.append(destination)
        return found

    return ranks.run(worker)


@needs_core
@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_reduces_have_the_bits_of_numpy(size: int) -> None:
    """With 2 ranks every type and operation; with more every type, and the operations in turn."""
    with Ranks("shm", size) as native, Ranks(NUMPY, size) as numpy:
        cases = [(kind, op) for kind in DTYPES.values() for op in OPERATIONS]
        if size > 2:
            cases = [(kind, OPERATIONS[index % len(OPERATIONS)]) for index, kind in enumerate(DTYPES.values())]
        of_kinds = {
            kind.name: [random_vectors(kind, one, size, one) for one in counts(size, kind)] for kind, _ in cases
        }
        for index, (kind, op) in enumerate(cases):
            vectors, in_place = of_kinds[kind.name], index % 2 == 0
            found, expected = (sums(ranks, vectors, kind, op, in_place) for ranks in (native, numpy))
            for one, other in zip(found, expected, strict=True):
                for left, right in zip(one, other, strict=True):
                    assert np.array_equal(comparable(left, kind), comparable(right, kind)), f"{op} of {kind.name}"
        assert all(native_of(comm) is not None for comm in native.communicators)
        assert all(native_of(comm) is None for comm in numpy.communicators)


def native_of(comm: Communicator) -> object:
    assert isinstance(comm.endpoint, SharedEndpoint)
    return comm.endpoint.native


def test_ranks_agree_on_the_numpy_path_if_one_has_no_native_core() -> None:
    with ExitStack() as opened:
        transports = [opened.enter_context(open_transport("shm://127.0.0.1:0")) for _ in range(3)]
        peers = [transport.address for transport in transports]
        communicators = []
        for rank, transport in enumerate(transports):
            with native_core(rank != 1):
                communicators.append(Communicator(transport.endpoint(7, 1, rank, peers)))
                opened.callback(communicators[-1].close)
        vectors = [np.full(3000, rank + 1, np.float32) for rank in range(3)]
        operation = Operation("all_reduce", 3000)
        handles = [comm.start(operation, one, one, LONG_S) for comm, one in zip(communicators, vectors, strict=True)]
        for handle in handles:
            handle.wait(LONG_S)
        assert all((vector == 6).all() for vector in vectors)
        assert [native_of(comm) for comm in communicators] == [None] * 3


# ---- in arenas


@contextmanager
def ranks_with_arenas(folder: Path, size: int, native: bool) -> Iterator[list[tuple[Communicator, Arena]]]:
    with ExitStack() as opened:
        arenas = [opened.enter_context(Arena.create(folder / f"{native}-{rank}", 8 << 20)) for rank in range(size)]
        transports = [opened.enter_context(ShmTransport(Address("test", 0), arena)) for arena in arenas]
        with native_core(native):
            communicators = [Communicator(endpoint) for endpoint in endpoints_of(list(transports))]
        for comm in communicators:
            opened.callback(comm.close)
        yield list(zip(communicators, arenas, strict=True))


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_core)])
def test_what_was_read_of_a_rank_that_has_left_does_not_count(
    tmp_path: Path, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is stopped while it reads goes on when the other has given up, before its listener has noticed."""
    with ranks_with_arenas(tmp_path, 2, native) as ranks, ThreadPoolExecutor(1) as thread:
        stopped, other = (comm.endpoint for comm, _ in ranks)
        assert isinstance(stopped, SharedEndpoint)
        assert isinstance(other, SharedEndpoint)
        first = thread.submit(other.barrier, deadline_in())
        stopped.barrier(deadline_in())
        first.result()
        stopped.verify_reads()
        monkeypatch.setattr(stopped, "mark_lost", lambda peer, reason: None)
        last = thread.submit(other.barrier, deadline_in())
        while stopped.segments[1].barrier_count[0] < 2:
            time.sleep(0.001)
        other.close()
        assert isinstance(last.exception(), PeerLost)
        with pytest.raises(PeerLost, match="rank 1 at"):
            stopped.barrier(deadline_in())
        with pytest.raises(PeerLost, match="rank 1 at"):
            stopped.verify_reads()


def on_all(ranks: list[tuple[Communicator, Arena]], function: Callable[[Communicator, Arena], bytes]) -> list[bytes]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda rank: function(*rank), ranks, timeout=LONG_S))


def direct_and_ordered(comm: Communicator, arena: Arena) -> bytes:
    """An all_reduce in arenas of each type, then an ordered sum of 2 to 4 shards a rank."""
    found = b""
    for kind in DTYPES.values():
        count = 20_001
        vector = arena.array(arena.allocate(f"v-{kind.name}", count * kind.itemsize).address, kind, count)
        vector[:] = np.arange(count) % 7 + comm.rank
        prepared = comm.prepare(Operation("all_reduce", count, kind, "avg"), vector, vector)
        assert prepared.algorithm == "direct"
        for _ in range(3):
            prepared(deadline_in())
        found += vector.tobytes()
    shards, count = 3 * comm.size - 1, 30_011
    holdings = [
        merge_plan([shard for shard in range(shards) if shard % comm.size == rank], shards) for rank in range(comm.size)
    ]
    mine, kind = holdings[comm.rank], DTYPES["float32"]
    rows = max(1, mine.slots)
    slots = arena.array(arena.allocate("slots", rows * count * 4).address, kind, rows * count).reshape(rows, count)
    output = arena.array(arena.allocate("output", count * 4).address, kind, count)
    for span in (None, (5, 7), (100, 29_999)):
        output[:] = 0
        values = np.random.default_rng(3).normal(size=(shards, count)).astype(np.float32)
        for shard, slot_merge in zip(mine.order, mine.slot_merges, strict=True):
            slots[slot_merge.slot] = values[shard]
            for into, other in slot_merge.merges:
                slots[into] += slots[other]
        all_reduce = OrderedAllReduce(comm, holdings, shards, slots, output, deadline_in(), span)
        waited = all_reduce(deadline_in())
        assert 0 <= waited < LONG_S
        assert all_reduce.bytes_moved > 0 or span == (5, 7)
        found += all_reduce.result.tobytes()
    return found


@needs_core
@pytest.mark.parametrize("size", [2, 3, 4])
def test_vectors_in_arenas_have_the_bits_of_numpy(tmp_path: Path, size: int) -> None:
    results = []
    for native in (True, False):
        with ranks_with_arenas(tmp_path, size, native) as ranks:
            results.append(on_all(ranks, direct_and_ordered))
            assert all((native_of(comm) is not None) == native for comm, _ in ranks)
    assert results[0] == results[1]


class Pieces:
    """Work in pieces; ``begun`` is set with the first one."""

    def __init__(self, count: int, begun: threading.Event) -> None:
        self.seconds, self.done, self._count, self._begun = 0.0, 0, count, begun

    def __call__(self) -> bool:
        if self.done == self._count:
            return False
        started = time.perf_counter()
        self.done += 1
        self._begun.set()
        self.seconds += time.perf_counter() - started
        return True


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_core), False])
@pytest.mark.parametrize("pieces", [1, 50])
def test_a_rank_works_while_it_waits_in_an_ordered_sum(tmp_path: Path, native: bool, pieces: int) -> None:
    """Rank 1 comes once rank 0 has begun its work. The sum is the same."""
    begun = threading.Event()
    works = [Pieces(pieces, begun), Pieces(0, begun)]
    holdings = [merge_plan([0, 1], 3), merge_plan([2], 3)]

    def reduce(comm: Communicator, arena: Arena) -> bytes:
        kind = DTYPES["float32"]
        slots = arena.array(arena.allocate("slots", 2 * 1000 * 4).address, kind, 2000).reshape(2, 1000)
        output = arena.array(arena.allocate("output", 1000 * 4).address, kind, 1000)
        all_reduce = OrderedAllReduce(comm, holdings, 3, slots, output, deadline_in())
        for value in (1.0, 2.0):
            slots[:] = value + comm.rank
            if comm.rank == 1:
                assert begun.wait(LONG_S), "rank 0 works while it waits"
            waited = all_reduce(deadline_in(), works[comm.rank])
            assert 0 <= waited < LONG_S
            assert (output == 2 * value + 1).all()
        return b""

    with ranks_with_arenas(tmp_path, 2, native) as ranks:
        on_all(ranks, reduce)
    assert 1 <= works[0].done <= pieces
    assert works[1].done == 0


def test_the_steps_of_a_sum_never_write_to_an_operand() -> None:
    a, b, c, d, e = (Leaf(0, slot) for slot in range(5))
    leaves, steps, result, temporaries = sum_steps((((a, b), (c, d)), e))
    assert leaves == [a, b, c, d, e]
    values: dict[int, object] = dict(enumerate("abcde"))
    for left, right, into in steps:
        assert into not in (left, right)
        assert into >= len(leaves)
        values[into] = (values[left], values[right])
    assert values[result] == ((("a", "b"), ("c", "d")), "e")
    assert max(into for _, _, into in steps) < len(leaves) + temporaries
    assert sum_steps(a)[1:] == ([], 0, 1)


# ---- errors, deadlines, interruption


@needs_core
def test_a_rank_that_waits_alone_names_the_other_at_its_deadline_and_meets_it_later() -> None:
    with Ranks("shm", 2) as ranks:
        first, second = ranks.communicators
        vectors = [np.full(4, rank + 1, np.float32) for rank in range(2)]
        operation = Operation("all_reduce", 4)
        ranks.run(lambda comm: comm.run(operation, vectors[comm.rank].copy(), vectors[comm.rank].copy(), LONG_S))
        with pytest.raises(DeadlineExceeded, match=r"rank 0: waiting for rank 1 .* passed its deadline"):
            first.run(operation, vectors[0], vectors[0], 0.05)
        resume = first.prepared(operation).try_run(vectors[0], vectors[0], time.monotonic(), deadline_in())
        assert resume is not None
        handle = second.start(operation, vectors[1], vectors[1], LONG_S)
        resume()
        handle.wait(LONG_S)
        assert [vector.tolist() for vector in vectors] == [[3.0] * 4] * 2


@needs_core
@pytest.mark.parametrize("count", [1, 100_000])
def test_an_abort_from_another_thread_ends_the_wait(count: int) -> None:
    with Ranks("shm", 2) as ranks:
        first = ranks.communicators[0]
        vector = np.zeros(count, np.float32)
        handle = first.start(Operation("all_reduce", count), vector, vector, LONG_S)
        first.endpoint.abort(PeerLost("stopped by the test"))
        (found,) = outcomes([_future(handle)], PROMPT_S)
        assert isinstance(found, PeerLost)
        assert "stopped by the test" in str(found)


def _future(handle: Any) -> Any:
    class Waiting:
        def result(self, timeout: float) -> Any:
            return handle.wait(timeout)

    return Waiting()


@needs_core
def test_a_peer_that_closes_is_named() -> None:
    with Ranks("shm", 3) as ranks:
        vector = np.zeros(10, np.float32)
        handle = ranks.communicators[0].start(Operation("all_reduce", 10), vector, vector, LONG_S)
        ranks.communicators[2].close()
        (found,) = outcomes([_future(handle)], PROMPT_S)
        assert isinstance(found, PeerLost)
        assert "rank 2" in str(found)


class Interrupted(Exception):
    """Raised by the signal handler of the test."""


@needs_core
def test_a_signal_interrupts_the_wait() -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_name != "complete_native":
            frame = frame.f_back
        if frame is not None:  # it waits; before, the timer goes on
            raise Interrupted

    with Ranks("shm", 2) as ranks:
        vector = np.zeros(1, np.float32)
        operation = Operation("all_reduce", 1)
        ranks.run(lambda comm: comm.run(operation, vector.copy(), vector.copy(), LONG_S))
        before = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        started = time.monotonic()
        try:
            with pytest.raises(Interrupted):
                ranks.communicators[0].run(operation, vector, vector, LONG_S)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert time.monotonic() - started < PROMPT_S


# ---- building and loading


def test_a_library_that_anybody_can_write_to_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / build.LIBRARY).write_bytes(b"")
    tmp_path.chmod(0o777)
    core, reason = library._load(tmp_path)
    assert core is None
    assert reason == f"every user of this machine can write to {tmp_path}; chmod o-w {tmp_path}"
    tmp_path.chmod(0o700)
    (tmp_path / build.LIBRARY).chmod(0o666)
    library._load.cache_clear()
    assert "can write to" in library._load(tmp_path)[1]
    library._load.cache_clear()


def test_a_file_that_is_no_library_and_a_missing_one_are_reasons_not_errors(tmp_path: Path) -> None:
    assert "it is not built; python -m hoop.native.build" in library._load(tmp_path)[1]
    library._load.cache_clear()
    (tmp_path / build.LIBRARY).write_bytes(b"no library")
    assert "it cannot be loaded" in library._load(tmp_path)[1]
    library._load.cache_clear()


@needs_core
def test_a_library_of_other_sources_is_not_loaded(tmp_path: Path) -> None:
    for name in (build.LIBRARY, *build.SOURCES):
        (tmp_path / name).write_bytes((build.HERE / name).read_bytes())
    assert library._load(tmp_path)[0] is not None
    library._load.cache_clear()
    with (tmp_path / build.SOURCES[0]).open("a") as file:
        file.write("/* changed */\n")
    assert "it is built from other sources" in library._load(tmp_path)[1]
    library._load.cache_clear()


def test_without_a_compiler_the_build_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    with pytest.raises(build.BuildError, match=r"cannot be built|is for Linux"):
        build.build(tmp_path)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(build.BuildError, match=r"pip install ziglang|is for Linux"):
        build.build(tmp_path)
    assert os.listdir(tmp_path) == []


def test_the_native_core_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOP_NATIVE", "0")
    assert library.load() is None
    assert library.status() == "not in use: HOOP_NATIVE=0 turns it off; unset HOOP_NATIVE to use it"
