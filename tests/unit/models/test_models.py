"""Every model: input and output shapes, block structure, and weights determined by the seed."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from hoop.errors import InvalidArgument, NotFound
from hoop.models import MODELS, build

IMAGES = torch.rand(2, 1, 28, 28)
INPUTS = {
    "softmax": IMAGES,
    "mlp": IMAGES,
    "lenet": IMAGES,
    "mobilenetv2": torch.rand(2, 3, 32, 32),
    "gpt": torch.randint(65, (2, 128)),
}
OUTPUTS = dict.fromkeys(INPUTS, (2, 10)) | {"gpt": (2, 128, 65)}
PARAMETERS = {
    "softmax": 7_850,
    "mlp": 109_386,
    "lenet": 61_706,
    "mobilenetv2": 2_236_682,
    "gpt": 826_368,
}
every_model = pytest.mark.parametrize("name", MODELS)


def same(one: nn.Module, other: nn.Module) -> bool:
    state, others = one.state_dict(), other.state_dict()
    return state.keys() == others.keys() and all(torch.equal(state[key], others[key]) for key in state)


def test_every_model_is_tested() -> None:
    assert set(MODELS) == set(INPUTS)


@every_model
def test_shape_and_size(name: str) -> None:
    model = build(name, 0)
    assert model(INPUTS[name]).shape == OUTPUTS[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@every_model
def test_a_model_cut_between_any_two_blocks_computes_the_same(name: str) -> None:
    model = build(name, 0).eval()
    assert type(model) is nn.Sequential
    whole = model(INPUTS[name])
    for cut in range(len(model) + 1):
        between = model[:cut](INPUTS[name])
        assert isinstance(between, torch.Tensor)
        assert torch.equal(model[cut:](between), whole)


@every_model
def test_no_parameter_is_in_two_blocks(name: str) -> None:
    owned = [{id(parameter) for parameter in block.parameters()} for block in build(name, 0)]
    assert sum(map(len, owned)) == len(set().union(*owned))


@every_model
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = build(name, 0)
    model(INPUTS[name]).square().mean().backward()
    missing = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []


@every_model
def test_the_seed_decides_the_weights(name: str) -> None:
    torch.manual_seed(1)
    first = build(name, 7)
    torch.manual_seed(2)
    assert same(first, build(name, 7))
    assert not same(first, build(name, 8))


@every_model
def test_building_keeps_the_global_rng_state(name: str) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    build(name, 0)
    assert torch.equal(torch.rand(4), expected)


def test_threads_that_build_at_once_get_the_same_weights() -> None:
    built: list[nn.Module] = []
    threads = [threading.Thread(target=lambda: built.append(build("mlp", 5))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(built) == 8
    assert all(same(built[0], model) for model in built)


def test_the_mlp_is_linear_layers_and_relu_by_type() -> None:
    kinds = [type(module) for module in build("mlp", 0).modules() if not isinstance(module, nn.Sequential)]
    assert kinds == [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert [len(list(block.parameters())) for block in build("mlp", 0)] == [2, 2, 2]


@pytest.mark.parametrize("side", [28, 56, 112])
def test_softmax_takes_any_image_size(side: int) -> None:
    model = build("softmax", 0, inputs=side * side)
    assert [type(block) for block in model] == [nn.Flatten, nn.Linear]
    assert model(torch.rand(3, 1, side, side)).shape == (3, 10)


def test_mobilenet_shrinks_to_4x4_and_skips_inside_its_blocks() -> None:
    model = build("mobilenetv2", 0)
    assert model[:-1](INPUTS["mobilenetv2"]).shape == (2, 1280, 4, 4)
    assert sum(getattr(block, "skips", False) for block in model) == 10
    assert len(model) == 20


def test_mobilenet_with_group_norm_normalises_every_sample_by_itself() -> None:
    images = torch.rand(4, 3, 32, 32)
    for norm, independent in (("group", True), ("batch", False)):
        model = build("mobilenetv2", 0, norm=norm).train()
        together = model(images)
        in_halves = torch.cat([model(images[:2]), model(images[2:])])
        assert torch.allclose(together, in_halves, atol=1e-5) is independent


def test_gpt_does_not_look_ahead() -> None:
    model = build("gpt", 0, layers=2)
    tokens = torch.randint(65, (1, 32))
    changed = tokens.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 65
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-6)
    assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-3)


def test_gpt_refuses_more_than_its_context() -> None:
    with pytest.raises(InvalidArgument, match="tokens: 9 in a row, but this model's context is 8"):
        build("gpt", 0, context=8)(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mlp", {"width": 3}, "model mlp: no option width; it has widths"),
        ("mlp", {"widths": [784]}, "widths: .784. is not two or more"),
        ("gpt", {"width": 130}, "width: 130 does not divide among 4 heads"),
        ("gpt", {"layers": 0}, "layers: 0 is not at least 1"),
        ("mobilenetv2", {"norm": "layer"}, "norm: 'layer' is unknown; known: batch, group"),
    ],
)
def test_invalid_options_are_rejected(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        build(name, 0, **options)


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(NotFound, match="model: 'resnet' is unknown; known: softmax, mlp, lenet, mobilenetv2, gpt"):
        build("resnet", 0)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_an_invalid_seed_is_rejected(seed: int) -> None:
    with pytest.raises(InvalidArgument, match=f"seed: {seed} is not in"):
        build("mlp", seed)
