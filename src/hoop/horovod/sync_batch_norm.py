"""Batch normalization over the batches of all ranks, on CPU and GPU, for programs that use Horovod's interface.

In Hoop's own training ranks sum the changes of batch norm's buffers: ``engine/stage/state.py``.
"""

from __future__ import annotations

import torch
from torch import nn

from hoop.horovod.collectives import allreduce
from hoop.horovod.process_sets import ProcessSet, global_process_set
from hoop.horovod.reductions import Sum


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """``nn.BatchNorm`` of any dimension whose mean and variance in training are those of all ranks' batches.

    The ranks may have batches of different sizes. In evaluation it is plain batch normalization.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: an input of {input.dim()} dimensions; it needs at least 2")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        self._check_input_dim(input)
        if not self.training or self._process_set.size() == 1:
            return super().forward(input)
        others = [dimension for dimension in range(input.dim()) if dimension != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        # Two sums, and not the mean of squares: that loses its digits where the mean is large.
        count = input.new_tensor([input.numel() // input.shape[1]])
        totals = self._sum(torch.cat([input.sum(others), count]))
        total = totals[-1].detach()
        mean = totals[:-1] / total
        centred = input - mean.view(shape)
        variance = self._sum((centred * centred).sum(others)) / total
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self._track(self.running_mean, self.running_var, self.num_batches_tracked, mean, variance, total)
        output = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return allreduce(tensor, op=Sum, process_set=self._process_set)

    def _track(
        self,
        running_mean: torch.Tensor,
        running_var: torch.Tensor,
        batches: torch.Tensor,
        mean: torch.Tensor,
        variance: torch.Tensor,
        total: torch.Tensor,
    ) -> None:
        """As ``nn.BatchNorm``: the running variance is the unbiased one."""
        with torch.no_grad():
            batches.add_(1)
            factor = self.momentum if self.momentum is not None else 1.0 / float(batches)
            running_mean.lerp_(mean.to(running_mean.dtype), factor)
            running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), factor)
