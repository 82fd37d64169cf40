"""A training state as named tensors, in safetensors' format: what a checkpoint is.

    0.1.weight                     the model's own names
    optimizer.moment0.0.1.weight   optimizer state, under the parameter it belongs to
    metadata                       position in the data, settings

Names and shapes are the model's, not the devices', so a run may be resumed by another number of devices or another
strategy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor, nn

from hoop.engine.job import names_of
from hoop.engine.weights import Layout
from hoop.errors import FailedPrecondition
from hoop.memory import Arena

MOMENT = "optimizer.moment"


class Stateful(Protocol):
    """Weights and optimizer state, as a rank holds them."""

    @property
    def layout(self) -> Layout: ...

    @property
    def moments(self) -> list[Tensor]: ...


def tensors_of(held: Iterable[Stateful], names: Mapping[int, str]) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state of some stages."""
    found: dict[str, Tensor] = {}
    for one in held:
        for tensor in [*one.layout.tensors, *one.layout.counters, *one.layout.frozen]:
            found[names[id(tensor)]] = tensor.detach()
        for index, moment in enumerate(one.moments):
            for parameter, view in zip(one.layout.parameters, one.layout.views_trained(moment), strict=True):
                found[f"{MOMENT}{index}.{names[id(parameter)]}"] = view
    return found


def packed(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> bytes:
    """As the bytes of a safetensors file."""
    return safetensors.torch.save(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, {"hoop": json.dumps(metadata)}
    )


def put(arena: Arena, name: str, data: bytes) -> dict[str, Any]:
    """Into a buffer of this name; returns what a reader has to know."""
    if any(buffer.name == name for buffer in arena.buffers()):
        arena.free(name)
    buffer = arena.allocate(name, len(data))
    arena.write(buffer.address, data)
    return {"buffer": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def unpacked(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The inverse; what is damaged is refused."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        metadata = json.loads(header["__metadata__"]["hoop"])
        return safetensors.torch.load(data), metadata
    except (ValueError, KeyError, safetensors.SafetensorError, UnicodeDecodeError, TypeError) as error:
        raise FailedPrecondition(f"checkpoint: {len(data)} bytes are not one of Hoop's: {error!r}") from None


def restore(held: Sequence[Stateful], model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Puts a checkpoint's tensors where they belong; whatever is missing or of another shape is named."""
    with torch.no_grad():
        for name, into in tensors_of(held, names_of(model)).items():
            if name not in tensors:
                raise FailedPrecondition(f"checkpoint: no {name}; is it of another model or optimizer?")
            given = tensors[name]
            if given.shape != into.shape or given.dtype != into.dtype:
                raise FailedPrecondition(
                    f"checkpoint: {name} is {given.dtype} {list(given.shape)}, the model's is "
                    f"{into.dtype} {list(into.shape)}"
                )
            into.copy_(given)
