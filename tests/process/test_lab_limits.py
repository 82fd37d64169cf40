"""The lab's clients never destroy their communicators: at a limit, the least recently used idle one is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from lab_cluster import LabClient, lab, refused
from lab_in_process import Servers, lab_channel, lab_servers

from hoop.client.cluster import connect
from hoop.errors import ResourceExhausted
from hoop.servers.coordinator import CoordinatorConfig


@contextmanager
def limited(**limits: Any) -> Iterator[tuple[Servers, grpc.Channel]]:
    with lab_servers(1, CoordinatorConfig(command="hoop up", **limits)) as servers, lab_channel(servers) as channel:
        yield servers, channel


@pytest.mark.parametrize("limit", ["communicators_per_client", "max_communicators"])
def test_the_least_recently_used_communicator_is_dropped(limit: str) -> None:
    with limited(**{limit: 3}) as (servers, channel):
        comms = [LabClient(channel, 1) for _ in range(3)]
        comms[0].on_all("GetCommStatus")
        comms += [LabClient(channel, 1) for _ in range(2)]
        for dropped in (comms[1], comms[2]):
            with refused("NOT_FOUND", match="unknown or destroyed"):
                dropped.on_all("GetCommStatus")
        for kept in (comms[0], comms[3], comms[4]):
            kept.on_all("GetCommStatus")
        texts = [event.text for event in servers.events("communicator_dropped")]
        assert [text.split()[1] for text in texts] == [str(comms[1].id), str(comms[2].id)]
        assert "CommDestroy" in texts[0]


def test_a_communicator_with_an_open_group_is_not_dropped() -> None:
    with limited(communicators_per_client=2) as (_, channel):
        first, second = LabClient(channel, 1), LabClient(channel, 1)
        first.write(0, first.address(0), np.ones(4))
        for comm in (first, second):
            comm.on_all("GroupStart")
        first.all_reduce(lab.SUM, [first.address(0)], 4)
        with refused("RESOURCE_EXHAUSTED", match=r"no idle one .* hoop up --communicators-per-client"):
            LabClient(channel, 1)
        first.on_all("GroupEnd")
        assert first.wait() == lab.SUCCESS
        third = LabClient(channel, 1)
        with refused("NOT_FOUND"):
            first.on_all("GetCommStatus")
        for comm in (second, third):
            comm.on_all("GetCommStatus")


def test_communicators_of_hoops_own_clients_are_not_dropped() -> None:
    with limited(communicators_per_client=2) as (servers, channel), connect(servers.address) as cluster:
        own = cluster.communicator(1)
        lab_comm = LabClient(channel, 1)
        cluster.communicator(1)  # takes the place of the lab's
        with refused("NOT_FOUND"):
            lab_comm.on_all("GetCommStatus")
        with pytest.raises(ResourceExhausted, match=r"has 2 communicators, its limit"):
            cluster.communicator(1)
        own.destroy()
        LabClient(channel, 1)
