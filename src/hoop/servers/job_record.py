"""An event log as an async stream: what is there, then what comes, in order and without a gap.

One job, as the coordinator knows it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hoop.errors import HoopError, PeerLost, UserError
from hoop.events import Event, EventLog
from hoop.membership.state import CommunicatorState
from hoop.servers.tasks import TOLD_FIRST
from hoop.texts import parse_json
from hoop.topology import DeviceInfo


async def follow_events(
    log: EventLog, after: int, ends: Callable[[Event], bool] = lambda event: False
) -> AsyncIterator[Event]:
    """Events with a higher sequence, from now on as they come; stops after one that ends it.

    The log may be published to from any thread.
    """
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()

    def wake(_: Event) -> None:
        loop.call_soon_threadsafe(changed.set)

    unsubscribe = log.subscribe(wake)
    try:
        while True:
            changed.clear()
            for event in log.after(after):
                after = event.sequence
                yield event
                if ends(event):
                    return
            await changed.wait()
    finally:
        unsubscribe()


JOB_ENDED = "job_ended"


@dataclass
class JobRecord:
    """What a job told, and how it went; who takes part is in ``membership.job_membership``."""

    communicator: CommunicatorState
    settings: str
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    """Its own name: what devices' memories hold of it is known by that."""
    log: EventLog = field(default_factory=lambda: EventLog(100_000, TOLD_FIRST))
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    heard: set[str] = field(default_factory=set)
    """Origins of what devices told: a device that is watched anew tells all of it again."""
    failures: list[HoopError] = field(default_factory=list)
    losses: list[HoopError] = field(default_factory=list)
    """Devices that were lost on the way."""
    ended: bool = False
    """Whether some device came to the end."""
    watches: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By incarnation, the watch of the task of a device that takes part, or gets ready."""
    data: str = ""
    """What everybody's data must be like: a fingerprint; empty: it was not told yet."""
    _own: int = 0

    @property
    def id(self) -> int:
        return self.communicator.id

    @property
    def elastic(self) -> bool:
        """Whether devices may come and go while it runs: every device has the whole model, or mirrors its part."""
        return self.moves or bool(self._settings.get("mirror", True))

    @property
    def moves(self) -> bool:
        """Whether it can go on in other seats after a step, without having anything to cut anew."""
        return str(self._settings.get("strategy", "data")) == "data"

    @property
    def _settings(self) -> dict[str, Any]:
        try:
            found = parse_json(self.settings)
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {"strategy": "", "mirror": False}

    def rank(self, device_id: int) -> int:
        """A device's rank now; 0 where it is no member (any more, or yet), and its id is what counts."""
        members = self.communicator.members
        return members.index(device_id) if device_id in members else 0

    def watched(self, incarnation: str) -> bool:
        """Whether it is listened to; a watch that has ended may not have been cleared away yet."""
        watch = self.watches.get(incarnation)
        return watch is not None and not watch.done()

    def refusal(self, info: DeviceInfo, told: Mapping[str, Any]) -> str:
        """Why a device that is ready cannot take part, or nothing."""
        found = told.get("data")  # nothing where it took part before, and was only thought dead
        self.data = self.data or found or ""
        if found in (None, self.data):
            return ""
        return (
            f"{info} has other data than job {self.id}: {told.get('about')} with fingerprint {found}, where the others "
            f"have {self.data}; put the same dataset on {info.host}, and start the device again"
        )

    def tell(self, kind: str, text: str, rank: int = 0, device: int = 0, origin: str = "") -> None:
        """Adds to what it told; without an origin it is the coordinator's own word."""
        self._own += 1
        self.log.publish(kind, text, rank=rank, device=device, origin=origin or f"{self.token}:{self._own}")

    def outcome(self) -> HoopError | None:
        """The failure that explains the others, or none."""
        if not self.ended:
            self.failures += self.losses
        return min([*self.failures, *self.losses], key=_weight) if self.failures else None


def is_over(event: Event) -> bool:
    """Whether a job tells nothing after this."""
    return event.kind == JOB_ENDED


def _weight(error: HoopError) -> int:
    """The failure that explains the others first: a mistake, a bug, a death, then its neighbours' complaints."""
    if isinstance(error, UserError):
        return 0
    if isinstance(error, PeerLost):
        return 2 if " was lost: " in str(error) else 3
    return 1
