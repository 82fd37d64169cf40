"""Each compression's error, measured: after one step, and that error feedback brings everything in the end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from ranks import LONG_S, Ranks, soon

from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import Operation
from hoop.errors import InvalidArgument
from hoop.memory import dtype

pytestmark = pytest.mark.slow_if(when=lambda params: params.get("scheme") == "hybrid")  # see test_hierarchical

COUNT = 3001
"""Not a multiple of anything here."""
PLACES = [("inproc", 1), ("inproc", 3), ("tcp", 2), ("shm", 3)]
everywhere = pytest.mark.parametrize("ranks", PLACES, indirect=True, ids=str, scope="module")
EVERY = ["float16", "bfloat16", "int8", "top_k:0.1", "powersgd:2"]
FEEDBACK = EVERY[2:]


@pytest.fixture
def fresh(ranks: Ranks) -> Iterator[Ranks]:
    """Without the rest of any vector; the next test gets a communicator of its own."""
    yield ranks
    ranks.broken = True


def gradients(size: int, seed: int = 0) -> list[Any]:
    """One a rank: a matrix of low rank and some noise, as gradients are."""
    draw = np.random.default_rng(seed)
    low = (draw.standard_normal((55, 2)) @ draw.standard_normal((2, 55))).reshape(-1)[:COUNT]
    return [(low + 0.1 * draw.standard_normal(COUNT)).astype(np.float32) for _ in range(size)]


def reduced(ranks: Ranks, compression: str, sources: list[Any], op: str = "sum") -> list[Any]:
    """One step, out of place: a vector is known by where its source lies."""
    operation = Operation("all_reduce", sources[0].size, op=op, compression=compression)
    results = [np.empty_like(source) for source in sources]
    reports = ranks.run(lambda one: one.run(operation, sources[one.rank], results[one.rank], LONG_S))
    assert {report.algorithm for report in reports} == {compression}
    return results


def error(result: Any, exact: Any) -> float:
    return float(np.linalg.norm(result - exact) / np.linalg.norm(exact))


@everywhere
@pytest.mark.parametrize(("compression", "bound"), list(zip(EVERY, (1e-3, 6e-3, 2e-2, 0.9, 0.8), strict=True)))
def test_one_step_is_within_its_bound_and_the_same_on_every_rank(fresh: Ranks, compression: str, bound: float) -> None:
    vectors = gradients(fresh.size)
    results = reduced(fresh, compression, vectors)
    for result in results:
        assert np.array_equal(result, results[0])
    assert 0 < error(results[0], np.sum(vectors, axis=0, dtype=np.float64)) < bound


@everywhere
@pytest.mark.parametrize(
    ("compression", "bound"), list(zip([*FEEDBACK, "int8:64"], (1e-3, 0.15, 0.1, 1e-3), strict=True))
)
def test_error_feedback_brings_the_rest_later(fresh: Ranks, compression: str, bound: float) -> None:
    """The mean over many steps of the same gradient tends to the exact sum: nothing is lost for good."""
    vectors = gradients(fresh.size)
    steps = 40
    total = np.zeros(COUNT)
    for _ in range(steps):
        total += reduced(fresh, compression, vectors)[0]
    exact = np.sum(vectors, axis=0, dtype=np.float64)
    assert error(total / steps, exact) < bound


@everywhere
def test_what_fits_is_exact_and_an_average_is_divided(fresh: Ranks) -> None:
    whole = [np.arange(COUNT, dtype=np.float32) % 8 + rank for rank in range(fresh.size)]
    exact = np.sum(whole, axis=0)
    for compression in ("float16", "top_k:1"):
        for result in reduced(fresh, compression, whole):
            assert np.array_equal(result, exact)
        for result in reduced(fresh, compression, whole, op="avg"):
            assert np.array_equal(result, exact / np.float32(fresh.size))


@everywhere
@pytest.mark.parametrize("compression", EVERY)
def test_an_empty_vector_and_zeros(fresh: Ranks, compression: str) -> None:
    for count in (0, 5):
        vectors = [np.zeros(count, np.float32) for _ in range(fresh.size)]
        for result in reduced(fresh, compression, vectors):
            assert np.array_equal(result, np.zeros(count))


@everywhere
@pytest.mark.parametrize("compression", EVERY)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_is_seen_by_all_and_spoils_one_step_only(
    fresh: Ranks, compression: str, wrong: float
) -> None:
    vectors = gradients(fresh.size)
    vectors[-1][7] = wrong
    for result in reduced(fresh, compression, vectors):
        assert not np.isfinite(result).all()
    vectors[-1][7] = 1
    for _ in range(2):  # an owner's rest is of the step before
        results = reduced(fresh, compression, vectors)
    for result in results:
        assert np.isfinite(result).all()
        assert np.array_equal(result, results[0])


def test_two_vectors_in_flight_keep_their_own_rest(scheme: str) -> None:
    """Prepared, started together, step after step: as each alone."""
    places = {together: [gradients(3, seed) for seed in (1, 2)] for together in (True, False)}

    def job(one: Communicator, together: bool) -> list[Any]:
        sums = [np.zeros(COUNT), np.zeros(COUNT)]
        into = [np.empty(COUNT, np.float32) for _ in sums]
        operation = Operation("all_reduce", COUNT, compression="top_k:0.2")
        prepared = [
            one.prepare(operation, vectors[one.rank], target)
            for vectors, target in zip(places[together], into, strict=True)
        ]
        for _ in range(5):
            if together:
                for handle in [each.start(LONG_S) for each in prepared]:
                    handle.wait(LONG_S)
            else:
                for each in prepared:
                    each(soon())
            for total, target in zip(sums, into, strict=True):
                total += target
        return sums

    with Ranks(scheme, 3) as three:
        at_once = three.run(lambda one: job(one, together=True))
        alone = three.run(lambda one: job(one, together=False))
    for rank in range(3):
        assert np.array_equal(alone[rank], at_once[rank]), f"rank {rank}"


@pytest.mark.parametrize("ranks", [("tcp", 3)], indirect=True, ids=str, scope="module")
def test_fewer_bytes_are_sent(fresh: Ranks) -> None:
    vectors = [np.ones(30_000, np.float32)] * 3

    def sent(one: Communicator, compression: str) -> int:
        vector = vectors[one.rank].copy()
        return one.run(Operation("all_reduce", 30_000, compression=compression), vector, vector, LONG_S).bytes_sent

    full = max(fresh.run(lambda one: sent(one, "")))
    for compression, share in (
        ("bfloat16", 0.51),
        ("int8", 0.27),
        ("top_k:0.01", 0.04),
        ("powersgd:4", 0.05),
    ):
        for found in fresh.run(partial(sent, compression=compression)):
            assert 0 < found <= share * full, f"{compression}: {found} of {full} bytes"


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
def test_bad_settings_are_named(call: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Operation("all_reduce", 10, **call)
    assert message in str(caught.value)
