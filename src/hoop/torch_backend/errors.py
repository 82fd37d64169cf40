"""Hoop's errors as subclasses of torch.distributed's DistBackendError, which is a RuntimeError.

Each has a class in this module, because torch pickles the error of a failed future and must find its class by name.
"""

from __future__ import annotations

from torch.distributed import DistBackendError

from hoop import errors


class PeerLost(errors.PeerLost, DistBackendError):
    """A rank died, or closed the link."""


class DeadlineExceeded(errors.DeadlineExceeded, DistBackendError):
    """A rank did not arrive before the deadline."""


class LinkCorrupted(errors.LinkCorrupted, DistBackendError):
    """Received bytes differ from the bytes that were sent."""


class MembershipChanged(errors.MembershipChanged, DistBackendError):
    """The operation belongs to an older generation of the group."""


class InvalidArgument(errors.InvalidArgument, DistBackendError):
    """An argument that is wrong in every state of the group."""


class CollectiveMismatch(errors.CollectiveMismatch, DistBackendError):
    """The ranks of a group called different collectives."""


class GroupError(errors.HoopError, DistBackendError):
    """Every other error that Hoop raises."""


_TORCH_ERRORS = (
    PeerLost,
    DeadlineExceeded,
    LinkCorrupted,
    MembershipChanged,
    InvalidArgument,
    CollectiveMismatch,
    GroupError,
)


def torch_error(kind: type[errors.HoopError], message: str) -> errors.HoopError:
    """An error of this module that is an instance of ``kind`` (or of its nearest base listed here)."""
    torch_class = next(one for one in _TORCH_ERRORS if issubclass(kind, one.__mro__[1]))
    return torch_class(message)
