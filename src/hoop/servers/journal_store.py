"""Opens the journal at a location: in a file or in etcd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from hoop.errors import PeerLost
from hoop.membership.failure_detector import DetectorConfig
from hoop.membership.journal import FileJournal, Journal
from hoop.servers.etcd_journal import SCHEME, EtcdJournal, EtcdLocation

JournalLocation = Path | EtcdLocation


def journal_location(text: str, lease_s: float, tls: Path | None) -> JournalLocation:
    """The location of a journal: a path, or ``etcd://…``. ``lease_s`` and ``tls`` apply to etcd only."""
    return EtcdLocation.parse(text, lease_s, tls) if text.startswith(SCHEME) else Path(text)


async def open_journal(
    location: JournalLocation,
    config: DetectorConfig,
    owner: str,
    on_waiting: Callable[[str], None],
    on_lost: Callable[[PeerLost], None],
) -> Journal:
    """Opens and reads a journal. Waits, without a deadline, for a journal in etcd that another coordinator owns.

    ``owner``: a description of this coordinator for others. ``on_waiting`` is called with a text while this one waits,
    ``on_lost`` when another coordinator has taken the journal over; both may be called from another thread.
    """
    if isinstance(location, Path):
        return FileJournal(location, config, time.monotonic())
    journal = EtcdJournal(location, owner, on_lost)
    try:
        await asyncio.to_thread(journal.open, config, on_waiting)
    except BaseException:
        journal.close()  # ends the wait of the thread
        raise
    return journal
