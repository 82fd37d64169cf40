"""Every journal keeps the same promises: in a file, and in a real etcd."""

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

LEASE_S = 2.0
WAIT_S = 20.0
Open = Callable[[], Journal]
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


def batches_of(messages: list[m.MembershipEvent]) -> list[list[Entry]]:
    """What the journal gets to see of these, a step at a time."""
    state, batches = State(CONFIG), []
    for message in messages:
        state, instructions = step(state, message)
        batches.append([one.entry for one in recorded(instructions)])
    return [batch for batch in batches if batch]


BATCHES = batches_of(HISTORY)


def timeless(state: State) -> State:
    """What was read, whenever that was."""
    return replay(snapshot(state), CONFIG, NOW)


def after(batches: list[list[Entry]]) -> State:
    return replay(itertools.chain(*batches), CONFIG, NOW)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEtcd | None]:
    """None: there is no such program here, and whoever needs it is skipped."""
    if PROGRAM is None:
        yield None
        return
    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


class InEtcd:
    """Coordinators of a test, all on one prefix."""

    def __init__(self, etcd: RealEtcd) -> None:
        self.etcd, self.prefix = etcd, next(_names)
        self.told: SimpleQueue[str] = SimpleQueue()
        self.lost: SimpleQueue[PeerLost] = SimpleQueue()

    def __call__(self, who: str = "one") -> EtcdJournal:
        journal = self.unopened(who)
        try:
            journal.open(CONFIG, self.told.put)
        except BaseException:
            journal.close()
            raise
        return journal

    def unopened(self, who: str, lease_s: float = LEASE_S) -> EtcdJournal:
        # The first endpoint is nobody's: the next is asked.
        place = EtcdLocation.parse(f"etcd://127.0.0.1:1,{self.etcd.address}/{self.prefix}", lease_s)
        return EtcdJournal(place, who, self.lost.put)

    def stored(self) -> dict[bytes, pb.KeyValue]:
        with self.etcd.api() as api:
            root = self.prefix.encode()
            everything = pb.RangeRequest(key=root + b"/", range_end=root + b"0")
            found = api.call(lambda etcd: etcd.kv.Range, everything, WAIT_S)
        return {one.key.removeprefix(root + b"/"): one for one in found.kvs}

    def entries(self) -> list[bytes]:
        return [key for key in self.stored() if key.startswith(b"entries/")]

    def put(self, key: bytes, value: bytes) -> None:
        put = pb.PutRequest(key=self.prefix.encode() + b"/" + key, value=value)
        self._do(pb.RequestOp(request_put=put))

    def delete(self, key: bytes) -> None:
        self._do(pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=self.prefix.encode() + b"/" + key)))

    def _do(self, done: pb.RequestOp) -> None:
        with self.etcd.api() as api:
            assert api.call(lambda etcd: etcd.kv.Txn, pb.TxnRequest(success=[done]), WAIT_S).succeeded

    def end_lease(self) -> None:
        """What etcd does when the owner was not heard from for too long."""
        with self.etcd.api() as api:
            revoke = pb.LeaseRevokeRequest(ID=self.stored()[b"owner"].lease)
            api.call(lambda etcd: etcd.lease.LeaseRevoke, revoke, WAIT_S)


@pytest.fixture(params=["file", pytest.param("etcd", marks=needs_etcd)])
def places(request: pytest.FixtureRequest, etcd: RealEtcd, tmp_path: Path) -> Callable[[], Open]:
    """Journals at a place of their own, one each time it is asked for; opened again as often as wanted."""
    if request.param == "etcd":
        return lambda: InEtcd(etcd)
    paths = (tmp_path / str(number) for number in itertools.count())

    def place() -> Callable[[], FileJournal]:
        path = next(paths)
        return lambda: FileJournal(path, CONFIG, time.monotonic())

    return place


# ---- every journal


def test_a_new_one_is_empty(places: Callable[[], Open]) -> None:
    with closing(places()()) as journal:
        assert timeless(journal.state) == State(CONFIG, last_tick=NOW)


def test_what_was_appended_is_there_again(places: Callable[[], Open]) -> None:
    opened = places()
    for length in range(len(BATCHES)):
        with closing(opened()) as journal:
            assert timeless(journal.state) == after(BATCHES[:length])
            journal.append(*BATCHES[length])
    for _ in range(2):
        with closing(opened()) as journal:
            assert timeless(journal.state) == after(BATCHES)


def test_any_history_with_any_restarts(places: Callable[[], Open]) -> None:
    @settings(max_examples=12, deadline=None)
    @given(st.lists(st.integers(0, 3), max_size=4), st.integers(0, len(BATCHES)))
    def check(lives: list[int], length: int) -> None:
        opened, done = places(), 0
        for appends in [*lives, length]:
            with closing(opened()) as journal:
                assert timeless(journal.state) == after(BATCHES[:done])
                for batch in BATCHES[done : min(done + appends, length)]:
                    journal.append(*batch)
                    done += 1
        with closing(opened()) as journal:
            assert timeless(journal.state) == after(BATCHES[:length])

    check()


# ---- in etcd: what is there


@pytest.fixture
def there(etcd: RealEtcd) -> InEtcd:
    return InEtcd(etcd)


@needs_etcd
def test_a_snapshot_replaces_what_was_before(there: InEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of many pieces, read in many pages."""
    for _ in range(2):
        with closing(there()) as journal:
            for batch in BATCHES:
                journal.append(*batch)
    monkeypatch.setattr(etcd_journal, "CHUNK_BYTES", 1)
    monkeypatch.setattr(etcd_journal, "PAGE", 2)
    for _ in range(2):
        with closing(there()) as journal:
            assert timeless(journal.state) == after(BATCHES)
            term = there.stored()[b"owner"].create_revision
        assert len(there.entries()) == len(snapshot(journal.state))
        assert all(key.startswith(b"entries/%016x/" % term) for key in there.entries())


@needs_etcd
def test_a_step_that_does_not_fit_is_refused_as_one(there: InEtcd) -> None:
    large: list[Entry] = [*BATCHES[1], {"kind": "of tomorrow", "text": "x" * 2_000_000}]
    with closing(there()) as journal:
        journal.append(*BATCHES[0])
        with pytest.raises(ResourceExhausted, match=r"cannot write 2000\d+ bytes: .*too large"):
            journal.append(*large)
        journal.append(*BATCHES[2])
    with closing(there()) as journal:
        assert sorted(journal.state.members) == [1, 3]


@needs_etcd
def test_damage_is_named(there: InEtcd) -> None:
    with closing(there()) as journal:
        for batch in BATCHES:
            journal.append(*batch)
    whole = there.stored()
    last = there.entries()[-1]
    wrongs = [
        (last, whole[last].value[:-5], "line 2: the checksum"),  # what etcd holds is whole: nothing is torn
        (last, b"hello", "line 1: "),
        (last, encode({"kind": "device_gone", "device": 77, "health": "dead"}), "of another kind"),
        (b"current", b"tomorrow", "no term of Hoop's"),
    ]
    for key, value, reason in wrongs:
        there.put(key, value)
        with pytest.raises(FailedPrecondition, match=rf"^journal etcd://.*/{there.prefix}.*{reason}.*etcdctl del"):
            there()
        assert there.stored()[key].value == value, "nothing is thrown away"
        there.put(key, whole[key].value)
    there.delete(there.entries()[1])
    with pytest.raises(FailedPrecondition, match="entry 2 is not there"):
        there()


# ---- in etcd: one writes


@needs_etcd
def test_a_second_one_waits_and_takes_over(there: InEtcd) -> None:
    """It says for whom; when the first lets go it has all that the first wrote."""
    first, second = there("the first"), there.unopened("the second")
    waiting = Thread(target=second.open, args=(CONFIG, there.told.put))
    waiting.start()
    try:
        assert there.told.get(timeout=WAIT_S) == f"journal {first._where}: waiting, it belongs to the first"
        assert waiting.is_alive()
        first.append(*BATCHES[0])
    finally:
        first.close()
        waiting.join(WAIT_S)
        second.close()
    assert there.told.empty(), "it says so once"
    assert timeless(second.state) == after(BATCHES[:1])
    assert there.lost.empty()
    assert b"owner" not in there.stored()


@needs_etcd
def test_whoever_waits_can_be_told_to_stop(there: InEtcd) -> None:
    with closing(there("the first")):
        second = there.unopened("the second")
        raised: list[PeerLost] = []

        def wait() -> None:
            try:
                second.open(CONFIG, there.told.put)
            except PeerLost as error:
                raised.append(error)

        waiting = Thread(target=wait)
        waiting.start()
        there.told.get(timeout=WAIT_S)
        second.close()
        waiting.join(WAIT_S)
        assert not waiting.is_alive()
        assert [str(one) for one in raised] == [f"journal {second._where}: closed while it was waited for"]


@needs_etcd
@pytest.mark.parametrize("successor", [True, False])
def test_at_most_one_writes(there: InEtcd, successor: bool) -> None:
    """One whose lease ended without its knowing is refused, whoever came after it, and nothing of it is kept."""
    with ExitStack() as closed:
        first = closed.enter_context(closing(there("the first")))
        first.append(*BATCHES[0])
        there.end_lease()
        if successor:
            second = closed.enter_context(closing(there("the second")))
            second.append(*BATCHES[1])
        who = "taken over by the second" if successor else "its lease ended"
        for _ in range(2):
            with pytest.raises(PeerLost, match=f"{who}.*: this coordinator owns it no longer, and stops"):
                first.append(*BATCHES[2])
    assert who in str(there.lost.get(timeout=WAIT_S))
    assert there.lost.empty(), "it is told once"
    with closing(there()) as journal:
        assert sorted(journal.state.members) == ([1, 2] if successor else [1])


@needs_etcd
def test_a_lease_that_ended_is_noticed_without_writing(there: InEtcd) -> None:
    with closing(there("the first")):
        there.end_lease()
        assert "its lease ended" in str(there.lost.get(timeout=WAIT_S))


@needs_etcd
def test_etcd_is_away_for_a_while(there: InEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused meanwhile is not there later, though etcd may get round to it; then all is as before."""
    monkeypatch.setattr(etcd_journal, "WRITE_S", 0.5)
    with closing(there.unopened("the first", lease_s=60)) as journal:
        journal.open(CONFIG, there.told.put)
        journal.append(*BATCHES[0])
        there.etcd.signal(signal.SIGSTOP)
        try:
            for _ in range(2):
                with pytest.raises(DeadlineExceeded, match=f"^journal etcd://.* is away.*{there.etcd.address}"):
                    journal.append(*BATCHES[1])
        finally:
            there.etcd.signal(signal.SIGCONT)
        append_when_back(journal, BATCHES[2])
    assert there.lost.empty()
    with closing(there()) as journal:
        assert sorted(journal.state.members) == [1, 3]


@needs_etcd
@pytest.mark.parametrize("again", [True, False])
def test_a_write_whose_answer_was_lost(there: InEtcd, again: bool) -> None:
    """It was made all the same: tried again it counts once; refused, the next takes its place."""
    with closing(there()) as journal:
        journal.append(*BATCHES[0])
        following = b"entries/%016x/%016x" % (there.stored()[b"owner"].create_revision, 2)
        there.put(following, b"".join(map(encode, BATCHES[1])))
        journal.append(*BATCHES[1 if again else 2])
        journal.append(*BATCHES[3 if again else 0])
        assert len(there.entries()) == 3
    with closing(there()) as journal:
        assert sorted(journal.state.members) == ([1, 2] if again else [1, 3])


@needs_etcd
def test_a_write_that_arrives_late_changes_nothing(there: InEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused, another has its number, and only then does etcd see it."""
    with closing(there()) as journal, there.etcd.api() as api:
        call, late = journal._etcd.call, []

        def under_way(method: Callable[[EtcdStubs], Any], request: Any, timeout: float) -> Any:
            if not isinstance(request, pb.TxnRequest):
                return call(method, request, timeout)
            late.append(request)
            raise DeadlineExceeded("no answer yet")

        monkeypatch.setattr(journal._etcd, "call", under_way)
        with pytest.raises(DeadlineExceeded, match="no answer yet"):
            journal.append(*BATCHES[0])
        monkeypatch.undo()
        append_when_back(journal, BATCHES[1])
        (request,) = late
        assert not api.call(lambda etcd: etcd.kv.Txn, request, WAIT_S).succeeded
    with closing(there()) as journal:
        assert sorted(journal.state.members) == [2]


def append_when_back(journal: EtcdJournal, batch: list[Entry]) -> None:
    """As soon as the owner has heard from etcd again."""
    until = time.monotonic() + WAIT_S
    while True:
        try:
            return journal.append(*batch)
        except DeadlineExceeded:
            assert time.monotonic() < until
            time.sleep(0.02)


@needs_etcd
def test_etcd_is_away_for_longer_than_the_lease(there: InEtcd) -> None:
    """It cannot know who writes by now, so it ends, before etcd could give the journal to another."""
    with closing(there("the first")) as journal:
        there.etcd.signal(signal.SIGSTOP)
        try:
            error = there.lost.get(timeout=WAIT_S)
        finally:
            there.etcd.signal(signal.SIGCONT)
        assert "its lease of 2 s was not renewed in time" in str(error)
        with pytest.raises(PeerLost, match="no longer"):
            journal.append(*BATCHES[0])


@needs_etcd
def test_over_tls(tmp_path: Path) -> None:
    """Nobody without a certificate of the authority gets in; nobody else's etcd is believed."""
    for who in ("ours", "another"):
        (tmp_path / who).mkdir()
        make_certificates(tmp_path / who)
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
    """An authority, and a certificate of its for 127.0.0.1."""
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    sign = ("x509", "-req", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    for command in (
        (*new, "ca.key", "-x509", "-out", "ca.pem", "-subj", "/CN=authority"),
        (*new, "key.pem", "-out", "request", "-subj", "/CN=hoop"),
        (*sign, "-in", "request", "-out", "cert.pem"),
    ):
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True, timeout=WAIT_S)


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_place_that_is_none(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^--journal: .*{re.escape(reason)}"):
        EtcdLocation.parse(text)


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(InvalidArgument) as raised:
        EtcdLocation.parse("etcd://root:secret@127.0.0.1:2379/hoop")
    assert "secret" not in str(raised.value)
