"""Records operations in torch's profiler: one event each, from the call to the end, with its tensors' shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C import _autograd

from hoop.torch_backend.work import HoopWork

enabled = _autograd._profiler_enabled
ENDS_IN_ANY_THREAD = torch.__version__ >= "2.12"  # TorchVersion compares as a version, not as text
"""Whether an event may end in another thread than it began in; torch before 2.12 drops such an event."""


def record(work: HoopWork, title: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """Begins an event that ends when the work is finished.

    With torch before 2.12 it returns the function that ends the event. The caller's thread must call it when the
    operation has finished or has been queued.
    """
    handle = _autograd._record_function_with_args_enter(f"hoop:{title}", *tensors)

    def end() -> None:
        _autograd._record_function_with_args_exit(handle)

    if not ENDS_IN_ANY_THREAD:
        return end
    work.on_finish = end
    return None
