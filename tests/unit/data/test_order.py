"""SampleOrder: every sample once per epoch, in an order that depends only on the seed."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.data import SampleOrder, shard
from hoop.data.sampler import ORDER, make_key, random_draws, sorting_order
from hoop.errors import InvalidArgument, OutOfRange

orders = st.builds(SampleOrder, seed=st.integers(0, 2**64 - 1), length=st.integers(1, 300))


def test_the_hash_is_splitmix64() -> None:
    # The first outputs of the published generator from state 0, whose state grows by the golden ratio.
    golden = 0x9E3779B97F4A7C15
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [make_key((step * golden) % 2**64) for step in range(3)] == published
    assert random_draws(np.arange(3)).tolist() == published


def test_the_order_is_pinned() -> None:
    # Every trained model depends on this order: it must stay the same on every machine and in every version.
    order = SampleOrder(seed=0, length=60_000)
    assert order.permutation(0)[:8].tolist() == [16750, 12685, 50072, 15489, 9722, 5673, 49615, 15381]
    digest = hashlib.sha256(order.permutation(3).astype("<i8").tobytes()).hexdigest()
    assert digest == "15565e3a971e605ace4443137f3b21d2a49051cd92ef2cc7d5b558032b8c4cf4"


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50, unique=True), st.integers(0, 63))
def test_keys_are_sorted_as_numpy_sorts_them(keys: list[int], shift: int) -> None:
    # Shifted, many keys have equal high bits.
    found = np.unique(np.array(keys, np.uint64) >> np.uint64(shift))
    shuffled = np.random.default_rng(1).permutation(found)
    assert sorting_order(shuffled).tolist() == np.argsort(shuffled).tolist()


@given(orders, st.integers(0, 1000))
def test_an_epoch_has_every_sample_once(order: SampleOrder, epoch: int) -> None:
    assert sorted(order.permutation(epoch)) == list(range(order.length))


def test_seed_epoch_and_length_each_change_the_order() -> None:
    same = SampleOrder(1, 100).permutation(2).tolist()
    assert SampleOrder(1, 100).permutation(2).tolist() == same
    assert SampleOrder(2, 100).permutation(2).tolist() != same
    assert SampleOrder(1, 100).permutation(1).tolist() != same
    longer = [sample for sample in SampleOrder(1, 101).permutation(2).tolist() if sample < 100]
    assert longer != same


def test_the_order_is_uniform() -> None:
    """Over many epochs each sample is equally often at each of 10 positions (chi-squared, 81 degrees of freedom)."""
    counts = np.zeros((10, 10))
    for epoch in range(2000):
        counts[np.arange(10), SampleOrder(5, 10).permutation(epoch)] += 1
    assert ((counts - 200) ** 2 / 200).sum() < 140


@given(orders, st.integers(1, 400), st.integers(0, 3), st.integers(1, 9))
def test_steps_and_shards_cover_every_sample_once(order: SampleOrder, batch_size: int, epoch: int, shards: int) -> None:
    cuts = order.batches(batch_size)
    assert len(cuts) == order.steps(batch_size)
    taken = []
    for step, cut in enumerate(cuts):
        indices = order.indices(epoch, step, batch_size)
        epoch_order = order.permutation(epoch) if len(cuts) > 1 else np.arange(order.length)
        assert indices.tolist() == epoch_order[cut].tolist()
        assert len(indices) == batch_size or step == len(cuts) - 1
        parts = [shard(indices, number, shards) for number in range(shards)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        taken.extend(np.concatenate(parts).tolist())
    assert taken == (order.permutation(epoch).tolist() if len(cuts) > 1 else list(range(order.length)))


def test_a_step_of_all_samples_is_the_same_array_every_time() -> None:
    assert SampleOrder(3, 40).indices(0, 0, 40) is SampleOrder(3, 40).indices(7, 0, 64)


def test_a_permutation_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValueError, match="read-only"):
        SampleOrder(0, 5).permutation(0)[0] = 1


def test_random_streams_do_not_overlap() -> None:
    samples = np.arange(1000)
    assert not np.intersect1d(random_draws(samples, 1, 2, ORDER), random_draws(samples, 1, 2, ORDER + 1)).size


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: SampleOrder(-1, 5), "seed: -1 is not in"),
        (lambda: SampleOrder(0, 0), "length: 0 samples"),
        (lambda: SampleOrder(0, 5).permutation(-1), "epoch: -1 is not 0 or more"),
        (lambda: SampleOrder(0, 5).steps(0), "batch_size: 0 is not at least 1"),
    ],
)
def test_invalid_values_are_rejected(wrong: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        wrong()  # type: ignore[operator]


def test_out_of_range_steps_and_shards_are_rejected() -> None:
    with pytest.raises(OutOfRange, match=r"step: an epoch of 5 by 2 has 0\.\.2, not 3"):
        SampleOrder(0, 5).indices(0, 3, 2)
    with pytest.raises(OutOfRange, match=r"shard: 4 is not in 0\.\.3"):
        shard(np.arange(5), 4, 4)
