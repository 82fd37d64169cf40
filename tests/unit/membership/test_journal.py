"""The journal: replay, and files that are torn, damaged or reopened."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from roster import CONFIG, NOW, after, cluster, dead, device, pass_time, recorded

from hoop.errors import FailedPrecondition, ResourceExhausted
from hoop.membership import events as m
from hoop.membership.journal import HEADER, Entry, FileJournal, chained, checksum_of, decode, encode, replay, snapshot
from hoop.membership.state import Health, OperationOutcome, State
from hoop.membership.state_machine import step
from hoop.topology import Address

HISTORY: list[m.MembershipEvent] = [
    *(m.Joined(device(one), NOW) for one in (1, 2, 3)),
    m.Created((1, 2)),
    m.Created((2, 3)),
    m.Created((3, 1)),
    m.Finished(2, 1, "checksum"),
    dead(1),
    m.Rebuilt(1),
    m.Left(3, "a"),
    m.Destroyed(2),
    m.Created((2,)),
    m.Destroyed(4),
]


def entries_of(*messages: m.MembershipEvent, state: State | None = None) -> list[Entry]:
    """Return the journal entries that these messages cause."""
    state, entries = state or State(CONFIG), []
    for message in messages:
        state, instructions = step(state, message)
        entries += [record.entry for record in recorded(instructions)]
    return entries


ENTRIES = entries_of(*HISTORY)
LINES = chained([HEADER, *ENTRIES])
OLD_LINES = [encode(entry) for entry in ENTRIES]
"""As they were written before lines were a chain."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync, for tests that open thousands of journals."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def load_state(path: Path) -> State:
    """Return the state of a coordinator that starts with this journal."""
    with closing(FileJournal(path, CONFIG, NOW)) as journal:
        return journal.state


# ---- replay


def test_entries_are_decoded_as_they_were_encoded() -> None:
    assert decode(b"".join(LINES), Path("journal")) == ENTRIES
    assert decode(b"", Path("journal")) == []
    assert decode(b"".join(OLD_LINES), Path("journal")) == ENTRIES


def test_replay_applies_the_whole_history() -> None:
    state = replay(ENTRIES, CONFIG, NOW)
    assert {key: member.health for key, member in state.members.items()} == {
        1: Health.DEAD,
        2: Health.SUSPECT,
        3: Health.LEFT,
    }
    assert state.member(2).info == device(2)
    assert {one.id: (one.members, one.generation, one.broken_by) for one in state.communicators.values()} == {
        1: ((2,), 2, 0),
        3: ((3, 1), 1, 1),  # the first device that was lost
    }
    assert state.communicator(3).outcome == OperationOutcome.FAILED
    assert state.communicator(3).reason == after(State(CONFIG), *HISTORY).communicator(3).reason
    assert state.next_communicator == 5
    assert state.last_tick == NOW


@pytest.mark.parametrize("shared", [None, Address("/run/hoop.sock", 0)])
def test_all_fields_of_a_device_are_restored(shared: Address | None) -> None:
    info = replace(device(1), address=Address("::1", 1), host="größe \n", shared_address=shared)
    lines = b"".join(encode(entry) for entry in entries_of(m.Joined(info, NOW)))
    assert replay(decode(lines, Path("journal")), CONFIG, NOW).member(1).info == info


def test_after_a_restart_devices_have_one_lease_for_a_heartbeat() -> None:
    state = replay(entries_of(*HISTORY[:2]), CONFIG, NOW)
    state = pass_time(state, NOW, NOW + 1.4, 1)
    assert state.member(2).health == Health.SUSPECT
    state = pass_time(state, NOW + 1.4, NOW + 1.7, 1)
    assert (state.member(1).health, state.member(2).health) == (Health.ALIVE, Health.DEAD)


def test_entries_of_unknown_kinds_are_skipped() -> None:
    assert replay([*ENTRIES, {"kind": "of tomorrow"}], CONFIG, NOW) == replay(ENTRIES, CONFIG, NOW)


@pytest.mark.parametrize("length", range(len(ENTRIES) + 1))
def test_a_snapshot_replays_to_the_same_state(length: int) -> None:
    state = replay(ENTRIES[:length], CONFIG, NOW)
    assert replay(snapshot(state), CONFIG, NOW) == state


@pytest.mark.parametrize(
    "rejoin", [[m.LinkClosed(1, "a"), m.Joined(device(1, "b"), NOW)], [dead(1), m.Joined(device(1), NOW)]]
)
def test_a_broken_communicator_is_broken_after_a_restart(rejoin: list[m.MembershipEvent]) -> None:
    messages = [m.Joined(device(1), NOW), m.Joined(device(2), NOW), m.Created((1, 2)), *rejoin]
    assert after(State(CONFIG), *messages).communicator(1).broken_by == 1
    assert replay(entries_of(*messages), CONFIG, NOW).communicator(1).broken_by == 1


@pytest.mark.parametrize("loss", [[dead(1)], [m.Left(1, "a")], [m.LinkClosed(1, "a"), m.Joined(device(1, "b"), NOW)]])
def test_broken_communicators_are_written_before_the_loss_of_their_device(loss: list[m.MembershipEvent]) -> None:
    joined = [m.Joined(device(1), NOW), m.Joined(device(2), NOW)]
    before: list[m.MembershipEvent] = [*joined, m.Created((1, 2)), m.Created((2, 1))]
    earlier, last = entries_of(*before), entries_of(*loss, state=after(State(CONFIG), *before))
    assert len(last) == 3
    for length in range(len(last) + 1):
        state = replay([*earlier, *last[:length]], CONFIG, NOW)
        if state.member(1).info != device(1) or not state.member(1).usable:
            assert [one.broken_by for one in state.communicators.values()] == [1, 1]


def test_a_rebuilt_communicator_is_not_broken_after_a_restart() -> None:
    joined = [m.Joined(device(1), NOW), m.Joined(device(2), NOW)]
    messages: list[m.MembershipEvent] = [*joined, m.Created((1, 2)), dead(1), m.Rebuilt(1)]
    one = replay(entries_of(*messages), CONFIG, NOW).communicator(1)
    assert (one.broken_by, one.outcome, one.reason) == (0, OperationOutcome.IN_PROGRESS, "")


@pytest.mark.parametrize("more", [[], [m.Rebuilt(1)], [m.Finished(1, 1, "checksum")]])
def test_a_finalized_communicator_is_finalized_after_a_restart(more: list[m.MembershipEvent]) -> None:
    messages: list[m.MembershipEvent] = [m.Joined(device(1), NOW), m.Created((1,)), m.Finalized(1), *more]
    state = replay(entries_of(*messages), CONFIG, NOW)
    assert state.communicator(1).finalized
    assert replay(snapshot(state), CONFIG, NOW).communicator(1).finalized


# ---- torn and damaged


def test_a_tail_torn_at_any_byte_is_cut_off(path: Path, no_fsync: None) -> None:
    """The file is also opened and replayed: at both ends of each line, and at every eighth byte."""
    whole = b"".join(LINES)
    states = [replay(ENTRIES[:length], CONFIG, NOW) for length in range(len(ENTRIES) + 1)]
    for cut in range(len(LINES[0]), len(whole) + 1):
        left = whole[:cut].count(b"\n") - 1
        assert decode(whole[:cut], path) == ENTRIES[:left]
        if cut % 8 == 0 or b"\n" in whole[max(cut - 2, 0) : cut + 1]:
            path.write_bytes(whole[:cut])
            assert load_state(path) == states[left]


def test_entries_appended_after_a_torn_tail_are_readable(path: Path) -> None:
    path.write_bytes(b"".join(LINES)[:-5])
    with closing(FileJournal(path, CONFIG, NOW)) as journal:
        journal.append(ENTRIES[-1])
    assert load_state(path) == replay(ENTRIES, CONFIG, NOW)


@pytest.mark.parametrize("line", range(1, len(LINES) + 1))
def test_a_flipped_bit_is_reported_with_its_line(path: Path, line: int) -> None:
    """The newest entry too: it was acknowledged, so it must not be dropped as if it were torn."""
    start = len(b"".join(LINES[: line - 1]))
    for offset in range(len(LINES[line - 1])):
        damaged = bytearray(b"".join(LINES))
        damaged[start + offset] ^= 1
        with pytest.raises(FailedPrecondition, match=rf"^journal {path}, line {line}: .*; move the file away"):
            decode(bytes(damaged), path)


@pytest.mark.parametrize("garbage", [b"\n", b"hello\n", b"\xff" * 20 + b"\n", b"00000000 \n", b"00000000 {}\n"])
def test_garbage_before_good_lines_is_damage(path: Path, garbage: bytes) -> None:
    path.write_bytes(garbage + LINES[0])
    with pytest.raises(FailedPrecondition, match="line 1: "):
        FileJournal(path, CONFIG, NOW)
    assert path.read_bytes() == garbage + LINES[0], "the file is unchanged"
    assert os.listdir(path.parent) == ["journal"]


@pytest.mark.parametrize("content", [b"\0" * 4096, LINES[0][:5], b"x"])
def test_a_file_without_a_whole_line_is_damage(path: Path, content: bytes) -> None:
    """A journal begins with a line that was written before any entry was acknowledged."""
    path.write_bytes(content)
    with pytest.raises(FailedPrecondition, match=rf"^journal {path}, line 1: the checksum does not hold"):
        FileJournal(path, CONFIG, NOW)
    assert path.read_bytes() == content


@pytest.mark.parametrize("line", range(len(LINES) - 1))
@pytest.mark.parametrize("change", ["dropped", "repeated", "swapped"])
def test_a_line_that_was_dropped_repeated_or_moved_is_damage(path: Path, line: int, change: str) -> None:
    """Each line alone is whole; it opened as another history."""
    lines = list(LINES)
    match change:
        case "dropped":
            del lines[line]
        case "repeated":
            lines.insert(line, lines[line])
        case "swapped":
            lines[line : line + 2] = reversed(lines[line : line + 2])
    with pytest.raises(FailedPrecondition, match=rf"^journal {path}, line \d+: the checksum does not hold"):
        decode(b"".join(lines), path)


def test_a_journal_of_before_is_opened_and_then_is_a_chain(path: Path) -> None:
    path.write_bytes(b"".join(OLD_LINES))
    assert load_state(path) == replay(ENTRIES, CONFIG, NOW)
    assert path.read_bytes().startswith(encode(HEADER))
    assert load_state(path) == replay(ENTRIES, CONFIG, NOW)


# ---- the file


def test_only_the_owner_can_access_the_file(path: Path) -> None:
    path.write_bytes(LINES[0])
    path.chmod(0o644)
    old = os.umask(0)
    try:
        with closing(FileJournal(path, CONFIG, NOW)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        load_state(path.with_name("another"))
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.with_name("another").stat().st_mode) == 0o600


def test_a_new_journal_has_no_entry_and_its_folder_is_created(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "journal"
    assert load_state(path) == State(CONFIG, last_tick=NOW)
    assert path.read_bytes() == encode(HEADER)
    assert os.listdir(path.parent) == ["journal"]


def test_reopening_does_not_grow_the_file(path: Path) -> None:
    path.write_bytes(b"".join(LINES))
    state = load_state(path)
    once = path.read_bytes()
    assert len(once) < len(b"".join(LINES))
    for _ in range(3):
        assert load_state(path) == state
        assert path.read_bytes() == once


def test_reopening_compacts_a_thousand_entries(path: Path, no_fsync: None) -> None:
    rebuilt = entries_of(*[m.Rebuilt(1)] * 1000, state=after(cluster(1), m.Created((1,))))
    with closing(FileJournal(path, CONFIG, NOW)) as journal:
        for entry in [*entries_of(m.Joined(device(1), NOW), m.Created((1,))), *rebuilt]:
            journal.append(entry)
    assert load_state(path).communicator(1).generation == 1001
    assert path.read_bytes().count(b"\n") == 4  # header, device, communicator, and the last communicator id


def test_append_writes_and_then_syncs_an_entry(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(FileJournal(path, CONFIG, NOW)) as journal:
        synced: list[bytes] = []
        monkeypatch.setattr(os, "fsync", lambda fd: synced.append(path.read_bytes()))
        for entry in ENTRIES[:3]:
            journal.append(entry)
    assert synced == [b"".join(LINES[:length]) for length in (2, 3, 4)]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_crash_while_opening_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    path.write_bytes(b"".join(LINES))
    monkeypatch.setattr(os, call, die)
    with pytest.raises(KeyboardInterrupt):
        FileJournal(path, CONFIG, NOW)
    monkeypatch.undo()
    assert path.read_bytes() == b"".join(LINES)
    assert load_state(path) == replay(ENTRIES, CONFIG, NOW)
    assert os.listdir(path.parent) == ["journal"]


def test_a_journal_that_is_open_is_refused_with_the_process_that_has_it(path: Path) -> None:
    path.write_bytes(b"".join(LINES))
    with closing(FileJournal(path, CONFIG, NOW)) as journal:
        before = path.read_bytes().splitlines(keepends=True)
        with pytest.raises(
            FailedPrecondition, match=rf"^{path}: process {os.getpid()} on .+ has it open; stop that coordinator"
        ):
            FileJournal(path, CONFIG, NOW)
        journal.append(ENTRIES[-1])
        assert path.read_bytes() == b"".join([*before, encode(ENTRIES[-1], checksum_of(before[-1]))])
    assert load_state(path) == replay(ENTRIES, CONFIG, NOW)
    assert os.listdir(path.parent) == ["journal"]


def test_the_lock_of_a_killed_coordinator_is_released(path: Path) -> None:
    """The lock file stays; the kernel has released the lock on it."""
    path.with_name("journal.lock").write_text("process 1 on a machine of the past, with a long name")
    with closing(FileJournal(path, CONFIG, NOW)):
        assert path.with_name("journal.lock").read_text() == f"process {os.getpid()} on {os.uname().nodename}"
    assert os.listdir(path.parent) == ["journal"]


def test_a_journal_that_cannot_be_read_is_not_locked_afterwards(path: Path) -> None:
    path.write_bytes(b"damaged\n")
    with pytest.raises(FailedPrecondition, match="line 1"):
        FileJournal(path, CONFIG, NOW)
    path.unlink()
    assert load_state(path) == State(CONFIG, last_tick=NOW)


def test_opening_writes_through_no_planted_link(path: Path) -> None:
    """Until 0.2.0 the new journal was written to JOURNAL.new, whatever that was."""
    victim = path.with_name("victim")
    victim.write_text("precious")
    path.with_name("journal.new").symlink_to(victim)
    path.write_bytes(b"".join(LINES[:2]))
    assert sorted(load_state(path).members) == [1]
    path.with_name("journal.lock").symlink_to(victim)
    with pytest.raises(FailedPrecondition, match=r"journal\.lock: cannot write: "):
        FileJournal(path, CONFIG, NOW)
    assert victim.read_text() == "precious"


def test_a_partial_journal_of_a_killed_coordinator_is_removed_and_nothing_else(path: Path) -> None:
    others = [".journal.backup.7-0123abcd.part", ".other.7-0123abcd.part"]
    for name in [".journal.7-0123abcd.part", *others]:
        path.with_name(name).write_text("half")
    load_state(path)
    assert sorted(os.listdir(path.parent)) == [*others, "journal"]


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Limit the size of every file, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 10])
def test_an_entry_that_does_not_fit_is_refused_and_the_others_stay_intact(path: Path, room: int) -> None:
    with closing(FileJournal(path, CONFIG, NOW)) as journal:
        journal.append(ENTRIES[0])
        with (
            full_disk(path.stat().st_size + room),
            pytest.raises(ResourceExhausted, match=rf"^journal {path}: cannot write {len(LINES[2])} bytes: "),
        ):
            journal.append(ENTRIES[1])
        assert path.read_bytes() == b"".join(LINES[:2])
        journal.append(ENTRIES[2])
    assert sorted(load_state(path).members) == [1, 3]


def test_an_entry_whose_fsync_fails_is_refused_and_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with closing(FileJournal(path, CONFIG, NOW)) as journal:
        journal.append(ENTRIES[0])
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", fail)
            with pytest.raises(ResourceExhausted, match="Input/output error"):
                journal.append(ENTRIES[1])
        assert path.read_bytes() == b"".join(LINES[:2])
        journal.append(ENTRIES[2])
    assert sorted(load_state(path).members) == [1, 3]
