"""DistributedDataParallel's gradients in fewer bytes: ``model.register_comm_hook(None, hooks.compressed("int8"))``.

Each bucket keeps what was not sent for its next step, so the model still sees all of every gradient, some of it later.
"""

from __future__ import annotations

# No ``from __future__ import annotations``: DDP looks at the types in a hook's signature.
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
    """A hook that averages gradients by this compression: ``int8``, ``top_k:0.01``, ``powersgd``, ``float16``, …

    The state that it is registered with is the group, which must be Hoop's; None is the default one.
    """
    compressor(name)  # raises if there is no such

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        group: Any = state if state is not None else dist.group.WORLD
        if not hasattr(group, "allreduce_compressed"):
            raise InvalidArgument(
                f"group: {dist.get_backend(group)} cannot compress; make it with backend hoop"
            )
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.AVG)
        work = group.allreduce_compressed(bucket.buffer(), name, options)
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future

    return hook
