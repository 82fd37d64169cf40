"""Behaviour that every journal has, in a file and in a real etcd; and ownership and failures of the journal in etcd."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_etcd import PROGRAM, RealEtcd, needs_etcd, running_etcd

from hoop.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, PeerLost, ResourceExhausted
from hoop.membership import events as m
from hoop.membership.journal import Entry, FileJournal, Journal, encode, replay, snapshot
from hoop.membership.state import State
from hoop.membership.state_machine import step
from hoop.servers import etcd_journal
from hoop.servers.etcd_journal import EtcdJournal, EtcdLocation, EtcdStubs
from hoop.wire.generated import etcd_pb2 as pb

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit" / "membership"))
from roster import CONFIG, NOW, dead, device, recorded

LEASE_S, SHORT_LEASE_S = 10.0, 2.0
"""Of coordinators that keep the journal, also on a busy machine; and of one that must lose it."""
WAIT_S = 120.0
OpenJournal = Callable[[], Journal]
_names = (f"test/{number}" for number in itertools.count())

HISTORY: list[m.MembershipEvent] = [
    *(m.Joined(device(one), NOW) for one in (1, 2, 3)),
    m.Created((1, 2)),
    m.Created((2, 3)),
    m.Finished(2, 1, "checksum"),
    m.JobStarted(1, '{"model": "mlp"}'),
    dead(1),
    m.Rebuilt(1),
    m.Left(3, "a"),
    m.Destroyed(2),
    m.JobEnded(1, "PeerLost", "why"),
]


def batches_of(events: list[m.MembershipEvent]) -> list[list[Entry]]:
    """The entries that each event writes to the journal; one batch per event."""
    state, batches = State(CONFIG), []
    for event in events:
        state, instructions = step(state, event)
        batches.append([record.entry for record in recorded(instructions)])
    return [batch for batch in batches if batch]


BATCHES = batches_of(HISTORY)


def at_fixed_time(state: State) -> State:
    """The state with NOW as its last tick, whenever it was read."""
    return replay(snapshot(state), CONFIG, NOW)


def state_after(batches: list[list[Entry]]) -> State:
    return replay(itertools.chain(*batches), CONFIG, NOW)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEtcd | None]:
    """None if etcd is not installed; tests that need it are skipped."""
    if PROGRAM is None:
        yield None
        return
    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


class EtcdStore:
    """Opens journals of several coordinators under one prefix of etcd, and reads and writes its keys directly."""

    def __init__(self, etcd: RealEtcd) -> None:
        self.etcd, self.prefix = etcd, next(_names)
        self.messages: SimpleQueue[str] = SimpleQueue()
        self.lost: SimpleQueue[PeerLost] = SimpleQueue()

    def __call__(self, owner: str = "one", lease_s: float = LEASE_S) -> EtcdJournal:
        journal = self.unopened(owner, lease_s)
        try:
            journal.open(CONFIG, self.messages.put)
        except BaseException:
            journal.close()
            raise
        return journal

    def unopened(self, owner: str, lease_s: float = LEASE_S) -> EtcdJournal:
        # Nothing listens at the first endpoint, so the client tries the next one.
        location = EtcdLocation.parse(f"etcd://127.0.0.1:1,{self.etcd.address}/{self.prefix}", lease_s)
        return EtcdJournal(location, owner, self.lost.put)

    def stored(self) -> dict[bytes, pb.KeyValue]:
        with self.etcd.api() as api:
            root = self.prefix.encode()
            everything = pb.RangeRequest(key=root + b"/", range_end=root + b"0")
            response = api.call(lambda etcd: etcd.kv.Range, everything, WAIT_S)
        return {pair.key.removeprefix(root + b"/"): pair for pair in response.kvs}

    def entries(self) -> list[bytes]:
        return [key for key in self.stored() if key.startswith(b"entries/")]

    def put(self, key: bytes, value: bytes) -> None:
        put = pb.PutRequest(key=self.prefix.encode() + b"/" + key, value=value)
        self._commit(pb.RequestOp(request_put=put))

    def delete(self, key: bytes) -> None:
        self._commit(pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=self.prefix.encode() + b"/" + key)))

    def _commit(self, operation: pb.RequestOp) -> None:
        with self.etcd.api() as api:
            assert api.call(lambda etcd: etcd.kv.Txn, pb.TxnRequest(success=[operation]), WAIT_S).succeeded

    def end_lease(self) -> None:
        """Revokes the owner's lease, as etcd does if it is not renewed in time."""
        with self.etcd.api() as api:
            revoke = pb.LeaseRevokeRequest(ID=self.stored()[b"owner"].lease)
            api.call(lambda etcd: etcd.lease.LeaseRevoke, revoke, WAIT_S)


@pytest.fixture(params=["file", pytest.param("etcd", marks=needs_etcd)])
def new_location(request: pytest.FixtureRequest, etcd: RealEtcd, tmp_path: Path) -> Callable[[], OpenJournal]:
    """Each call picks a new location and returns a function that opens the journal there, as often as needed."""
    if request.param == "etcd":
        return lambda: EtcdStore(etcd)
    paths = (tmp_path / str(number) for number in itertools.count())

    def location() -> Callable[[], FileJournal]:
        path = next(paths)
        return lambda: FileJournal(path, CONFIG, time.monotonic())

    return location


# ---- every journal


def test_a_new_journal_is_empty(new_location: Callable[[], OpenJournal]) -> None:
    with closing(new_location()()) as journal:
        assert at_fixed_time(journal.state) == State(CONFIG, last_tick=NOW)


def test_appended_entries_survive_restarts(new_location: Callable[[], OpenJournal]) -> None:
    open_journal = new_location()
    for length in range(len(BATCHES)):
        with closing(open_journal()) as journal:
            assert at_fixed_time(journal.state) == state_after(BATCHES[:length])
            journal.append(*BATCHES[length])
    for _ in range(2):
        with closing(open_journal()) as journal:
            assert at_fixed_time(journal.state) == state_after(BATCHES)


def test_any_history_survives_any_restarts(new_location: Callable[[], OpenJournal]) -> None:
    @settings(max_examples=12, deadline=None)
    @given(st.lists(st.integers(0, 3), max_size=4), st.integers(0, len(BATCHES)))
    def check(runs: list[int], length: int) -> None:
        open_journal, appended = new_location(), 0
        for appends in [*runs, length]:
            with closing(open_journal()) as journal:
                assert at_fixed_time(journal.state) == state_after(BATCHES[:appended])
                for batch in BATCHES[appended : min(appended + appends, length)]:
                    journal.append(*batch)
                    appended += 1
        with closing(open_journal()) as journal:
            assert at_fixed_time(journal.state) == state_after(BATCHES[:length])

    check()


# ---- in etcd: stored keys


@pytest.fixture
def store(etcd: RealEtcd) -> EtcdStore:
    return EtcdStore(etcd)


@needs_etcd
def test_a_snapshot_replaces_the_earlier_entries(store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a snapshot of many chunks that is read in many pages."""
    for _ in range(2):
        with closing(store()) as journal:
            for batch in BATCHES:
                journal.append(*batch)
    monkeypatch.setattr(etcd_journal, "CHUNK_BYTES", 1)
    monkeypatch.setattr(etcd_journal, "PAGE", 2)
    for _ in range(2):
        with closing(store()) as journal:
            assert at_fixed_time(journal.state) == state_after(BATCHES)
            term = store.stored()[b"owner"].create_revision
        assert len(store.entries()) == len(snapshot(journal.state))
        assert all(key.startswith(b"entries/%016x/" % term) for key in store.entries())


@needs_etcd
def test_a_batch_that_is_too_large_is_rejected_as_a_whole(store: EtcdStore) -> None:
    large: list[Entry] = [*BATCHES[1], {"kind": "of tomorrow", "text": "x" * 2_000_000}]
    with closing(store()) as journal:
        journal.append(*BATCHES[0])
        with pytest.raises(ResourceExhausted, match=r"cannot write 2000\d+ bytes: .*too large"):
            journal.append(*large)
        journal.append(*BATCHES[2])
    with closing(store()) as journal:
        assert sorted(journal.state.members) == [1, 3]


@needs_etcd
def test_a_damaged_journal_is_rejected_with_the_reason(store: EtcdStore) -> None:
    with closing(store()) as journal:
        for batch in BATCHES:
            journal.append(*batch)
    intact = store.stored()
    last = store.entries()[-1]
    damages = [
        (last, intact[last].value[:-5], "line 2: the checksum"),  # etcd writes are atomic: no torn write
        (last, b"hello", "line 1: "),
        (last, encode({"kind": "device_gone", "device": 77, "health": "dead"}), "of another kind"),
        (b"current", b"tomorrow", "no term of Hoop's"),
    ]
    for key, value, reason in damages:
        store.put(key, value)
        with pytest.raises(FailedPrecondition, match=rf"^journal etcd://.*/{store.prefix}.*{reason}.*etcdctl del"):
            store()
        assert store.stored()[key].value == value, "the damaged value was overwritten"
        store.put(key, intact[key].value)
    store.delete(store.entries()[1])
    with pytest.raises(FailedPrecondition, match="entry 2 is not there"):
        store()


# ---- in etcd: one owner


@needs_etcd
def test_a_second_coordinator_waits_and_takes_over(store: EtcdStore) -> None:
    """It logs who owns the journal; after the takeover it has everything that the first wrote."""
    first, second = store("the first"), store.unopened("the second")
    waiting = Thread(target=second.open, args=(CONFIG, store.messages.put))
    waiting.start()
    try:
        assert store.messages.get(timeout=WAIT_S) == f"journal {first._where}: waiting, it belongs to the first"
        assert waiting.is_alive()
        first.append(*BATCHES[0])
    finally:
        first.close()
        waiting.join(WAIT_S)
        second.close()
    assert store.messages.empty(), "the message was repeated"
    assert at_fixed_time(second.state) == state_after(BATCHES[:1])
    assert store.lost.empty()
    assert b"owner" not in store.stored()


@needs_etcd
def test_close_ends_the_wait_for_ownership(store: EtcdStore) -> None:
    with closing(store("the first")):
        second = store.unopened("the second")
        errors: list[PeerLost] = []

        def wait() -> None:
            try:
                second.open(CONFIG, store.messages.put)
            except PeerLost as error:
                errors.append(error)

        waiting = Thread(target=wait)
        waiting.start()
        store.messages.get(timeout=WAIT_S)
        second.close()
        waiting.join(WAIT_S)
        assert not waiting.is_alive()
        assert [str(error) for error in errors] == [f"journal {second._where}: closed while it was waited for"]


@needs_etcd
@pytest.mark.parametrize("successor", [True, False])
def test_at_most_one_coordinator_writes(store: EtcdStore, successor: bool) -> None:
    """The writes of a coordinator that has lost its lease unnoticed are rejected, with or without a new owner."""
    with ExitStack() as stack:
        first = stack.enter_context(closing(store("the first")))
        first.append(*BATCHES[0])
        store.end_lease()
        if successor:
            second = stack.enter_context(closing(store("the second")))
            second.append(*BATCHES[1])
        reason = "taken over by the second" if successor else "its lease ended"
        for _ in range(2):
            with pytest.raises(PeerLost, match=f"{reason}.*: this coordinator owns it no longer, and stops"):
                first.append(*BATCHES[2])
    assert reason in str(store.lost.get(timeout=WAIT_S))
    assert store.lost.empty(), "the loss was reported twice"
    with closing(store()) as journal:
        assert sorted(journal.state.members) == ([1, 2] if successor else [1])


@needs_etcd
def test_a_lost_lease_is_noticed_without_a_write(store: EtcdStore) -> None:
    with closing(store("the first")):
        store.end_lease()
        assert "its lease ended" in str(store.lost.get(timeout=WAIT_S))


@needs_etcd
def test_etcd_is_unreachable_for_less_than_the_lease(store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that failed meanwhile must not appear later, even if etcd still executes it; then writes work again."""
    monkeypatch.setattr(etcd_journal, "WRITE_S", 0.5)
    with closing(store.unopened("the first", lease_s=60)) as journal:
        journal.open(CONFIG, store.messages.put)
        journal.append(*BATCHES[0])
        store.etcd.signal(signal.SIGSTOP)
        try:
            for _ in range(2):
                with pytest.raises(DeadlineExceeded, match=f"^journal etcd://.* is away.*{store.etcd.address}"):
                    journal.append(*BATCHES[1])
        finally:
            store.etcd.signal(signal.SIGCONT)
        append_when_back(journal, BATCHES[2])
    assert store.lost.empty()
    with closing(store()) as journal:
        assert sorted(journal.state.members) == [1, 3]


@needs_etcd
@pytest.mark.parametrize("retried", [True, False])
def test_a_write_whose_response_was_lost(store: EtcdStore, retried: bool) -> None:
    """etcd has executed it: a retry counts once; without a retry, the next write replaces it."""
    with closing(store()) as journal:
        journal.append(*BATCHES[0])
        following = b"entries/%016x/%016x" % (store.stored()[b"owner"].create_revision, 2)
        store.put(following, b"".join(map(encode, BATCHES[1])))
        journal.append(*BATCHES[1 if retried else 2])
        journal.append(*BATCHES[3 if retried else 0])
        assert len(store.entries()) == 3
    with closing(store()) as journal:
        assert sorted(journal.state.members) == ([1, 2] if retried else [1, 3])


@needs_etcd
def test_a_write_that_arrives_late_is_rejected(store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It timed out, another write has taken its number, and only then etcd receives it."""
    with closing(store()) as journal, store.etcd.api() as api:
        call, delayed = journal._etcd.call, []

        def delayed_call(method: Callable[[EtcdStubs], Any], request: Any, timeout: float) -> Any:
            if not isinstance(request, pb.TxnRequest):
                return call(method, request, timeout)
            delayed.append(request)
            raise DeadlineExceeded("no answer yet")

        monkeypatch.setattr(journal._etcd, "call", delayed_call)
        with pytest.raises(DeadlineExceeded, match="no answer yet"):
            journal.append(*BATCHES[0])
        monkeypatch.undo()
        append_when_back(journal, BATCHES[1])
        (request,) = delayed
        assert not api.call(lambda etcd: etcd.kv.Txn, request, WAIT_S).succeeded
    with closing(store()) as journal:
        assert sorted(journal.state.members) == [2]


def append_when_back(journal: EtcdJournal, batch: list[Entry]) -> None:
    """Retries until the owner has reached etcd again."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return journal.append(*batch)
        except DeadlineExceeded:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@needs_etcd
def test_etcd_is_unreachable_for_longer_than_the_lease(store: EtcdStore) -> None:
    """The owner stops before etcd could give the journal to another coordinator."""
    with closing(store("the first", SHORT_LEASE_S)) as journal:
        store.etcd.signal(signal.SIGSTOP)
        try:
            error = store.lost.get(timeout=WAIT_S)
        finally:
            store.etcd.signal(signal.SIGCONT)
        assert "its lease of 2 s was not renewed in time" in str(error)
        with pytest.raises(PeerLost, match="no longer"):
            journal.append(*BATCHES[0])


@needs_etcd
def test_tls_accepts_only_certificates_of_the_authority(tmp_path: Path) -> None:
    """A client without a certificate, or with one of another authority, gets no answer."""
    for authority in ("ours", "another"):
        (tmp_path / authority).mkdir()
        make_certificates(tmp_path / authority)
    ours = tmp_path / "ours"
    options: tuple[str, ...] = ("--client-cert-auth", "--trusted-ca-file", str(ours / "ca.pem"))
    options += ("--cert-file", str(ours / "cert.pem"), "--key-file", str(ours / "key.pem"))
    with running_etcd(tmp_path, options, "https", ours) as etcd:
        text = f"etcd://{etcd.address}/test"
        for _ in range(2):
            with closing(EtcdJournal(EtcdLocation.parse(text, LEASE_S, ours), "me", print)) as journal:
                journal.open(CONFIG, print)
                journal.append(*BATCHES[0])
        assert sorted(journal.state.members) == [1]
        for tls in (None, tmp_path / "another"):
            with etcd.api(tls) as api, pytest.raises(DeadlineExceeded):
                api.call(lambda etcd: etcd.kv.Range, pb.RangeRequest(key=b"x"), 1.0)


def make_certificates(folder: Path) -> None:
    """Creates an authority and a certificate signed by it for 127.0.0.1."""
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    sign = ("x509", "-req", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    for command in (
        (*new, "ca.key", "-x509", "-out", "ca.pem", "-subj", "/CN=authority"),
        (*new, "key.pem", "-out", "request", "-subj", "/CN=hoop"),
        (*sign, "-in", "request", "-out", "cert.pem"),
    ):
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True, timeout=WAIT_S)


def test_open_fails_if_no_endpoint_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_journal, "START_S", 0.3)
    nowhere = "127.0.0.1:1,127.0.0.1:2"
    with (
        closing(EtcdJournal(EtcdLocation.parse(f"etcd://{nowhere}/x"), "me", print)) as journal,
        pytest.raises(DeadlineExceeded, match=f"^etcd at {nowhere} did not answer within .* tries"),
    ):
        journal.open(CONFIG, print)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("etcd://127.0.0.1:2379", "has no prefix for its keys, e.g. etcd://127.0.0.1:2379/hoop"),
        ("etcd://127.0.0.1:2379/", "has no prefix"),
        ("etcd://127.0.0.1:2379/a b", "has no prefix"),
        ("etcd:///hoop", "'' is not host:port"),
        ("etcd://127.0.0.1/hoop", "'127.0.0.1' is not host:port"),
        ("etcd://127.0.0.1:1,/hoop", "'' is not host:port"),
    ],
)
def test_an_invalid_location_is_rejected(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^--journal: .*{re.escape(reason)}"):
        EtcdLocation.parse(text)


def test_a_password_does_not_appear_in_the_error() -> None:
    with pytest.raises(InvalidArgument) as raised:
        EtcdLocation.parse("etcd://root:secret@127.0.0.1:2379/hoop")
    assert "secret" not in str(raised.value)
