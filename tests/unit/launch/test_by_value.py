"""Objects that travel by value: what arrives equals what was sent, and shares what it shared."""

from __future__ import annotations

import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hoop.errors import InvalidArgument
from hoop.runs.by_value import decode, encode, read_shared, write_shared
from hoop.runs.job_objects import JobParts, job_from


def arrived(value: Any) -> Any:
    descriptor = write_shared(encode(value))
    try:
        return decode(read_shared(descriptor))
    finally:
        os.close(descriptor)


def test_tensors_that_share_memory_go_on_to_share_it() -> None:
    whole = torch.arange(1000.0)
    low, high = arrived((whole[:600], whole[400:]))
    low[500] = -1.0
    assert high[100] == -1.0
    assert whole[500] == 500.0, "what a device writes is its own"
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    tied = arrived(nn.Sequential(one, other))
    assert tied[0].weight is tied[1].weight


def test_the_elements_of_tensors_and_arrays_are_not_copied_into_the_pickle() -> None:
    encoded = encode({"tensor": torch.zeros(100_000), "array": np.zeros(100_000), "module": nn.Linear(300, 300)})
    assert len(encoded.data) < 10_000
    assert len(encoded.buffers) == 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.tensor(3),
        torch.randn(4, 3).t(),
        torch.randn(3).bfloat16(),
        torch.ones(2, requires_grad=True),
        torch.eye(3).to_sparse(),
        nn.Parameter(torch.ones(2), requires_grad=False),
    ],
)
def test_a_tensor_arrives(tensor: torch.Tensor) -> None:
    found = arrived(tensor)
    assert (type(found), found.dtype, found.requires_grad) == (type(tensor), tensor.dtype, tensor.requires_grad)
    assert torch.equal(found.to_dense(), tensor.to_dense())


def test_modules_with_parametrizations_and_generators_arrive() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    found = arrived(model)
    assert torch.equal(found(torch.ones(3)), model(torch.ones(3)))
    assert nn.utils.parametrize.is_parametrized(found[0], "weight")
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(torch.rand(2, generator=arrived(generator)), torch.rand(2, generator=generator))


def test_a_compiled_function_is_compiled_there() -> None:
    calls: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        calls.append(graph)
        return graph

    def double(one: torch.Tensor) -> torch.Tensor:
        return 2 * one

    compiled = torch.compile(double, backend="eager")
    assert arrived(compiled)(torch.ones(1)) == 2.0


def test_a_mapped_file_is_mapped_again(tmp_path: Path) -> None:
    """A data set of a file larger than the memory stays in the file."""
    path = tmp_path / "tokens"
    tokens = np.memmap(path, np.float32, "w+", shape=(2_000_000,))
    tokens[:] = 7
    array, tensor = arrived((np.memmap(path, np.float32, "r")[4099:], torch.from_numpy(np.asarray(tokens))[100:]))
    tokens[4099] = 8
    assert array[0] == tensor[3999] == 8
    assert not array.flags.writeable


def test_code_that_no_import_finds_travels(tmp_path: Path) -> None:
    module = types.ModuleType("only_here")
    exec("class Net:\n    value = 3\ndef made(): return Net()", vars(module))
    sys.modules["only_here"] = module
    try:
        encoded = encode(module.made)
    finally:
        del sys.modules["only_here"]
    assert decode(encoded)().value == 3


class Locked(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.inner = {"cache": [1, threading.Lock()]}

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.ones(2)}


class Holding(nn.Linear):
    def __init__(self, path: Path) -> None:
        super().__init__(2, 2)
        self.log = path.open("w")


LOCK = threading.Lock()


def guarded(model: nn.Module, batch: Any) -> Any:
    with LOCK:
        return model(batch[0]).sum()


PAIR = torch.ones(2, 2), torch.ones(2)


def test_what_cannot_travel_is_named(tmp_path: Path) -> None:
    holding = Holding(tmp_path / "log")
    cases = [
        (job_from(nn.Linear(2, 2), Locked(), JobParts()), "data.inner['cache'][1]: a lock cannot be sent"),
        (job_from(holding, PAIR, JobParts()), "model.log: an open file cannot be sent"),
        (job_from(nn.Linear(2, 2), PAIR, JobParts(loss=lambda model, batch: LOCK)), "loss.LOCK: a lock cannot be sent"),
    ]
    for job, sentence in cases:
        with pytest.raises(InvalidArgument) as caught:
            encode(job)
        assert str(caught.value).startswith(sentence)
    holding.log.close()
    encode(job_from(nn.Linear(2, 2), PAIR, JobParts(loss=guarded)))  # its module, with a lock of its own, is imported


class Attributes:
    """Its attributes are the keys of a mapping, as in many configurations."""

    def __init__(self, **values: object) -> None:
        self.__dict__["values"] = values

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.get("values", {})[name]  # a KeyError, not an AttributeError


def test_an_object_whose_attributes_raise_key_errors_travels() -> None:
    assert decode(encode(Attributes(width=3))).width == 3
