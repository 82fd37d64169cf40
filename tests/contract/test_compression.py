"""Measures each compression's error: after one step, and over many steps with error feedback."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from ranks import LONG_S, Ranks, deadline_in

from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import Operation
from hoop.errors import InvalidArgument
from hoop.memory import dtype

pytestmark = pytest.mark.slow_if(when=lambda params: params.get("scheme") == "hybrid")  # see test_hierarchical

COUNT = 3001
"""Not a multiple of any block size here."""
TRANSPORTS_AND_SIZES = [("inproc", 1), ("inproc", 3), ("tcp", 2), ("shm", 3)]
over_transports = pytest.mark.parametrize("ranks", TRANSPORTS_AND_SIZES, indirect=True, ids=str, scope="module")
COMPRESSIONS = ["float16", "bfloat16", "int8", "top_k:0.1", "powersgd:2"]
WITH_ERROR_FEEDBACK = COMPRESSIONS[2:]


@pytest.fixture
def fresh(ranks: Ranks) -> Iterator[Ranks]:
    """Ranks without residuals of earlier tests; the next test gets new communicators."""
    yield ranks
    ranks.broken = True


def gradients(size: int, seed: int = 0) -> list[Any]:
    """One vector per rank: a low-rank matrix plus noise, like real gradients."""
    draw = np.random.default_rng(seed)
    low = (draw.standard_normal((55, 2)) @ draw.standard_normal((2, 55))).reshape(-1)[:COUNT]
    return [(low + 0.1 * draw.standard_normal(COUNT)).astype(np.float32) for _ in range(size)]


def reduced(ranks: Ranks, compression: str, sources: list[Any], op: str = "sum") -> list[Any]:
    """One step, out of place: residuals are stored by the address of the source."""
    operation = Operation("all_reduce", sources[0].size, op=op, compression=compression)
    results = [np.empty_like(source) for source in sources]
    reports = ranks.run(lambda comm: comm.run(operation, sources[comm.rank], results[comm.rank], LONG_S))
    assert {report.algorithm for report in reports} == {compression}
    return results


def error(result: Any, exact: Any) -> float:
    return float(np.linalg.norm(result - exact) / np.linalg.norm(exact))


@over_transports
@pytest.mark.parametrize(("compression", "bound"), list(zip(COMPRESSIONS, (1e-3, 6e-3, 2e-2, 0.9, 0.8), strict=True)))
def test_one_step_is_within_its_bound_and_the_same_on_every_rank(fresh: Ranks, compression: str, bound: float) -> None:
    vectors = gradients(fresh.size)
    results = reduced(fresh, compression, vectors)
    for result in results:
        assert np.array_equal(result, results[0])
    assert 0 < error(results[0], np.sum(vectors, axis=0, dtype=np.float64)) < bound


@over_transports
@pytest.mark.parametrize(
    ("compression", "bound"), list(zip([*WITH_ERROR_FEEDBACK, "int8:64"], (1e-3, 0.15, 0.1, 1e-3), strict=True))
)
def test_error_feedback_sends_the_residual_later(fresh: Ranks, compression: str, bound: float) -> None:
    """The mean over many steps with the same gradient converges to the exact sum: nothing is lost."""
    vectors = gradients(fresh.size)
    steps = 40
    total = np.zeros(COUNT)
    for _ in range(steps):
        total += reduced(fresh, compression, vectors)[0]
    exact = np.sum(vectors, axis=0, dtype=np.float64)
    assert error(total / steps, exact) < bound


@over_transports
def test_representable_values_are_exact_and_avg_divides(fresh: Ranks) -> None:
    integers = [np.arange(COUNT, dtype=np.float32) % 8 + rank for rank in range(fresh.size)]
    exact = np.sum(integers, axis=0)
    for compression in ("float16", "top_k:1"):
        for result in reduced(fresh, compression, integers):
            assert np.array_equal(result, exact)
        for result in reduced(fresh, compression, integers, op="avg"):
            assert np.array_equal(result, exact / np.float32(fresh.size))


@over_transports
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_an_empty_vector_and_zeros(fresh: Ranks, compression: str) -> None:
    for count in (0, 5):
        vectors = [np.zeros(count, np.float32) for _ in range(fresh.size)]
        for result in reduced(fresh, compression, vectors):
            assert np.array_equal(result, np.zeros(count))


@over_transports
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_value_reaches_every_rank_and_affects_one_step_only(
    fresh: Ranks, compression: str, value: float
) -> None:
    vectors = gradients(fresh.size)
    vectors[-1][7] = value
    for result in reduced(fresh, compression, vectors):
        assert not np.isfinite(result).all()
    vectors[-1][7] = 1
    for _ in range(2):  # the residual of a shard's owner is from the previous step
        results = reduced(fresh, compression, vectors)
    for result in results:
        assert np.isfinite(result).all()
        assert np.array_equal(result, results[0])


def test_two_vectors_in_flight_keep_separate_residuals(scheme: str) -> None:
    """Started together in every step, they give the same sums as one after the other."""
    sources = {together: [gradients(3, seed) for seed in (1, 2)] for together in (True, False)}

    def worker(comm: Communicator, together: bool) -> list[Any]:
        sums = [np.zeros(COUNT), np.zeros(COUNT)]
        into = [np.empty(COUNT, np.float32) for _ in sums]
        operation = Operation("all_reduce", COUNT, compression="top_k:0.2")
        prepared = [
            comm.prepare(operation, vectors[comm.rank], target)
            for vectors, target in zip(sources[together], into, strict=True)
        ]
        for _ in range(5):
            if together:
                for handle in [call.start(LONG_S) for call in prepared]:
                    handle.wait(LONG_S)
            else:
                for call in prepared:
                    call(deadline_in())
            for total, target in zip(sums, into, strict=True):
                total += target
        return sums

    with Ranks(scheme, 3) as ranks:
        concurrent = ranks.run(lambda comm: worker(comm, together=True))
        one_by_one = ranks.run(lambda comm: worker(comm, together=False))
    for rank in range(3):
        assert np.array_equal(one_by_one[rank], concurrent[rank]), f"rank {rank}"


@pytest.mark.parametrize("ranks", [("tcp", 3)], indirect=True, ids=str, scope="module")
def test_fewer_bytes_are_sent(fresh: Ranks) -> None:
    vectors = [np.ones(30_000, np.float32)] * 3

    def sent(comm: Communicator, compression: str) -> int:
        vector = vectors[comm.rank].copy()
        return comm.run(Operation("all_reduce", 30_000, compression=compression), vector, vector, LONG_S).bytes_sent

    full = max(fresh.run(lambda comm: sent(comm, "")))
    for compression, share in (
        ("bfloat16", 0.51),
        ("int8", 0.27),
        ("top_k:0.01", 0.04),
        ("powersgd:4", 0.05),
    ):
        for actual in fresh.run(partial(sent, compression=compression)):
            assert 0 < actual <= share * full, f"{compression}: {actual} of {full} bytes"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            {"compression": "int4"},
            "compression: 'int4' is unknown; known: float16, bfloat16, int8, top_k, powersgd",
        ),
        ({"compression": "int8:0"}, "compression: 'int8:0': block: 0 values are not in 1..65536"),
        ({"compression": "int8:"}, "compression: 'int8:': invalid literal for int"),
        ({"compression": "float16:2"}, "compression: 'float16:2': float16 has no setting"),
        ({"compression": "top_k:nan"}, "compression: 'top_k:nan': fraction: nan is not in"),
        ({"compression": "powersgd:0"}, "compression: 'powersgd:0': rank: 0 is not positive"),
        (
            {"compression": "int8", "op": "max"},
            "compression: only of all_reduce, sum or avg of float32; this is ",
        ),
        ({"compression": "int8", "dtype": dtype("float64")}, "compression: only of all_reduce"),
        ({"compression": "int8", "algorithm": "ring"}, "algorithm: ring cannot be forced on a compressed"),
    ],
)
def test_an_invalid_setting_is_named_in_the_error(call: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Operation("all_reduce", 10, **call)
    assert message in str(caught.value)
