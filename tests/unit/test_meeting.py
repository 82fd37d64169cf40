"""Rank 0's side of a run that a scheduler started, with a cluster that is only a list of devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hoop.errors import DeadlineExceeded, NotFound, PeerLost
from hoop.runs import meeting
from hoop.schedulers.base import Placement
from hoop.topology import Address

PLACEMENT = Placement("slurm", 0, 4, 0, 2, Address("n01", 4021))


class Devices:
    """A cluster whose devices never change."""

    def __init__(self, **states: str) -> None:
        self.members = [
            SimpleNamespace(device=SimpleNamespace(device_id=int(key[1:]), host=f"host{key[1:]}"), state=state)
            for key, state in states.items()
        ]
        self.drained: dict[int, int] = {}

    def status(self) -> Any:
        return SimpleNamespace(devices=self.members)

    def wait_for_devices(self, count: int, timeout: float) -> None:
        if sum(one.state == "alive" for one in self.members) < count:
            raise DeadlineExceeded("not all there")

    def drain(self, device_id: int, timeout: float, progress: Any, exit_code: int) -> None:
        if device_id == 3:
            raise NotFound("it is gone")
        self.drained[device_id] = exit_code


def test_missing_ranks_are_named_with_the_remedy() -> None:
    cluster: Any = Devices(d1="alive", d3="alive", d4="dead")
    with pytest.raises(
        DeadlineExceeded,
        match=r"^ranks 1, 3 of 4 did not come to n01:4021 within 0 s; 2 are there, from host1, host3\. ",
    ):
        meeting.wait_for_ranks(cluster, PLACEMENT, 0.0, lambda: False)


def test_the_wait_ends_when_all_are_there() -> None:
    cluster: Any = Devices(d1="alive", d2="alive", d3="alive", d4="alive")
    meeting.wait_for_ranks(cluster, PLACEMENT, 0.0, lambda: False)


def test_the_wait_ends_when_the_run_is_to_stop() -> None:
    cluster: Any = Devices(d1="alive", d2="alive", d3="alive")
    with pytest.raises(PeerLost, match=r"^stopped while it waited for rank 3 of 4$"):
        meeting.wait_for_ranks(cluster, PLACEMENT, 1e9, lambda: True)


def test_every_other_rank_is_dismissed_with_the_exit_code() -> None:
    cluster: Any = Devices(d1="alive", d2="alive", d3="alive", d4="suspect", d5="dead")
    meeting.dismiss_ranks(cluster, own=1, exit_code=143)
    assert cluster.drained == {2: 143, 4: 143}
