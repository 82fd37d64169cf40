"""Operations in torch's profiler: one event each, from the call to the end, with the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C import _autograd

from hoop.torch_backend.work import HoopWork

enabled = _autograd._profiler_enabled


def record(work: HoopWork, title: str, tensors: Sequence[torch.Tensor]) -> None:
    """Opens an event that ends with the work."""
    handle = _autograd._record_function_with_args_enter(f"hoop:{title}", *tensors)
    work.on_end = lambda: _autograd._record_function_with_args_exit(handle)
