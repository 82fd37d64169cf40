"""Hoop's errors as torch.distributed's too: who catches RuntimeError or DistBackendError catches them."""

from __future__ import annotations

from torch.distributed import DistBackendError

from hoop.errors import HoopError

_twins: dict[type[HoopError], type[HoopError]] = {}


def for_torch(kind: type[HoopError], message: str) -> HoopError:
    """An error that is of this kind and a DistBackendError."""
    if not issubclass(kind, DistBackendError):
        kind = _twins.setdefault(
            kind, type(kind.__name__, (kind, DistBackendError), {"__doc__": kind.__doc__})
        )
    return kind(message)
