"""Properties of every dataset class, checked by one suite over all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hoop.data import Augment, Dataset, ImageData, MapData, TensorData, TextData, load
from hoop.errors import InvalidArgument, NotFound, OutOfRange

RANDOM = np.random.default_rng(2)
SAMPLES = 40


def images(**options: Any) -> ImageData:
    pixels = np.random.default_rng(3).integers(0, 256, (SAMPLES, 2, 6, 6), dtype=np.uint8)
    return ImageData("images", pixels, np.arange(SAMPLES) % 3, **options)


class Noisy(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """A torch dataset with a random transform."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((5,), float(index)) + torch.rand(5), index


KINDS: dict[str, Callable[[], Dataset]] = {
    "images": lambda: images(mean=(0.4, 0.5), std=(0.2, 0.3)),
    "augmented": lambda: images(augment=Augment(flip=True, crop=1)),
    "enlarged": lambda: images(enlarge=3),
    "text": lambda: TextData("text", np.arange(SAMPLES * 4 + 1) % 7, "abcdefg", context=4),
    "tensors": lambda: TensorData(torch.arange(SAMPLES * 6.0).view(SAMPLES, 2, 3), torch.arange(SAMPLES)),
    "bfloat16": lambda: TensorData(torch.arange(SAMPLES).bfloat16().view(-1, 1), torch.arange(SAMPLES * 1.0)),
    "map": lambda: MapData(Noisy()),
}


@pytest.fixture(params=KINDS)
def dataset(request: pytest.FixtureRequest) -> Dataset:
    return KINDS[request.param]()


def test_a_sample_is_the_same_in_any_batch(dataset: Dataset) -> None:
    assert len(dataset) == SAMPLES
    inputs, targets = dataset.batch(np.arange(SAMPLES), epoch=2, seed=1)
    for indices in (np.array([7]), RANDOM.permutation(SAMPLES), np.array([3, 3, 39, 0])):
        batch_inputs, batch_targets = dataset.batch(indices, epoch=2, seed=1)
        assert torch.equal(batch_inputs, inputs[indices])
        assert torch.equal(batch_targets, targets[indices])


def test_batches_are_written_to_the_given_tensors(dataset: Dataset) -> None:
    out = dataset.allocate(8)
    for indices in (
        RANDOM.permutation(SAMPLES)[:8],
        np.arange(8),
        np.arange(5),
        np.empty(0, np.int64),
        np.arange(8),
    ):
        fresh = dataset.batch(indices, epoch=0, seed=0)
        written = dataset.batch(indices, epoch=0, seed=0, out=out)
        for tensor, expected, whole in zip(written, fresh, out, strict=True):
            assert torch.equal(tensor, expected)
            assert tensor.data_ptr() == whole.data_ptr() or not len(indices)
    other = dataset.allocate(8)
    dataset.batch(np.arange(8, 16), epoch=0, seed=0, out=other)
    assert torch.equal(out[0], dataset.batch(np.arange(8), epoch=0, seed=0)[0])


def test_many_batches_in_flight_do_not_mix(dataset: Dataset) -> None:
    rounds = 3 * [(sample, dataset.allocate(2)) for sample in range(SAMPLES - 1)]
    for sample, out in rounds:
        dataset.batch(np.array([sample, sample + 1]), epoch=0, seed=0, out=out)
    expected, _ = dataset.batch(np.arange(SAMPLES), epoch=0, seed=0)
    for sample, (inputs, _) in rounds:
        assert torch.equal(inputs, expected[sample : sample + 2])


def test_unsuitable_output_tensors_are_rejected(dataset: Dataset) -> None:
    inputs, targets = dataset.allocate(8)
    wrong = [
        dataset.allocate(7),
        (inputs, targets[:7]),
        (inputs.to(torch.float64), targets),
        (inputs[..., None], targets),
        (inputs.to("meta"), targets),
        (torch.stack([inputs, inputs], dim=1)[:, 0], targets),
    ]
    for out in wrong:
        with pytest.raises(InvalidArgument, match=f"{dataset.name} writes contiguous .* as allocate.8. makes"):
            dataset.batch(np.arange(8), epoch=0, seed=0, out=out)
    dataset.batch(np.arange(8), epoch=0, seed=0, out=(inputs, targets))
    with pytest.raises(InvalidArgument, match=r"as allocate\(9\) makes"):
        dataset.batch(np.arange(9), epoch=0, seed=0, out=(inputs, targets))


@pytest.mark.parametrize("indices", [[-1], [0, SAMPLES], [2**62]])
def test_out_of_range_samples_are_rejected(dataset: Dataset, indices: list[int]) -> None:
    with pytest.raises(OutOfRange, match=f"indices: {dataset.name} has samples 0..{SAMPLES - 1}"):
        dataset.batch(np.array(indices), epoch=0, seed=0)


@pytest.mark.parametrize("indices", [np.zeros((2, 2), np.int64), np.zeros(2, np.int32), np.zeros(2), [0, 1]])
def test_indices_of_another_type_are_rejected(dataset: Dataset, indices: Any) -> None:
    with pytest.raises(InvalidArgument, match="indices: not a one-dimensional array of int64"):
        dataset.batch(indices, epoch=0, seed=0)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_content_has_equal_checksums(kind: str) -> None:
    assert KINDS[kind]().checksum == KINDS[kind]().checksum
    assert len(KINDS[kind]().checksum) == 64


def test_different_content_has_different_checksums() -> None:
    inputs, targets = torch.zeros(4, 2), torch.zeros(4)
    variants: list[Dataset] = [
        TensorData(inputs, targets),
        TensorData(inputs, targets + 1),
        TensorData(inputs.view(4, 1, 2), targets),
        TensorData(inputs.to(torch.int32), targets),
        TensorData(targets, inputs),
        TextData("a", np.zeros(9, np.int64), "a", context=2),
        TextData("b", np.zeros(9, np.int64), "b", context=2),
        MapData([(1.0, 2)] * 4),
        MapData([(1.0, 2)] * 5),
        MapData([(1.0, 2)] * 5, checksum="mine"),
    ]
    assert len({dataset.checksum for dataset in variants}) == len(variants)


def test_normalised_pixels_are_bit_exact() -> None:
    data = images(mean=(0.4, 0.5), std=(0.2, 0.3))
    inputs, _ = data.batch(np.arange(SAMPLES), epoch=0, seed=0)
    mean = np.array([255 * 0.4, 255 * 0.5], np.float32).reshape(2, 1, 1)
    scale = np.array([1 / (255 * 0.2), 1 / (255 * 0.3)], np.float32).reshape(2, 1, 1)
    assert np.array_equal(inputs.numpy(), (data.images.astype(np.float32) - mean) * scale)


def test_threads_do_not_share_scratch_memory() -> None:
    data = images()
    expected, _ = data.batch(np.arange(SAMPLES), epoch=0, seed=0)
    wrong: list[int] = []

    def load_one(sample: int) -> None:
        out = data.allocate(1)
        for _ in range(200):
            inputs, _ = data.batch(np.array([sample]), epoch=0, seed=0, out=out)
            if not torch.equal(inputs[0], expected[sample]):
                wrong.append(sample)

    threads = [threading.Thread(target=load_one, args=(sample,)) for sample in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_random_transform_depends_on_seed_and_epoch_and_keeps_the_global_rng_state() -> None:
    data, indices = MapData(Noisy()), np.array([4, 2])
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, targets = data.batch(indices, epoch=0, seed=0)
    assert torch.equal(torch.rand(3), expected)
    assert targets.tolist() == [4, 2]
    for epoch, seed in ((1, 0), (0, 1)):
        assert not torch.equal(data.batch(indices, epoch=epoch, seed=seed)[0], first)


def test_a_users_array_stays_writable() -> None:
    pixels = np.zeros((2, 1, 2, 2), np.uint8)
    ImageData("mine", pixels, np.zeros(2, np.int64))
    pixels[0] = 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ImageData("x", np.zeros((2, 4, 4), np.uint8), np.zeros(2, int)),
            "images: uint8 .2, 4, 4. is not",
        ),
        (lambda: ImageData("x", np.zeros((2, 1, 4, 4)).astype("f4"), np.zeros(2, int)), "images: float32"),
        (
            lambda: ImageData("x", np.zeros((2, 1, 4, 4), np.uint8), np.zeros(3, int)),
            "labels: .3. is not one",
        ),
        (lambda: images(mean=(0.1, 0.2, 0.3)), "mean, std: .0.1, 0.2, 0.3., .1.0. are not"),
        (lambda: images(std=(0.0,)), "with std above 0"),
        (lambda: images(enlarge=0), "enlarge: 0 is not"),
        (lambda: TensorData(torch.zeros(3), torch.zeros(2)), "inputs, targets: 3 and 2 rows"),
        (lambda: TensorData(torch.zeros(0), torch.zeros(0)), "inputs, targets: 0 and 0 rows"),
        (lambda: TensorData(torch.tensor(1.0), torch.zeros(2)), "inputs: .. on cpu is not rows"),
        (lambda: MapData([]), "dataset: it has no samples"),
        (lambda: MapData([1, 2]).allocate(1), "list.0. is not a pair of input and target, but int; give"),
        (lambda: MapData([("a", 1)]).allocate(1), "the input of list.0., str, is no tensor, array or number: "),
        (
            lambda: MapData([([1.0], 1), ([1.0, 2.0], 1)]).batch(np.array([0, 1]), epoch=0, seed=0),
            "the input of list.1. is .2., that of the first .1.",
        ),
    ],
)
def test_invalid_data_is_rejected(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_an_unknown_dataset_lists_the_known_ones() -> None:
    with pytest.raises(NotFound, match="dataset: 'imagenet' is unknown; known: mnist, fashion-mnist, cifar10"):
        load("imagenet")
    with pytest.raises(InvalidArgument, match="dataset mnist: no option sise; it has size"):
        load("mnist", sise=28)
    with pytest.raises(InvalidArgument, match="dataset text: it needs the option path"):
        load("text")
