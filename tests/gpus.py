"""Whether there is a GPU, found without a call of CUDA, after which no rank could be forked from pytest's process."""

from __future__ import annotations

import functools

from hoop.launch.mps import count_gpus


@functools.cache
def has_gpu() -> bool:
    import torch

    return torch.version.cuda is not None and bool(count_gpus())
