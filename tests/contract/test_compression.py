"""Each compressor's error, measured: after one step, and that error feedback brings everything in the end."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import LONG_S, Ranks

from hoop.collectives.compression import Cast, Compressor, Int8, PowerSGD, TopK
from hoop.errors import InvalidArgument

pytestmark = pytest.mark.parametrize(
    "ranks", [("inproc", 1), ("inproc", 3), ("tcp", 2), ("shm", 3)], indirect=True, ids=str, scope="module"
)
COUNT = 3001
"""Not a multiple of anything here."""


def gradients(size: int, seed: int = 0) -> list[np.ndarray]:
    """One a rank: a matrix of low rank and some noise, as gradients are."""
    draw = np.random.default_rng(seed)
    low = (draw.standard_normal((55, 2)) @ draw.standard_normal((2, 55))).reshape(-1)[:COUNT]
    return [(low + 0.1 * draw.standard_normal(COUNT)).astype(np.float32) for _ in range(size)]


def reduced(ranks: Ranks, compressors: list[Compressor], vectors: list[np.ndarray]) -> list[np.ndarray]:
    results = [vector.copy() for vector in vectors]
    ranks.run(lambda one: compressors[one.rank].all_reduce(one, results[one.rank], LONG_S))
    return results


def error(result: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(result - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize(
    ("make", "bound"),
    [
        (lambda: Cast("float16"), 1e-3),
        (lambda: Cast("bfloat16"), 6e-3),
        (Int8, 2e-2),
        (lambda: TopK(0.1), 0.9),
        (lambda: PowerSGD(2), 0.8),
    ],
    ids=["float16", "bfloat16", "int8", "top-k", "powersgd"],
)
def test_one_step_is_within_its_bound_and_the_same_on_every_rank(ranks: Ranks, make, bound: float) -> None:
    vectors = gradients(ranks.size)
    results = reduced(ranks, [make() for _ in range(ranks.size)], vectors)
    for result in results:
        assert np.array_equal(result, results[0])
    assert 0 < error(results[0], np.sum(vectors, axis=0, dtype=np.float64)) < bound


@pytest.mark.parametrize(
    ("make", "bound"),
    [(Int8, 1e-3), (lambda: TopK(0.1), 0.15), (lambda: PowerSGD(2), 0.1)],
    ids=["int8", "top-k", "powersgd"],
)
def test_error_feedback_brings_the_rest_later(ranks: Ranks, make, bound: float) -> None:
    """The mean over many steps of the same gradient tends to the exact sum: nothing is lost for good."""
    vectors = gradients(ranks.size)
    compressors = [make() for _ in range(ranks.size)]
    steps = 40
    total = np.zeros(COUNT)
    for _ in range(steps):
        total += reduced(ranks, compressors, vectors)[0]
    exact = np.sum(vectors, axis=0, dtype=np.float64)
    assert error(total / steps, exact) < bound


def test_what_fits_is_exact(ranks: Ranks) -> None:
    whole = [np.arange(COUNT, dtype=np.float32) % 8 + rank for rank in range(ranks.size)]
    exact = np.sum(whole, axis=0)
    for make in (lambda: Cast("float16"), lambda: TopK(1.0)):
        for result in reduced(ranks, [make() for _ in range(ranks.size)], whole):
            assert np.array_equal(result, exact)


@pytest.mark.parametrize("make", [Cast, Int8, TopK, PowerSGD])
def test_an_empty_vector_and_zeros(ranks: Ranks, make) -> None:
    for count in (0, 5):
        vectors = [np.zeros(count, np.float32) for _ in range(ranks.size)]
        for result in reduced(ranks, [make() for _ in range(ranks.size)], vectors):
            assert np.array_equal(result, np.zeros(count))


@pytest.mark.parametrize(
    "wrong", [lambda: Cast("int4"), lambda: Int8(0), lambda: TopK(0), lambda: PowerSGD(0)]
)
def test_bad_settings_are_named(ranks: Ranks, wrong) -> None:
    with pytest.raises(InvalidArgument, match=r"kind|block|fraction|rank"):
        wrong()
