"""Broadcasts of parameters, optimizers and objects, and gathering of objects.

Objects are pickled by torch.distributed between the ranks of one run, which execute the same program. Tensors are sent
as tensors. Hoop's own messages, between devices, coordinator and clients, contain no pickled objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hoop.errors import InvalidArgument
from hoop.horovod import operations
from hoop.horovod.process_sets import ProcessSet, global_process_set

BROADCAST_BYTES = 32 << 20
"""Maximum bytes of tensors of one type that are sent together."""
_TENSOR = "hoop.horovod/tensor"


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrites parameters with those of ``root_rank``: ``model.state_dict()`` or ``model.named_parameters()``."""
    if isinstance(params, Mapping):
        values = [value for _, value in sorted(params.items())]
    elif isinstance(params, Iterable):
        values = [one[1] if isinstance(one, tuple) else one for one in params]
    else:
        raise InvalidArgument(f"params: {type(params).__name__} is neither a state_dict nor named_parameters()")
    broadcast_tensors([value for value in values if isinstance(value, torch.Tensor)], root_rank, process_set)


def broadcast_tensors(tensors: Iterable[torch.Tensor], root_rank: int, process_set: ProcessSet) -> None:
    """Overwrites tensors with those of ``root_rank``, several in one operation."""
    with torch.no_grad():
        for group in _fused(tensors):
            flat = torch.cat([one.detach().reshape(-1) for one in group])
            operations.wait(operations.start_broadcast(process_set, flat, root_rank))
            for tensor, part in zip(group, flat.split([one.numel() for one in group]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def _fused(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        group = groups.setdefault((tensor.dtype, tensor.device), [])
        group.append(tensor)
        if sum(one.nbytes for one in group) >= BROADCAST_BYTES:
            yield groups.pop((tensor.dtype, tensor.device))
    yield from groups.values()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives an optimizer the state and the settings of that of ``root_rank``. ``model`` is accepted and not used."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgument("optimizer: the state of LBFGS has no fixed shape and cannot be broadcast")
    tensors: list[torch.Tensor] = []
    is_root = global_rank(process_set) == root_rank
    described = _describe(optimizer.state_dict(), tensors) if is_root else None
    described = operations.run_broadcast_object(process_set, described, root_rank)
    state = _allocate(described, tensors, is_root)
    broadcast_tensors(tensors, root_rank, process_set)
    if not is_root:
        optimizer.load_state_dict(state)


def global_rank(process_set: ProcessSet) -> int:
    """The rank of this process in the run."""
    return process_set._members()[process_set.rank()]


def _describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with a description in the place of each tensor; the tensors are appended to the list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return (_TENSOR, tuple(value.shape), value.dtype, value.device.type)
    if isinstance(value, dict):
        return {key: _describe(one, tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_describe(one, tensors) for one in value)
    return value


def _allocate(value: Any, tensors: list[torch.Tensor], is_root: bool) -> Any:
    """The inverse of ``_describe``, with new tensors, which are appended to the list; nothing at the root."""
    if is_root:
        return None
    if isinstance(value, tuple) and len(value) == 4 and value[0] == _TENSOR:
        _, shape, dtype, device = value
        tensors.append(torch.empty(shape, dtype=dtype, device=device))
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _allocate(one, tensors, is_root) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_allocate(one, tensors, is_root) for one in value)
    return value


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of ``root_rank``, at every rank."""
    return operations.run_broadcast_object(process_set, obj, root_rank)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, in rank order."""
    return operations.run_all_gather_object(process_set, obj)
