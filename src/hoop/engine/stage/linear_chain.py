"""Chains of Linear and ReLU, computed by hand: what autograd and its kernels cost on small shards is half the step.

``addmm`` through oneDNN costs about 75 us more a call than ``mm`` does without it, and every gradient is written where
it belongs instead of being copied there. Measured by ``benchmarks/training/kernels.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hoop.engine.stage.autograd import After, Stage, Views

_backward_relu = torch.ops.aten.threshold_backward.grad_input

_MANY, _FEW = 1024, 12
"""From so many samples to so many outputs the transposed product is faster, by a quarter to a third."""


@dataclass
class Layer:
    """A Linear, and whether a ReLU follows; or a ReLU alone, where a cut parted it from its Linear."""

    weight: Tensor | None
    bias: Tensor | None
    relu: bool


def layers_of(blocks: Sequence[nn.Module]) -> list[Layer] | None:
    """The blocks as such a chain; None if they are something else."""
    leaves = [one for block in blocks for one in block.modules() if not isinstance(one, nn.Sequential)]
    found: list[Layer] = []
    for index, leaf in enumerate(leaves):
        match leaf:
            case nn.Linear() if leaf.weight.requires_grad and not leaf._forward_hooks:
                found.append(Layer(leaf.weight, leaf.bias, False))
            case nn.ReLU() if found and not found[-1].relu:
                found[-1].relu = True
            case nn.ReLU() if not found:
                found.append(Layer(None, None, True))
            case nn.Flatten() if index == 0 and leaf.start_dim == 1 and leaf.end_dim == -1:
                pass
            case _:
                return None
    return found or None


class ChainStage(Stage):
    """Linear and ReLU, forward and backward without autograd."""

    def __init__(self, layers: Sequence[Layer], recompute: bool = False) -> None:
        self._layers = list(layers)
        self._recompute = recompute
        self._shape = torch.Size()
        self._kept: dict[int, list[Tensor]] = {}
        self._halves: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    @torch.no_grad()
    def forward(self, micro: int, inputs: Tensor, seed: int) -> Tensor:
        self._shape = inputs.shape[1:]
        values = self._values(inputs.flatten(1))
        self._kept[micro] = values[:1] if self._recompute else values
        return values[-1]

    def _values(self, inputs: Tensor) -> list[Tensor]:
        """The input, then what every layer makes of it."""
        values = [inputs]
        with _WITHOUT_ONEDNN:
            for layer in self._layers:
                values.append(_apply(layer, values[-1]))
        return values

    @torch.no_grad()
    def backward(
        self, micro: int, gradient: Tensor, into: Views, wants_input: bool, after: After | None = None
    ) -> Tensor | None:
        given = self._inputs_gradients(micro, gradient, wants_input)
        self.backward_weight(micro, into)
        if after is not None:
            after(0)
        return given if wants_input else None

    @torch.no_grad()
    def backward_input(self, micro: int, gradient: Tensor, wants_input: bool) -> Tensor | None:
        given = self._inputs_gradients(micro, gradient, wants_input)
        return given if wants_input else None

    def _inputs_gradients(self, micro: int, gradient: Tensor, wants_input: bool) -> Tensor:
        """The gradient of every layer's output, kept for the weights' half; returns the input's, if wanted."""
        values = self._kept.pop(micro)
        if self._recompute:
            values = self._values(values[0])
        gradients: list[Tensor] = []
        with _WITHOUT_ONEDNN:
            for index in range(len(self._layers) - 1, -1, -1):
                layer = self._layers[index]
                if layer.relu:
                    gradient = _backward_relu(gradient, values[index + 1], 0, grad_input=gradient)
                gradients.append(gradient)
                if layer.weight is not None and (index or wants_input):
                    gradient = torch.mm(gradient, layer.weight)
        self._halves[micro] = (values, gradients[::-1])
        return gradient.reshape(len(gradient), *self._shape) if wants_input else gradient

    @torch.no_grad()
    def backward_weight(self, micro: int, into: Views) -> None:
        values, gradients = self._halves.pop(micro)
        with _WITHOUT_ONEDNN:
            self._weights(values, gradients, into)

    def _weights(self, values: Sequence[Tensor], gradients: Sequence[Tensor], into: Views) -> None:
        at = 0
        for layer, value, gradient in zip(self._layers, values, gradients, strict=False):
            if layer.weight is None:
                continue
            torch.mm(gradient.t(), value, out=into[at])
            at += 1
            if layer.bias is not None:
                torch.sum(gradient, 0, out=into[at])
                at += 1

    @torch.no_grad()
    def backward_jointly(
        self, micro: int, gradient: Tensor, rows: int, intos: Iterable[Views]
    ) -> Iterator[None]:
        """``backward`` of several shards of ``rows`` samples each that went forward as one, shard after shard."""
        self._inputs_gradients(micro, gradient, wants_input=False)
        values, gradients = self._halves.pop(micro)
        for index, into in enumerate(intos):
            part = slice(index * rows, (index + 1) * rows)
            with _WITHOUT_ONEDNN:
                self._weights([one[part] for one in values], [one[part] for one in gradients], into)
            yield

    def jointly(self, rows: int, most: int) -> int:
        """How many shards of so many samples may be computed at once without a bit of difference; ``most`` at most.

        A row of a matrix product does not depend on the other rows, but the kernel that a library chooses may, so
        it is tried here, on these weights.
        """
        generator = torch.Generator().manual_seed(1)
        first, last = self._layers[0].weight, self._layers[-1].weight
        if first is None or last is None:
            return 1
        inputs = torch.randn(most * rows, first.shape[1], generator=generator).to(first.device)
        gradient = torch.randn(most * rows, last.shape[0], generator=generator).to(first.device)

        def computed(low: int, high: int) -> list[Tensor]:
            self.forward(-1, inputs[low * rows : high * rows], 0)
            self._inputs_gradients(-1, gradient[low * rows : high * rows].clone(), wants_input=False)
            values, gradients = self._halves.pop(-1)
            return [*values[1:], *gradients, torch.log_softmax(values[-1], 1)]

        with torch.no_grad():
            alone = [computed(index, index + 1) for index in range(most)]
            for count in range(2, most + 1):
                wanted = [torch.cat(parts) for parts in zip(*alone[:count], strict=True)]
                if not all(map(torch.equal, computed(0, count), wanted)):
                    return count - 1
        return most

    @torch.no_grad()
    def evaluate(self, inputs: Tensor) -> Tensor:
        value = inputs.flatten(1)
        with _WITHOUT_ONEDNN:
            for layer in self._layers:
                value = _apply(layer, value)
        return value


def _apply(layer: Layer, value: Tensor) -> Tensor:
    if layer.weight is None:
        return value.relu()
    if len(value) >= _MANY and len(layer.weight) <= _FEW:
        out = torch.mm(layer.weight, value.t()).t().contiguous()
    else:
        out = torch.mm(value, layer.weight.t())
    if layer.bias is not None:
        out.add_(layer.bias)
    return out.relu_() if layer.relu else out


class _WithoutOneDnn:
    """While these are computed; elsewhere oneDNN stays as it was (convolutions need it)."""

    def __enter__(self) -> None:
        self._was = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_mkldnn_enabled(self._was)


_WITHOUT_ONEDNN = _WithoutOneDnn()
