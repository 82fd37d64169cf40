"""Hoop's errors as torch.distributed's too: who catches RuntimeError or DistBackendError catches them.

They have names of their own in this module because torch pickles what a future failed with.
"""

from __future__ import annotations

from torch.distributed import DistBackendError

from hoop import errors


class PeerLost(errors.PeerLost, DistBackendError):
    """A rank died, or closed the link."""


class DeadlineExceeded(errors.DeadlineExceeded, DistBackendError):
    """A rank did not come in time."""


class LinkCorrupted(errors.LinkCorrupted, DistBackendError):
    """What arrived is not what was sent."""


class MembershipChanged(errors.MembershipChanged, DistBackendError):
    """The operation belongs to an older group."""


class InvalidArgument(errors.InvalidArgument, DistBackendError):
    """A value that can never be right."""


class CollectiveMismatch(errors.CollectiveMismatch, DistBackendError):
    """The ranks of a group called different collectives."""


class GroupError(errors.HoopError, DistBackendError):
    """Anything else that Hoop raises on purpose."""


_KINDS = (
    PeerLost,
    DeadlineExceeded,
    LinkCorrupted,
    MembershipChanged,
    InvalidArgument,
    CollectiveMismatch,
    GroupError,
)


def for_torch(kind: type[errors.HoopError], message: str) -> errors.HoopError:
    """An error that is of this kind and a DistBackendError."""
    twin = next(twin for twin in _KINDS if issubclass(kind, twin.__mro__[1]))
    return twin(message)
