"""Chains of Linear and ReLU with a hand-written backward: on small shards, autograd takes half the time of a step.

``addmm`` through oneDNN costs about 75 us more a call than ``mm`` without it. Each gradient is written directly into
its slot, not copied. Measured by ``benchmarks/training/kernels.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hoop.engine.stage.autograd import OnSegment, Stage, Views
from hoop.engine.stage.transposed_weight import TransposedWeight

_backward_relu = torch.ops.aten.threshold_backward.grad_input

_MIN_ROWS = 1024
"""Minimum number of samples for the transposed product, which is 25 to 33 % faster then."""
_MAX_OUTPUTS = 12
"""Maximum number of outputs for the transposed product."""


@dataclass
class Layer:
    """A Linear with an optional ReLU after it; or a ReLU alone, if the cut is between it and its Linear."""

    weight: Tensor | None
    bias: Tensor | None
    relu: bool


def layers_of(blocks: Sequence[nn.Module]) -> list[Layer] | None:
    """Return the blocks as a chain of layers; None if they contain anything but Linear, ReLU and a first Flatten."""
    leaves = [one for block in blocks for one in block.modules() if not isinstance(one, nn.Sequential)]
    layers: list[Layer] = []
    for index, leaf in enumerate(leaves):
        match leaf:
            case nn.Linear() if leaf.weight.requires_grad and not leaf._forward_hooks:
                layers.append(Layer(leaf.weight, leaf.bias, False))
            case nn.ReLU() if layers and not layers[-1].relu:
                layers[-1].relu = True
            case nn.ReLU() if not layers:
                layers.append(Layer(None, None, True))
            case nn.Flatten() if index == 0 and leaf.start_dim == 1 and leaf.end_dim == -1:
                pass
            case _:
                return None
    return layers or None


class ChainStage(Stage):
    """Forward and backward of a chain of Linear and ReLU, without autograd."""

    def __init__(self, layers: Sequence[Layer], recompute: bool = False) -> None:
        self._layers = list(layers)
        self._transposed = [TransposedWeight.of(one.weight) for one in layers]
        self._recompute = recompute
        self._shape = torch.Size()
        self._saved: dict[int, list[Tensor]] = {}
        self._pending_weights: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    @torch.no_grad()
    def forward(self, micro: int, inputs: Tensor, seed: int) -> Tensor:
        self._shape = inputs.shape[1:]
        values = self._forward_all(inputs.flatten(1))
        self._saved[micro] = values[:1] if self._recompute else values
        return values[-1]

    def _forward_all(self, inputs: Tensor) -> list[Tensor]:
        """Return the input, then the output of each layer."""
        values = [inputs]
        with _WITHOUT_ONEDNN:
            for layer, transposed in zip(self._layers, self._transposed, strict=True):
                values.append(_forward_layer(layer, values[-1], transposed))
        return values

    @torch.no_grad()
    def backward(
        self, micro: int, gradient: Tensor, into: Views, wants_input: bool, on_segment: OnSegment | None = None
    ) -> Tensor | None:
        input_gradient = self._backward_activations(micro, gradient, wants_input)
        self.backward_weight(micro, into)
        if on_segment is not None:
            on_segment(0)
        return input_gradient if wants_input else None

    @torch.no_grad()
    def backward_input(self, micro: int, gradient: Tensor, wants_input: bool) -> Tensor | None:
        input_gradient = self._backward_activations(micro, gradient, wants_input)
        return input_gradient if wants_input else None

    def _backward_activations(self, micro: int, gradient: Tensor, wants_input: bool) -> Tensor:
        """Compute the gradient of each layer's output and save it for ``backward_weight``.

        Returns the gradient of the stage's input if ``wants_input``.
        """
        values = self._saved.pop(micro)
        if self._recompute:
            values = self._forward_all(values[0])
        gradients: list[Tensor] = []
        with _WITHOUT_ONEDNN:
            for index in range(len(self._layers) - 1, -1, -1):
                layer = self._layers[index]
                if layer.relu:
                    gradient = _backward_relu(gradient, values[index + 1], 0, grad_input=gradient)
                gradients.append(gradient)
                if layer.weight is not None and (index or wants_input):
                    gradient = torch.mm(gradient, layer.weight)
        self._pending_weights[micro] = (values, gradients[::-1])
        return gradient.reshape(len(gradient), *self._shape) if wants_input else gradient

    @torch.no_grad()
    def backward_weight(self, micro: int, into: Views) -> None:
        values, gradients = self._pending_weights.pop(micro)
        with _WITHOUT_ONEDNN:
            self._weight_gradients(values, gradients, into)

    def _weight_gradients(self, values: Sequence[Tensor], gradients: Sequence[Tensor], into: Views) -> None:
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
    def backward_batched(
        self, micro: int, gradient: Tensor, rows: int, intos: Iterable[Views], on_shard: Callable[[int], None]
    ) -> None:
        """Backward of several shards of ``rows`` samples each, whose forward ran as one batch.

        ``intos`` has the gradient views of each shard, and is advanced shard by shard. ``on_shard(index)`` is called
        after each shard.
        """
        self._backward_activations(micro, gradient, wants_input=False)
        values, gradients = self._pending_weights.pop(micro)
        for index, into in enumerate(intos):
            part = slice(index * rows, (index + 1) * rows)
            with _WITHOUT_ONEDNN:
                self._weight_gradients([one[part] for one in values], [one[part] for one in gradients], into)
            on_shard(index)

    def max_identical_batch(self, rows: int, most: int) -> int:
        """Return how many shards of ``rows`` samples give the same bits in one batch as one by one; ``most`` at most.

        A row of a matrix product does not depend on the other rows, but the kernel that the library selects may depend
        on their number. So this computes both with the current weights and compares.
        """
        generator = torch.Generator().manual_seed(1)
        first, last = self._layers[0].weight, self._layers[-1].weight
        if first is None or last is None:
            return 1
        inputs = torch.randn(most * rows, first.shape[1], generator=generator).to(first.device)
        gradient = torch.randn(most * rows, last.shape[0], generator=generator).to(first.device)

        def compute(low: int, high: int) -> list[Tensor]:
            self.forward(-1, inputs[low * rows : high * rows], 0)
            self._backward_activations(-1, gradient[low * rows : high * rows].clone(), wants_input=False)
            values, gradients = self._pending_weights.pop(-1)
            return [*values[1:], *gradients, torch.log_softmax(values[-1], 1)]

        with torch.no_grad():
            single = [compute(index, index + 1) for index in range(most)]
            for count in range(2, most + 1):
                expected = [torch.cat(parts) for parts in zip(*single[:count], strict=True)]
                if not all(map(torch.equal, compute(0, count), expected)):
                    return count - 1
        return most

    @torch.no_grad()
    def evaluate(self, inputs: Tensor) -> Tensor:
        value = inputs.flatten(1)
        with _WITHOUT_ONEDNN:
            for layer in self._layers:
                value = _forward_layer(layer, value)
        return value


def _forward_layer(layer: Layer, value: Tensor, transposed: TransposedWeight | None = None) -> Tensor:
    if layer.weight is None:
        return value.relu()
    if value.is_cuda and layer.bias is not None:  # bias and ReLU in the kernel of the product
        if layer.relu:
            return torch._addmm_activation(layer.bias, value, layer.weight.t())
        return torch.addmm(layer.bias, value, layer.weight.t())
    if len(value) >= _MIN_ROWS and len(layer.weight) <= _MAX_OUTPUTS:
        out = torch.mm(layer.weight, value.t()).t().contiguous()
    elif transposed is not None:
        out = transposed.product(value)
    else:
        out = torch.mm(value, layer.weight.t())
    if layer.bias is not None:
        out.add_(layer.bias)
    return out.relu_() if layer.relu else out


class _WithoutOneDnn:
    """Context manager that disables oneDNN, and restores the setting afterwards: convolutions need oneDNN."""

    def __enter__(self) -> None:
        self._enabled_before = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_mkldnn_enabled(self._enabled_before)


_WITHOUT_ONEDNN = _WithoutOneDnn()
