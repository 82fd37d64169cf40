"""DDP communication hooks that compress gradients: ``model.register_comm_hook(None, ddp_hooks.compressed("int8"))``.

The error of each bucket's compression is kept and added to the bucket of the next step (error feedback), so the model
receives every gradient in full, some of it later.
"""

# No ``from __future__ import annotations``: DDP compares the annotations of a hook's signature with types.
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOp

from hoop.collectives.compression import compressor
from hoop.errors import InvalidArgument

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def compressed(name: str) -> Hook:
    """A hook that averages gradients with this compression: ``int8``, ``top_k:0.01``, ``powersgd``, ``float16``, …

    The state that the hook is registered with is the process group, which must be Hoop's; None: the default group.
    """
    compressor(name)  # raises if the name is unknown

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        group: Any = state if state is not None else dist.group.WORLD
        if not hasattr(group, "allreduce_compressed"):
            raise InvalidArgument(f"group: {dist.get_backend(group)} cannot compress; make it with backend hoop")
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.AVG)
        work = group.allreduce_compressed(bucket.buffer(), name, options)
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future

    return hook
