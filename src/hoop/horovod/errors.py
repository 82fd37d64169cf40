"""Errors by the names that Horovod gives them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hoop.errors import MembershipChanged, PeerError


class HorovodInternalError(RuntimeError):
    """A collective failed because a rank was lost or a link broke. ``hvd.elastic.run`` restores the last commit."""


class HostsUpdatedInterrupt(Exception):
    """Ranks wait to join. ``state.commit()`` and ``state.check_host_updates()`` raise it at every rank."""

    def __init__(self, skip_sync: bool = False) -> None:
        """``skip_sync``: the state of the ranks is equal and needs no synchronization."""
        super().__init__("processes wait to join the run")
        self.skip_sync = skip_sync


@contextmanager
def peer_errors() -> Iterator[None]:
    """Raises HorovodInternalError for an error of a peer or a link. A mistake of the caller stays what it is."""
    try:
        yield
    except (PeerError, MembershipChanged) as error:
        raise HorovodInternalError(str(error)) from error
