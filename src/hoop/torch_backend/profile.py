"""Operations in torch's profiler: one event each, from the call to the end, with the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C import _autograd

from hoop.torch_backend.work import HoopWork

enabled = _autograd._profiler_enabled
ENDS_IN_ANY_THREAD = torch.__version__ >= "2.12"  # compared as versions, not as text
"""An older torch drops an event that another thread ends than the one that began it."""


def record(work: HoopWork, title: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """Opens an event that ends with the work.

    With an older torch it returns the function that ends the event, for the caller's thread to call when the
    operation has ended or has been handed over.
    """
    handle = _autograd._record_function_with_args_enter(f"hoop:{title}", *tensors)

    def end() -> None:
        _autograd._record_function_with_args_exit(handle)

    if not ENDS_IN_ANY_THREAD:
        return end
    work.on_end = end
    return None
