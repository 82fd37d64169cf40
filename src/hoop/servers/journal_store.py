"""The journals there are, by where they are kept."""

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
    """A file, or what ``etcd://`` stands before; the other two are for etcd alone."""
    return EtcdLocation.parse(text, lease_s, tls) if text.startswith(SCHEME) else Path(text)


async def open_journal(
    place: JournalLocation,
    config: DetectorConfig,
    who: str,
    tell: Callable[[str], None],
    on_lost: Callable[[PeerLost], None],
) -> Journal:
    """The journal, read; one in etcd that another coordinator owns is waited for, without a deadline."""
    if isinstance(place, Path):
        return FileJournal(place, config, time.monotonic())
    journal = EtcdJournal(place, who, on_lost)
    try:
        await asyncio.to_thread(journal.open, config, tell)
    except BaseException:
        journal.close()  # whoever still waits in the thread is told
        raise
    return journal
