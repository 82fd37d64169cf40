"""Everything that can go wrong, as one tree.

    HoopError
    ├── UserError                the caller's mistake: nothing happened, nothing was lost
    │   ├── InvalidArgument          a value that can never be right
    │   ├── OutOfRange               an address or a range outside a device's memory
    │   ├── NotFound                 an unknown device, communicator, buffer or stream
    │   ├── FailedPrecondition       right call, wrong moment
    │   ├── CollectiveMismatch       ranks of a communicator called different collectives; it cannot go on
    │   ├── ResourceExhausted        a limit is reached
    │   │   └── OutOfMemory              a device's arena is full
    │   ├── Unauthenticated          nobody knows who is asking
    │   └── PermissionDenied         known, and not allowed this
    ├── PeerError                another process or a link failed: rebuild and go on
    │   ├── PeerLost                 it died, or closed the link
    │   ├── DeadlineExceeded         it did not answer in time
    │   └── LinkCorrupted            what arrived is not what was sent
    │       └── WrongLength              a message is not as long as its receiver expects
    ├── MembershipChanged        not a failure: the work belongs to an older generation
    └── InternalError            a bug in Hoop

Each class has a ``code``, the name of the gRPC status that it becomes on the wire; ``named`` is the way
back, on the other side.
"""

from __future__ import annotations

from hoop.texts import printable


class HoopError(Exception):
    """Any error that Hoop raises on purpose.

    Its text names values that came from outside, and goes to callers, events, the journal and terminals: it is always
    printable, and at most 8 KiB.
    """

    code = "UNKNOWN"

    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(HoopError):
    """The caller's mistake: nothing happened, nothing was lost."""

    code = "INVALID_ARGUMENT"


class InvalidArgument(UserError, ValueError):
    """A value that can never be right."""


class OutOfRange(UserError, IndexError):
    """An address or a range outside a device's memory."""

    code = "OUT_OF_RANGE"


class NotFound(UserError, LookupError):
    """An unknown device, communicator, buffer or stream."""

    code = "NOT_FOUND"


class FailedPrecondition(UserError):
    """The right call at the wrong moment."""

    code = "FAILED_PRECONDITION"


class CollectiveMismatch(UserError):
    """Ranks of a communicator called collectives that do not match; every rank gets this error, with the calls.

    The communicator (or process group) cannot run any more operations and must be made again. What the operation's
    destination holds is undefined.
    """

    code = "FAILED_PRECONDITION"


class ResourceExhausted(UserError):
    """A limit is reached."""

    code = "RESOURCE_EXHAUSTED"


class OutOfMemory(ResourceExhausted, MemoryError):
    """A device's arena is full."""


class Unauthenticated(UserError):
    """Nobody knows who is asking: the token is missing, or of another cluster."""

    code = "UNAUTHENTICATED"


class PermissionDenied(UserError):
    """It is known who is asking, and that role may not do this."""

    code = "PERMISSION_DENIED"


class PeerError(HoopError):
    """Another process or a link failed: rebuild and go on."""

    code = "UNAVAILABLE"


class PeerLost(PeerError, ConnectionError):
    """A peer died, or closed the link."""


class DeadlineExceeded(PeerError, TimeoutError):
    """A peer did not answer in time."""

    code = "DEADLINE_EXCEEDED"


class LinkCorrupted(PeerError):
    """What arrived is not what was sent."""

    code = "DATA_LOSS"


class WrongLength(LinkCorrupted):
    """A message is not as long as its receiver expects."""

    came = 0
    """Its bytes, where the receiver knows."""


class MembershipChanged(HoopError):
    """Not a failure: the work belongs to an older generation."""

    code = "ABORTED"


class InternalError(HoopError):
    """A bug in Hoop."""

    code = "INTERNAL"


def _tree(kind: type[HoopError]) -> list[type[HoopError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _tree(child))]


# The first class of a code speaks for it; a name is a name.
_BY_NAME = {kind.code: kind for kind in reversed(_tree(HoopError))}
_BY_NAME["INVALID_ARGUMENT"], _BY_NAME["UNAVAILABLE"] = InvalidArgument, PeerLost
_BY_NAME |= {kind.__name__: kind for kind in _tree(HoopError)}


def named(name: str, message: str) -> HoopError:
    """The error that a class's name, or a gRPC status, stands for."""
    return _BY_NAME.get(name, HoopError)(message)
