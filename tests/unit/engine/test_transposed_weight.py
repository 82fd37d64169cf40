"""TransposedWeight: the bits of the plain product, of the weight as it is at each call; and the native transpose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hoop.engine.stage.linear_chain import ChainStage, layers_of
from hoop.engine.stage.transposed_weight import MAX_OUTPUTS, MAX_ROWS, MAX_TRIALS, TransposedWeight
from hoop.native import library

CORE = library.load()
needs_core = pytest.mark.skipif(CORE is None, reason=f"the native core is {library.status()}")


def always(weight: torch.Tensor, *sizes: int) -> TransposedWeight:
    """It uses the copy for these numbers of samples, whether it pays or not."""
    found = TransposedWeight.of(weight)
    assert found is not None
    found._pays = dict.fromkeys(sizes, True)
    return found


@needs_core
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (8, 8), (7, 16), (16, 7), (13, 21), (128, 784), (200, 3)])
def test_the_native_transpose_moves_every_element(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape)
    found = torch.full(shape[::-1], -7.0)
    assert CORE is not None
    CORE.transpose(matrix.data_ptr(), *shape, found.data_ptr())
    assert torch.equal(found, matrix.t())


@needs_core
@pytest.mark.parametrize("samples", [1, 5, 16, 64, 100, 256])
def test_a_product_has_the_bits_of_the_plain_one(samples: int) -> None:
    weight, values = torch.randn(128, 784), torch.randn(samples, 784)
    found = TransposedWeight.of(weight)
    assert found is not None
    for _ in range(2):  # with the trial, and after it
        assert torch.equal(found.product(values), torch.mm(values, weight.t()))


@needs_core
def test_a_weight_that_has_changed_is_used_as_it_is_now() -> None:
    weight, values = torch.randn(64, 128), torch.randn(16, 128)
    transposed = always(weight, 16)
    transposed.product(values)
    weight.mul_(2)
    torch.testing.assert_close(transposed.product(values), torch.mm(values, weight.t()))


@needs_core
def test_operands_that_no_trial_was_like_are_multiplied_plainly() -> None:
    weight, memory = torch.randn(64, 128), torch.randn(16 * 128 + 1)
    transposed = always(weight, 16)
    unaligned = memory[1:].view(16, 128)
    assert torch.equal(transposed.product(unaligned), torch.mm(unaligned, weight.t()))
    columns = torch.randn(128, 16).t()
    assert torch.equal(transposed.product(columns), torch.mm(columns, weight.t()))


@needs_core
def test_trials_are_few_and_small() -> None:
    weight = torch.randn(64, 128)
    transposed = TransposedWeight.of(weight)
    assert transposed is not None
    for samples in range(1, MAX_TRIALS + 5):
        transposed.product(torch.randn(samples, 128))
    transposed.product(torch.randn(MAX_ROWS + 1, 128))
    assert sorted(transposed._pays) == list(range(1, MAX_TRIALS + 1))


def test_weights_for_which_a_copy_cannot_pay_have_none() -> None:
    assert TransposedWeight.of(None) is None
    assert TransposedWeight.of(torch.randn(MAX_OUTPUTS + 1, 784)) is None
    assert TransposedWeight.of(torch.randn(10, 64)) is None
    assert TransposedWeight.of(torch.randn(128, 128).t()[:64]) is None
    assert TransposedWeight.of(torch.randn(64, 128, dtype=torch.float64)) is None


@needs_core
def test_a_chain_gives_the_same_bits_without_the_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = layers_of([nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())])
    assert layers is not None
    inputs = torch.randn(64, 1, 28, 28)
    found = ChainStage(layers).forward(0, inputs, 0)
    monkeypatch.setenv("HOOP_NATIVE", "0")
    plain = ChainStage(layers)
    assert plain._transposed == [None, None]
    assert torch.equal(found, plain.forward(0, inputs, 0))
