"""Trial calls of a user's loss before the first step: the loss of a few samples beside the losses of parts of them.

A trial may refuse a loss, and never accept one. Random generators and buffers are restored afterwards.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from hoop.data.dataset import Indices
from hoop.data.structured import leaves
from hoop.engine.stage.autograd import CPU, buffers_restored

CUTS = {6: ((2,), (1, 3)), 2: ((1,),)}
"""Number of samples of a trial call, for small and large models: indices at which they are cut into parts."""
SAMPLES, FEW = CUTS
LARGE = 5e8
"""Parameters times numbers of a sample, above which calls with ``SAMPLES`` may take longer than a second."""
TOLERANCE = 1e-4
"""Relative difference allowed between a sum and that of its parts: more than float32 rounding."""
ROUNDINGS = 8
"""The same for a type that rounds more, as a number of its roundings."""


@dataclass(frozen=True)
class Decomposition:
    """The sum over some samples, and the sums over parts of them."""

    whole: float
    parts: tuple[float, ...]

    @property
    def sum(self) -> float:
        return sum(self.parts)

    @property
    def is_conclusive(self) -> bool:
        """True if all of them are numbers."""
        return all(map(math.isfinite, (self.whole, *self.parts)))

    def fits(self, dtype: torch.dtype) -> bool:
        """True if the sums of the parts, computed in this type, give the sum of all."""
        size = max(sum(map(abs, self.parts)), abs(self.whole))
        return abs(self.whole - self.sum) <= max(TOLERANCE, ROUNDINGS * torch.finfo(dtype).eps) * size


def sample_indices(model: nn.Module, samples: int, load: Callable[[Indices], Any]) -> Indices:
    """The samples of a trial call, spread over all; only ``FEW`` of them for a large model."""
    numbers = sum(leaf.numel() for leaf in leaves(load(np.zeros(1, np.int64))) if isinstance(leaf, Tensor))
    large = numbers * sum(parameter.numel() for parameter in model.parameters()) > LARGE
    return np.linspace(0, samples - 1, FEW if large else SAMPLES).astype(np.int64)


def without_values(module: Any) -> Any:
    """A copy of a module whose tensors have shapes and no values; any other object unchanged. See ``ShapesOnly``."""
    if not isinstance(module, nn.Module):
        return module
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        empty = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, memo)


META = torch.device("meta")


class ShapesOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which models without values (``without_values``) are called with batches that have values.

    What is computed of the batch alone, such as masks, has values. What a weight takes part in has a shape and a graph,
    and takes no time.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by PyTorch, which else imports ``torch._dynamo`` (more than a second) so as not to compile this."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values, structure = tree_flatten((args, kwargs or {}))
        if any(isinstance(value, Tensor) and value.is_meta for value in values):
            values = [value.to("meta") if isinstance(value, Tensor) else value for value in values]
        else:  # a mask that is made where the activations are keeps its values
            values = [CPU if isinstance(value, torch.device) and value == META else value for value in values]
        args, kwargs = tree_unflatten(values, structure)
        return func(*args, **kwargs)


def compilation_disabled() -> AbstractContextManager[Any]:
    """A context in which compiled models run as they were before ``torch.compile``."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and loading it takes seconds
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def no_side_effects(*objects: Any, on: torch.device | None = None) -> Iterator[None]:
    """Restore the random generators, and the buffers of those objects that are modules, afterwards.

    ``on``: also restore the generator of this CUDA device.
    """
    modules = [one for one in objects if isinstance(one, nn.Module)]
    gpus = [on] if on is not None and on.type == "cuda" else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=gpus), buffers_restored(modules):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
