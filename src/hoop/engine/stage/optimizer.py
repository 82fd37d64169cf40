"""SGD, Adam and AdamW on flat vectors, in the arena or on a GPU.

The update calls PyTorch's fused kernels on one vector that holds all weights of a stage. The kernels are elementwise,
so the stage or the server that holds a weight does not affect its bits.

``StageState.apply_update`` calls it for the instruction UPDATE; in data parallel training on a GPU
``gpu_resident_step.py`` does. Gradients have been clipped before, by the factor that ``gradient_reduction.py``
computes. A user's own optimizer is stepped in ``custom/objects.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hoop.collectives.reduction import Array
from hoop.engine.optimizer_settings import OptimizerSettings

Update = Callable[[Tensor, float, int], None]
"""``update(gradient, rate, step)``: updates weights in place; ``rate`` is the learning rate, the first step is 0."""


def apply_update(update: Update, weights: Array, trained: int, total: Array, rate: float, step: int) -> None:
    """Apply a step's total to a flat state: update the first ``trained`` elements, add the rest to the buffers."""
    if trained:
        update(torch.from_numpy(total[:trained]), rate, step)
    weights[trained:] += total[trained : len(weights)]


def make_update(settings: OptimizerSettings, weights: Tensor, state: list[Tensor]) -> Update:
    """Make the update function of these weights; ``state`` are the optimizer's moments, on the same device.

    The kernels of a GPU round otherwise than those of the CPU, so all updates of a job are computed on one kind of
    device. On a GPU an update is launched: the function does not wait for it.
    """
    tensors = make_tensor_update(settings, weights, state)
    count, rate_on_gpu = torch.zeros(2, device=weights.device)

    def update(gradient: Tensor, rate: float, step: int) -> None:
        count.fill_(step + 1)
        tensors(gradient, rate, count, step == 0)

    def launch(gradient: Tensor, rate: float, step: int) -> None:
        count.fill_(step + 1)
        rate_on_gpu.fill_(rate)
        tensors(gradient, rate_on_gpu, count, False)

    return launch if weights.is_cuda else update


TensorUpdate = Callable[[Tensor, Tensor | float, Tensor, bool], None]
"""``update(gradient, rate, count, first)``: the number of the step, from 1 on, is in ``count``.

``first``: it is the first step. On a GPU ``rate`` is a tensor, and ``first`` may always be False: moments begin at 0.
"""


def make_tensor_update(settings: OptimizerSettings, weights: Tensor, state: list[Tensor]) -> TensorUpdate:
    """Make the update function of weights and moments that are on one device. A CUDA graph can record its calls."""
    if settings.name == "sgd":

        def sgd(gradient: Tensor, rate: Tensor | float, count: Tensor, first: bool) -> None:
            with torch.no_grad():
                torch._fused_sgd_(
                    [weights],
                    [gradient],
                    state,
                    lr=rate,
                    momentum=settings.momentum,
                    dampening=0.0,
                    weight_decay=settings.weight_decay,
                    nesterov=settings.nesterov,
                    maximize=False,
                    is_first_step=first,
                )

        return sgd
    kernel = torch._fused_adam_ if settings.name == "adam" else torch._fused_adamw_
    first_moment, second_moment = state

    def adam(gradient: Tensor, rate: Tensor | float, count: Tensor, first: bool) -> None:
        with torch.no_grad():
            kernel(
                [weights],
                [gradient],
                [first_moment],
                [second_moment],
                [],
                [count],
                lr=rate,
                beta1=settings.beta1,
                beta2=settings.beta2,
                weight_decay=settings.weight_decay,
                eps=settings.eps,
                amsgrad=False,
                maximize=False,
            )

    return adam


def make_staged_update(
    settings: OptimizerSettings, weights: Tensor, state: list[Tensor], device: torch.device
) -> Update:
    """Make the update function of vectors in host memory that is computed on a GPU: copies them there and back.

    For an update of the arena's copy in a recovery; steps update the state on the GPU.
    """

    def staged(gradient: Tensor, rate: float, step: int) -> None:
        on_device, moments = weights.to(device), [one.to(device) for one in state]
        make_update(settings, on_device, moments)(gradient.to(device), rate, step)
        weights.copy_(on_device)
        for one, host in zip(moments, state, strict=True):
            host.copy_(one)

    return staged
