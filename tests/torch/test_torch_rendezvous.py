"""Ranks that cannot make a group together: each of them raises at once, and the error says what is wrong.

The ranks are threads of this process; their timeout is longer than the tests wait.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from world import LONG_S

from hoop.errors import DeadlineExceeded, InvalidArgument, MembershipChanged
from hoop.torch_backend import rendezvous
from hoop.torch_backend.errors import GroupError
from hoop.torch_backend.rendezvous import ADDRESSES, HOST, GroupRound
from hoop.transport.link_key import KeyOrigin, LinkKey, own_link_key

TIMEOUT = timedelta(seconds=10 * LONG_S)


@pytest.fixture(autouse=True)
def environment_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "TORCHELASTIC_RUN_ID",
        "HOOP_TOKEN",
        "HOOP_TOKEN_FILE",
        "HOOP_HOST",
        "HOOP_INSECURE",
    ):
        monkeypatch.delenv(name, raising=False)


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """The future result of a function that runs in a thread of its own."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def exchange(store: Any, rank: int, world: Sequence[int]) -> list[str]:
    return GroupRound("g", store, rank, world, TIMEOUT).exchange(HOST, f"rank {rank}")


def connect(store: Any, rank: int, world: Sequence[int]) -> None:
    """As ``exchange`` for a rank that cannot connect: two that can would need two processes."""
    rendezvous.connect_group("g", store, rank, len(world), world, TIMEOUT)


def start_rank_0(store: Any, size: int) -> Future[Any]:
    """Rank 0 of a group, which waits for the others when this returns."""
    rank_0 = in_thread(lambda: connect(store, 0, range(size)))
    store.wait(["hoop/1/host/0"], timedelta(seconds=LONG_S))
    return rank_0


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    """With a FileStore too, which raises other errors than the others do."""
    for store in (dist.HashStore(), dist.FileStore(str(tmp_path / "store"), 3)):
        with pytest.raises(
            DeadlineExceeded, match=r"group 'g' of 3: ranks 1, 2 did not come within the timeout of 0.2 s"
        ):
            rendezvous.connect_group("g", store, 0, 3, range(3), timedelta(seconds=0.2))


def test_all_rounds_of_a_group_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that come and go begin new rounds: each of them gave the others the whole time-out again."""
    deadlines: list[float] = []

    def newer_round(one: GroupRound, exchange: str) -> None:
        deadlines.append(one._deadline)
        if len(deadlines) < 3:
            raise MembershipChanged("rank 1 is in a newer round")
        one._deadline = 0.0

    monkeypatch.setattr(GroupRound, "_check_newer_round", newer_round)
    monkeypatch.setattr(rendezvous, "LOOK_SECONDS", 0.0)
    with pytest.raises(DeadlineExceeded, match=r"rank 1 did not come within the timeout of 60 s"):
        rendezvous.connect_group("g", dist.HashStore(), 0, 2, range(2), timedelta(seconds=60))
    assert len(deadlines) == 3
    assert len(set(deadlines)) == 1


@pytest.mark.parametrize("rank", [2, 5, -3])
def test_a_rank_outside_the_world(rank: int) -> None:
    store = dist.HashStore()
    rank_0 = start_rank_0(store, 2)
    reason = rf"group 'g' of 2 cannot be made: process \d+ on .* has rank {rank}, which is not in 0\.\.1; give each"
    with pytest.raises(InvalidArgument, match=f"rank {rank}: {reason}"):
        connect(store, rank, range(2))
    with pytest.raises(GroupError, match=f"rank 0: {reason}"):
        rank_0.result(LONG_S)


def test_a_rank_outside_the_world_comes_first() -> None:
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match=r"rank 2: .* which is not in"):
        exchange(store, 2, range(2))
    for rank in (0, 1):
        with pytest.raises(RuntimeError, match=f"rank {rank}: .* has rank 2, which is not in"):
            exchange(store, rank, range(2))
    others = [in_thread(lambda rank=rank: exchange(store, rank, range(2))) for rank in (0, 1)]  # type: ignore[misc]
    assert [other.result(LONG_S) for other in others] == [["rank 0", "rank 1"]] * 2


def test_a_rank_outside_the_world_in_a_later_group() -> None:
    store = dist.HashStore()
    others = [in_thread(lambda rank=rank: exchange(store, rank, range(2))) for rank in (0, 1)]  # type: ignore[misc]
    for other in others:
        other.result(LONG_S)
    with pytest.raises(RuntimeError, match=r"rank 2: .* which is not in"):
        exchange(store, 2, range(2))
    with pytest.raises(RuntimeError, match=r"rank 1: .* has rank 2, which is not in"):
        exchange(store, 1, range(2))


def test_two_processes_with_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    rank_0 = start_rank_0(store, 2)
    monkeypatch.setattr(rendezvous, "_PROCESS_ID", "another process")
    reason = r"group 'g' of 2 cannot be made: process .* both have rank 0; give each process its own rank \(RANK\)"
    with pytest.raises(InvalidArgument, match=f"rank 0: {reason}"):
        connect(store, 0, range(2))
    with pytest.raises(GroupError, match=f"rank 0: {reason}"):
        rank_0.result(LONG_S)
    again = [in_thread(lambda rank=rank: exchange(store, rank, range(2))) for rank in (0, 1)]  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="both have rank 0"):
        again[1].result(LONG_S)  # it did not take part before
    assert exchange(store, 1, range(2)) == again[0].result(LONG_S) == ["rank 0", "rank 1"]


def test_processes_that_take_the_place_of_others_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a complete group, or under torchrun, which starts processes again on the same store."""
    store = dist.HashStore()
    for process in ("first", "second"):
        monkeypatch.setattr(rendezvous, "_PROCESS_ID", process)
        assert exchange(store, 0, [0]) == ["rank 0"]
    GroupRound("g", store, 0, range(2), TIMEOUT)
    monkeypatch.setattr(rendezvous, "_PROCESS_ID", "third")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    GroupRound("g", store, 0, range(2), TIMEOUT)


@pytest.mark.parametrize("torchrun", [True, False], ids=["started again by torchrun", "tried again"])
def test_a_rank_follows_the_others_to_a_newer_round(monkeypatch: pytest.MonkeyPatch, torchrun: bool) -> None:
    """Rank 0 waited for rank 1 in vain, and is in its second round when rank 1 comes for the first time."""

    def exchange_twice(name: str, store: Any, rank: int, size: int, *_: Any) -> list[list[str]]:
        one = GroupRound(name, store, rank, range(size), TIMEOUT)
        return [one.exchange(HOST, f"host of {rank}"), one.exchange(ADDRESSES, f"addresses of {rank}")]

    monkeypatch.setattr(rendezvous, "_connect_in_round", exchange_twice)
    monkeypatch.setattr(rendezvous, "LOOK_SECONDS", 0.001)
    store = dist.HashStore()
    with pytest.raises(DeadlineExceeded):
        GroupRound("g", store, 0, range(2), timedelta(0)).exchange(HOST, "host of a process that has ended")
    if torchrun:
        monkeypatch.setattr(rendezvous, "_PROCESS_ID", "another process")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    ranks = [
        in_thread(lambda rank=rank: rendezvous.connect_group("g", store, rank, 2, range(2), TIMEOUT))  # type: ignore[misc]
        for rank in (0, 1)
    ]
    expected = [["host of 0", "host of 1"], ["addresses of 0", "addresses of 1"]]
    assert [rank.result(LONG_S) for rank in ranks] == [expected, expected]


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        ([0, 1, 2], "rank 0 makes it of 2 ranks, rank 1 of 3 ranks"),
        ([0, 2], "rank 0 makes it of 2 ranks, rank 1 of the global ranks 0, 2"),
    ],
    ids=["another size", "other members"],
)
def test_ranks_that_mean_different_groups(world: list[int], reason: str) -> None:
    store = dist.HashStore()
    rank_0 = start_rank_0(store, 2)
    with pytest.raises(InvalidArgument, match=rf"rank 1: group 'g' of {len(world)} cannot be made: {reason}"):
        connect(store, 1, world)
    with pytest.raises(GroupError, match=f"rank 0: group 'g' of 2 cannot be made: {reason}"):
        rank_0.result(LONG_S)


def start_rank_0_on(
    store: Any, host: str, origin: KeyOrigin = KeyOrigin.USER, fingerprint: str | None = None
) -> Future[Any]:
    """Rank 0 of two, with this host key, up to the point where it waits for the links of rank 1.

    ``fingerprint``: of its key; None: of the key that rank 1 has too.
    """
    fingerprint = own_link_key().fingerprint if fingerprint is None else fingerprint

    def rank_0() -> None:
        peer = GroupRound("g", store, 0, range(2), TIMEOUT)
        exchanged = peer.exchange(HOST, json.dumps([host, origin, fingerprint]))
        rendezvous._check_tokens(peer, [json.loads(identity)[1] for identity in exchanged])
        peer.exchange(ADDRESSES, "1")

    return in_thread(rank_0)


def test_a_rank_that_cannot_open_its_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error in HOOP_TRANSPORT of one rank, as an example."""
    store = dist.HashStore()
    waiting = start_rank_0_on(store, "here/shm")
    monkeypatch.setattr(rendezvous, "_host_key", lambda: "here/shm")
    monkeypatch.setenv("HOOP_TRANSPORT", "tpc")
    reason = "group 'g' of 2 cannot be made: rank 1 cannot open its links: transport: 'tpc://127.0.0.1:0' has no known"
    with pytest.raises(InvalidArgument, match=f"rank 1: {reason}"):
        connect(store, 1, range(2))
    with pytest.raises(GroupError, match=f"rank 0: {reason}"):
        waiting.result(LONG_S)
    assert not rendezvous._open


def test_listening_beyond_loopback_requires_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    waiting = start_rank_0_on(store, "one machine/shm")
    monkeypatch.setattr(rendezvous, "_host_key", lambda: "another machine/shm")
    monkeypatch.setenv("HOOP_HOST", "192.0.2.1")
    reason = (
        r"group 'g' of 2 cannot be made: rank 1 cannot open its links: 192\.0\.2\.1 can be reached from other machines"
    )
    with pytest.raises(InvalidArgument, match=f"rank 1: {reason}") as refused:
        connect(store, 1, range(2))
    for word in ("hoop token FILE", "HOOP_TOKEN_FILE=FILE", "HOOP_INSECURE=1 for every rank on a network you trust"):
        assert word in str(refused.value)
    with pytest.raises(GroupError, match=f"rank 0: {reason}"):
        waiting.result(LONG_S)
    assert not rendezvous._open


def test_listening_beyond_loopback_without_a_token_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOOP_INSECURE", "0")
    with pytest.raises(InvalidArgument, match="can be reached from other machines"):
        rendezvous._check_exposure("192.0.2.1", own_link_key())
    rendezvous._warn_of_exposure.cache_clear()
    with caplog.at_level(logging.WARNING, "hoop.torch_backend"):
        rendezvous._check_exposure("192.0.2.1", LinkKey(b"key", KeyOrigin.GIVEN))
        rendezvous._check_exposure("127.0.0.1", own_link_key())
        assert caplog.messages == []
        monkeypatch.setenv("HOOP_INSECURE", "1")
        for host in ("192.0.2.1", "192.0.2.1", "127.0.0.1"):
            rendezvous._check_exposure(host, own_link_key())
    beyond, here = caplog.messages
    assert beyond.startswith("insecure: 192.0.2.1 can be reached by other machines, and links are not authenticated")
    assert here.startswith("insecure: 127.0.0.1 can be reached by other users of this machine, and links are not")


def test_a_rank_without_the_token_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    waiting = start_rank_0_on(store, "here/shm", KeyOrigin.GIVEN)
    monkeypatch.setattr(rendezvous, "_host_key", lambda: "here/shm")
    reason = "group 'g' of 2 cannot be made: rank 1 of it started without a token and the others with one"
    with pytest.raises(GroupError, match=f"rank 1: {reason}"):
        connect(store, 1, range(2))
    with pytest.raises(GroupError, match=f"rank 0: {reason}"):
        waiting.result(LONG_S)


def test_only_some_ranks_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    waiting = start_rank_0_on(store, "here/shm")
    monkeypatch.setattr(rendezvous, "_host_key", lambda: "here/shm")
    monkeypatch.setenv("HOOP_INSECURE", "1")
    reason = "group 'g' of 2 cannot be made: rank 1 of it started without a key of links .* set HOOP_INSECURE=1 for all"
    with pytest.raises(GroupError, match=f"rank 1: {reason}"):
        connect(store, 1, range(2))
    with pytest.raises(GroupError, match=f"rank 0: {reason}"):
        waiting.result(LONG_S)


def test_a_rank_with_another_token_than_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example ranks of one machine whose XDG_RUNTIME_DIR differ, or a second machine with an old token."""
    store = dist.HashStore()
    waiting = start_rank_0_on(store, "here/shm", fingerprint="another")
    monkeypatch.setattr(rendezvous, "_host_key", lambda: "here/shm")
    reason = (
        "group 'g' of 2 cannot be made: rank 1 cannot open its links: rank 0 has another token than rank 1; start all "
        "ranks with the same HOOP_TOKEN or HOOP_TOKEN_FILE .*, with the same XDG_RUNTIME_DIR"
    )
    with pytest.raises(GroupError, match=f"rank 1: {reason}"):
        connect(store, 1, range(2))
    with pytest.raises(GroupError, match=f"rank 0: {reason}"):
        waiting.result(LONG_S)


def test_a_runtime_folder_that_others_can_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hoop").mkdir(mode=0o755)
    (tmp_path / "hoop").chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    store = dist.HashStore()
    with pytest.raises(
        RuntimeError, match=r"cannot be made: rank 1: .*mode 755.*chmod 700.* HOOP_TOKEN_FILE=FILE \(hoop token FILE"
    ):
        connect(store, 1, range(2))


def test_a_rank_with_an_unreadable_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = dist.HashStore()
    waiting = start_rank_0_on(store, "here/shm")
    monkeypatch.setenv("HOOP_TOKEN_FILE", str(tmp_path / "missing"))
    reason = rf"group 'g' of 2 cannot be made: rank 1: token file {re.escape(str(tmp_path))}/missing: No such file"
    with pytest.raises(RuntimeError, match=f"rank 1: {reason}"):
        connect(store, 1, range(2))
    with pytest.raises(GroupError, match=f"rank 0: {reason}"):
        waiting.result(LONG_S)


def test_ranks_that_chose_different_backends() -> None:
    store = dist.HashStore()
    gloo = in_thread(lambda: dist.ProcessGroupGloo(store, 1, 3, TIMEOUT))
    rank_0 = start_rank_0(store, 3)
    reason = "group 'g' of 3 cannot be made: rank 1 makes it with the backend gloo, rank . with hoop; name one"
    for rank, other in ((0, rank_0), (2, in_thread(lambda: connect(store, 2, range(3))))):
        with pytest.raises(GroupError, match=f"rank {rank}: {reason}"):
            other.result(LONG_S)
    ends = [in_thread(lambda rank=rank: dist.ProcessGroupGloo(store, rank, 3, TIMEOUT)) for rank in (0, 2)]  # type: ignore[misc]
    groups = [one.result(LONG_S) for one in (*ends, gloo)]
    assert len(groups) == 3  # Gloo's ranks met, and their keys stay in the store


def test_a_group_of_gloo_with_this_name_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys are in the store; that rank 1 comes late to Hoop's group is no contradiction."""
    monkeypatch.setattr(rendezvous, "LOOK_SECONDS", 0.001)
    store = dist.HashStore()
    gloo = [in_thread(lambda rank=rank: dist.ProcessGroupGloo(store, rank, 2, TIMEOUT)) for rank in (0, 1)]  # type: ignore[misc]
    groups = [one.result(LONG_S) for one in gloo]
    looked = threading.Event()
    check = GroupRound._check_backends

    def recording(self: GroupRound, missing: Sequence[int]) -> None:
        check(self, missing)
        looked.set()

    monkeypatch.setattr(GroupRound, "_check_backends", recording)
    rank_0 = in_thread(lambda: exchange(store, 0, range(2)))
    assert looked.wait(LONG_S)
    assert exchange(store, 1, range(2)) == rank_0.result(LONG_S) == ["rank 0", "rank 1"]
    del groups
