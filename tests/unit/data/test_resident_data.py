"""A batch that is gathered on the device has the bits of the one that the dataset makes on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hoop.data.dataset import Dataset, Indices
from hoop.data.images import Augment, ImageData
from hoop.data.resident import make_resident, resident_bytes
from hoop.data.tensors import MapData, TensorData
from hoop.data.text import TextData

CPU = torch.device("cpu")
PLENTY = 1 << 30
SAMPLES = 50


def check_same(data: Dataset, samples: Indices, free: int = PLENTY) -> None:
    inputs, targets = data.batch(samples, epoch=3, seed=7)
    resident = make_resident(data, CPU, free)
    assert resident is not None
    rows = torch.from_numpy(resident.rows(samples, epoch=3, seed=7).copy())
    for found, expected in ((resident.inputs(rows), inputs), (resident.targets(rows), targets)):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("augment", [None, Augment(flip=True), Augment(crop=2), Augment(flip=True, crop=4)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("enlarge", [1, 2])
@pytest.mark.parametrize("floats", [True, False])
def test_images(augment: Augment | None, channels: int, enlarge: int, floats: bool) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (SAMPLES, channels, 9, 7), dtype=np.uint8)
    data = ImageData(
        "images",
        images,
        np.arange(SAMPLES) % 10,
        mean=[0.3] * channels,
        std=[0.21] * channels,
        augment=augment,
        enlarge=enlarge,
    )
    needed = resident_bytes(data)
    assert needed is not None
    check_same(data, rng.permutation(SAMPLES)[:23].astype(np.int64), PLENTY if floats else needed)
    assert make_resident(data, CPU, needed - 1) is None


def test_text_and_tensors() -> None:
    rng = np.random.default_rng(0)
    text = TextData("text", rng.integers(0, 60, 1000), "".join(map(chr, range(60))), context=16)
    check_same(text, np.array([5, 3, len(text) - 1]))
    check_same(TensorData(torch.randn(9, 3), torch.arange(9)), np.array([8, 0, 0, 4]))


def test_datasets_of_unknown_code_stay_on_the_host() -> None:
    class Noisy(TensorData):
        """Overrides ``batch``, perhaps."""

    assert resident_bytes(Noisy(torch.zeros(3, 1), torch.zeros(3))) is None
    assert make_resident(MapData([(torch.zeros(1), 1)]), CPU, PLENTY) is None
