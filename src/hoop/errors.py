"""The tree of Hoop's errors.

    HoopError
    ├── UserError                the caller's mistake: the call had no effect
    │   ├── InvalidArgument          a value that is never valid
    │   ├── OutOfRange               an address or a range outside a device's memory
    │   ├── NotFound                 an unknown device, communicator, buffer or stream
    │   ├── FailedPrecondition       a valid call in the wrong state
    │   │   └── FileGone                 a file of this process was deleted or replaced
    │   ├── CollectiveMismatch       ranks of a communicator called different collectives; it is unusable
    │   ├── ResourceExhausted        a limit is reached
    │   │   └── OutOfMemory              a device's arena is full
    │   ├── Unauthenticated          the caller did not prove its role
    │   └── PermissionDenied         the caller's role may not make this call
    ├── PeerError                another process or a link failed: rebuild and continue
    │   ├── PeerLost                 it died, or closed the link
    │   │   └── TrainingStateLost        and state of the model went with it
    │   ├── DeadlineExceeded         it did not answer in time
    │   └── LinkCorrupted            the received bytes differ from the sent bytes
    │       └── WrongLength              a message has another length than its receiver expects
    ├── MembershipChanged        not a failure: the work belongs to an older generation
    └── InternalError            a bug in Hoop

Each class has a ``code``, the name of its gRPC status. ``error_from_name`` makes the error again on the client.
"""

from __future__ import annotations

from enum import Enum

from hoop.texts import printable


class HoopError(Exception):
    """Base of every error that Hoop raises on purpose.

    The text may hold values from outside, and goes to callers, events, the journal and terminals. It is therefore
    always printable and at most 8 KiB.
    """

    code = "UNKNOWN"
    recoverable = False
    """Whether training goes on after this error, with new ranks."""

    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(HoopError):
    """The caller's mistake: the call had no effect."""

    code = "INVALID_ARGUMENT"


class InvalidArgument(UserError, ValueError):
    """A value that is never valid."""


class OutOfRange(UserError, IndexError):
    """An address or a range outside a device's memory."""

    code = "OUT_OF_RANGE"


class NotFound(UserError, LookupError):
    """An unknown device, communicator, buffer or stream."""

    code = "NOT_FOUND"


class FailedPrecondition(UserError):
    """A valid call in the wrong state."""

    code = "FAILED_PRECONDITION"


class FileGone(FailedPrecondition):
    """A file was deleted or replaced by somebody else while this process was writing it."""


class CollectiveMismatch(UserError):
    """Ranks of a communicator called collectives that do not match. Every rank gets this error, with the calls.

    The communicator (or process group) cannot run any more operations and must be created again. The content of the
    operation's destination is undefined.
    """

    code = "FAILED_PRECONDITION"


class ResourceExhausted(UserError):
    """A limit is reached."""

    code = "RESOURCE_EXHAUSTED"


class OutOfMemory(ResourceExhausted, MemoryError):
    """A device's arena is full."""


class Unauthenticated(UserError):
    """The caller did not prove its role: the token is missing, or from another cluster."""

    code = "UNAUTHENTICATED"


class PermissionDenied(UserError):
    """The caller's role may not make this call."""

    code = "PERMISSION_DENIED"


class PeerCause(Enum):
    """Why a peer failed, as far as the process that raises the error knows."""

    UNKNOWN = "unknown"
    DEVICE_LOST = "device lost"
    """The coordinator found the device itself dead or unreachable; other errors may only follow from that."""


class PeerError(HoopError):
    """Another process or a link failed: rebuild and continue."""

    code = "UNAVAILABLE"
    recoverable = True

    def __init__(self, *args: object, rank: int | None = None, cause: PeerCause = PeerCause.UNKNOWN) -> None:
        """``rank``: the rank of the peer in the communicator that failed, where it is known."""
        super().__init__(*args)
        self.rank, self.cause = rank, cause


class PeerLost(PeerError, ConnectionError):
    """A peer died, or closed the link."""


class TrainingStateLost(PeerLost):
    """With the lost devices went state of the model that no other device holds; the text names it and the remedy."""


class DeadlineExceeded(PeerError, TimeoutError):
    """A peer did not answer in time."""

    code = "DEADLINE_EXCEEDED"


class LinkCorrupted(PeerError):
    """The received bytes differ from the sent bytes."""

    code = "DATA_LOSS"


class WrongLength(LinkCorrupted):
    """A message has another length than its receiver expects."""

    received_bytes = 0
    """Length of the message in bytes, where the receiver knows it; else 0."""


class MembershipChanged(HoopError):
    """Not a failure: the work belongs to an older generation."""

    code = "ABORTED"
    recoverable = True


class InternalError(HoopError):
    """A bug in Hoop."""

    code = "INTERNAL"


def _tree(kind: type[HoopError]) -> list[type[HoopError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _tree(child))]


# Keys are gRPC status names, each mapped to the first class of the tree with that code, and class names.
_BY_NAME = {kind.code: kind for kind in reversed(_tree(HoopError))}
_BY_NAME["INVALID_ARGUMENT"], _BY_NAME["UNAVAILABLE"] = InvalidArgument, PeerLost
_BY_NAME |= {kind.__name__: kind for kind in _tree(HoopError)}


def exit_code(error: HoopError) -> int:
    """The exit code of a command that ends with this error: 2 the user's mistake, 3 a peer failed, 1 a bug."""
    return 2 if isinstance(error, UserError) else 3 if isinstance(error, PeerError) else 1


def error_from_name(name: str, message: str) -> HoopError:
    """Make the error with this class name or gRPC status name; HoopError if the name is unknown."""
    return _BY_NAME.get(name, HoopError)(message)
