"""Jobs with settings and errors that hold anything: they fail, and disturb neither the cluster nor its commands.

Also after a restart on the journal, and on a journal that an older version wrote.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from descriptor_stub import Stub
from lab_cluster import channel_to, refused

import hoop
from hoop.errors import InvalidArgument
from hoop.wire.generated import hoop_pb2 as pb

if TYPE_CHECKING:
    from background import Running

    Start = Callable[..., Running]
    Run = Callable[..., CompletedProcess[str]]

DRIVER = Path(__file__).with_name("train_driver.py")
JOB = f"{DRIVER}:job"
COORDINATOR = pb.DESCRIPTOR.services_by_name["Coordinator"]
KIB = 1024
HOSTILE = {
    "half a surrogate pair": r'{"optimizer":{"\ud800":1}}',
    "a file name that is not UTF-8": r'{"job":"\udcff\udcfe:job"}',
    "terminal escapes": r'{"\u001b]0;gone\u0007\u001b[31m\u009b2J":1}',
    "a text of 60 KiB": json.dumps({"job": "x" * 60 * KIB}),
}
REFUSED = {
    "one byte too many": (json.dumps({"job": "x" * (64 * KIB - 10)}), r"65537 bytes are more than the 65536"),
    "thirty MiB": ('{"job":"' + "x" * (30 << 20) + '"}', r"3\d{7} bytes are more than"),
    "nested": ("[" * 60_000, "60000 bytes that are not JSON: it is nested too deep"),
    "an object that is nested": ('{"a":' * 12_000, "nested too deep"),
    "no JSON": ("no JSON", "not JSON"),
    "nothing": ("", "not JSON"),
    "a list": ("[1]", "a list, not a JSON object"),
    "a number": ("7", "not a JSON object"),
}


def start_job(address: str, settings: str) -> int:
    """StartJob as any program can call it, without what Hoop's client checks."""
    with channel_to(address, max_send_message_length=64 << 20) as channel:
        request = pb.StartJobRequest(settings=settings, device_ids=[1])
        return int(Stub(channel, COORDINATOR).StartJob(request, timeout=30).job_id)


def is_shown(text: str) -> None:
    """Nothing in it but what a terminal shows."""
    assert all(one.isprintable() or one in "\n\t" for one in text), ascii(text)
    text.encode()


def all_is_well(address: str, run_hoop: Run, failed: list[int]) -> None:
    """Every command that anybody else may use works, and says that these jobs failed."""
    there = ("--coordinator", address)
    plain, told = run_hoop("status", *there), run_hoop("status", *there, "--json")
    assert (plain.returncode, told.returncode) == (0, 0), plain.stderr + told.stderr
    known = {one["id"]: one for one in json.loads(told.stdout)["jobs"]}
    for job in failed:
        assert known[job]["status"] == "failed"
        assert known[job]["reason"]
        is_shown(known[job]["job"] + known[job]["reason"])
    events = run_hoop("events", *there)
    assert events.returncode == 0, events.stderr
    attached = run_hoop("attach", failed[0], *there, within=60)
    assert attached.returncode in (2, 3), attached.stderr
    assert "a bug in Hoop" not in attached.stderr
    for output in (plain, events, attached):
        is_shown(output.stdout + output.stderr)


@pytest.fixture
def restarted(start: Start, run_hoop: Run, tmp_path: Path) -> Callable[[Path], tuple[Any, Any]]:
    """A coordinator on a journal and one device that trains; and the same coordinator again."""

    def begin(journal: Path) -> tuple[Running, Callable[[], Running]]:
        first = start("coordinator", "--journal", journal)
        start("device", "--join", first.address, "--memory", "64MiB", "--jobs", DRIVER.parent).first  # noqa: B018

        def again() -> Running:
            first.kill()
            second = start("coordinator", "--journal", journal, "--port", first.address.rpartition(":")[2])
            assert second.address == first.address
            return second

        return first, again

    return begin


def until_ended(address: str, job: int) -> None:
    with hoop.connect(address) as cluster, pytest.raises(hoop.errors.HoopError) as caught:
        for _ in cluster.job(job).events():
            pass
    is_shown(str(caught.value))
    assert len(str(caught.value).encode()) <= 8192


@pytest.mark.timeout(300)
def test_a_hostile_job_fails_and_harms_nobody(restarted: Any, run_hoop: Run, tmp_path: Path) -> None:
    """One job of each kind; then a restart of the coordinator, and an ordinary training on the same device."""
    coordinator, again = restarted(tmp_path / "journal")
    there = ("--coordinator", coordinator.address)
    jobs = [start_job(coordinator.address, settings) for settings in HOSTILE.values()]
    for job in jobs:
        until_ended(coordinator.address, job)
    all_is_well(coordinator.address, run_hoop, jobs)
    again()
    all_is_well(coordinator.address, run_hoop, jobs)
    trained = run_hoop("train", JOB, *there, "--json", within=120)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "journal").stat().st_size < 400 * KIB


def test_settings_are_refused_before_anything_is_kept(
    restarted: Any, run_hoop: Run, connect: Callable[..., hoop.Cluster], tmp_path: Path
) -> None:
    coordinator, _ = restarted(tmp_path / "journal")
    size = (tmp_path / "journal").stat().st_size
    cluster = connect(coordinator.address)
    for settings, words in REFUSED.values():
        with refused("INVALID_ARGUMENT", words=f"settings: .*{words}") as said:
            start_job(coordinator.address, settings)
        assert len(said[0]) < 300
        with pytest.raises(InvalidArgument, match=f"settings: .*{words}"):
            cluster.start_job(settings, [1])
    assert (tmp_path / "journal").stat().st_size == size, "neither a communicator nor a job was written"
    assert not cluster.status().jobs
    assert run_hoop("status", "--coordinator", coordinator.address).returncode == 0


def test_status_tells_names_and_a_job_its_settings(
    restarted: Any, connect: Callable[..., hoop.Cluster], tmp_path: Path
) -> None:
    """Sixteen jobs of 60 KiB that have ended take a few KiB of a status."""
    coordinator, _ = restarted(tmp_path / "journal")
    cluster = connect(coordinator.address)
    settings = json.dumps({"job": "no.such:job", "strategy": "y" * 60 * KIB})
    jobs = [cluster.start_job(settings, [1]).id for _ in range(16)]
    until_ended(coordinator.address, jobs[-1])
    found = cluster.status()
    assert [(one.name, one.settings) for one in found.jobs] == [("no.such:job", "")] * 16
    assert found.ByteSize() < 16 * 1100 + 4 * KIB
    assert cluster.job_settings(jobs[3]) == settings
    with channel_to(coordinator.address) as channel, refused("NOT_FOUND", words="job_id: 999 is unknown"):
        Stub(channel, COORDINATOR).GetJob(pb.GetJobRequest(job_id=999), timeout=20)


# ---- journals of before


def line(entry: dict[str, Any]) -> bytes:
    """As it was written: without a look at what is in it."""
    body = json.dumps(entry, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def old_job(number: int, settings: str, ended: bool = True, text: str = "") -> bytes:
    error = "InvalidArgument" if text else ""
    fields = {"kind": "job", "id": number, "settings": settings, "devices": [1], "run": "0123456789abcdef"}
    return line({**fields, "ended": ended, "error": error, "text": text})


def old_communicator(number: int, reason: str = "", broken_by: int = 0) -> bytes:
    fields = {"kind": "communicator", "id": number, "members": [1], "generation": 1, "finalized": False}
    return line({**fields, "broken_by": broken_by, "reason": reason})


def test_a_journal_that_holds_such_jobs_is_read(start: Start, run_hoop: Run, tmp_path: Path) -> None:
    """Bytes as version 0.1.0 left them: jobs that run, and jobs that have failed."""
    device = {"device_id": 1, "host": "h\x1b[31m", "pid": 1, "incarnation": "old", "keeps_memory": False}
    places = {name: {"host": "127.0.0.1", "port": 1} for name in ("address", "data_address")}
    device |= {**places, "min_address": 4096, "max_address": 8192, "shared_address": None}
    bad = {2: "[" * 60_000, 3: '{"job":"' + "x" * (30 << 20) + '"}', 4: "[1]", 5: "\x1b"}
    data = line({"kind": "device_joined", "info": device})
    data += old_communicator(1) + old_job(1, '{"optimizer":{"\\ud800":1}}', text="no setting \ud800\x1b[31m" * 9999)
    for number, settings in bad.items():
        data += old_communicator(number) + old_job(number, settings, ended=False)
    data += old_communicator(6) + old_job(6, "[" * 100_000, text="it failed before")
    data += old_communicator(7, reason="device \ud800 is gone\x07", broken_by=1)
    journal = tmp_path / "journal"
    journal.write_bytes(data)
    coordinator = start("coordinator", "--journal", journal)
    all_is_well(coordinator.address, run_hoop, [1, *bad, 6])
    told = json.loads(run_hoop("status", "--coordinator", coordinator.address, "--json").stdout)
    assert [one["id"] for one in told["communicators"]] == [7]
    for text in (told["communicators"][0]["reason"], told["devices"][0]["host"]):
        assert r"\ud800" in text or r"\x1b" in text
        is_shown(text)
    reasons = {one["id"]: one["reason"] for one in told["jobs"]}
    assert "nested too deep" in reasons[2]
    assert "bytes are more than the 65536" in reasons[3]
    assert reasons[6] == "it failed before"
    assert journal.stat().st_size < 40 * KIB, "rewritten as a snapshot, without what is too large"


# ---- other texts that are kept, or told to others


def test_names_are_bounded_where_they_enter(start: Start) -> None:
    coordinator = start("coordinator")
    with channel_to(coordinator.address, max_send_message_length=64 << 20) as channel:
        stub = Stub(channel, COORDINATOR)
        for session in ("x" * (50 << 20), "0123456789abcde", "0123456789ABCDEF"):
            with refused("INVALID_ARGUMENT", words="session: .* is not 16 hexadecimal digits"):
                stub.CreateCommunicator(pb.CreateCommunicatorRequest(devices=1, session=session), timeout=30)
        with refused("INVALID_ARGUMENT", words="resume: 1048576 characters"):
            stub.StartJob(pb.StartJobRequest(settings="{}", device_ids=[1], resume="x" * (1 << 20)), timeout=30)
        plain = {"address": "127.0.0.1:1", "data_address": "127.0.0.1:1", "min_address": 1, "max_address": 2}
        for name, text in {
            "host": "\x1b[31m",
            "incarnation": "a\nb",
            "address": f"[fe80::1%{'x' * 999}]:1",
        }.items():
            device = {**plain, "incarnation": "one", name: text}
            with refused("INVALID_ARGUMENT", words=name) as said:
                stub.Join(pb.JoinRequest(device=device), timeout=30)
            is_shown(said[0])
        assert not stub.GetStatus(pb.GetStatusRequest(), timeout=30).devices


def test_what_a_stranger_says_goodbye_with_does_not_reach_the_terminal(run_hoop: Run) -> None:
    """HTTP/2's GOAWAY carries a text, which gRPC would log as it came."""

    def frame(kind: int, payload: bytes = b"") -> bytes:
        return len(payload).to_bytes(3) + bytes([kind, 0]) + bytes(4) + payload

    goaway = bytes(4) + (11).to_bytes(4) + b"\x1b]0;gone\x07\x1b[31m" + b"x" * 15_000
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        accepted: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(stranger.accept()[0])
                    accepted[-1].sendall(frame(4) + frame(7, goaway))

        thread = threading.Thread(target=serve)
        thread.start()
        where = f"127.0.0.1:{stranger.getsockname()[1]}"
        done = run_hoop("status", "--coordinator", where, "--connect-timeout", "1s", within=60)
        stranger.shutdown(socket.SHUT_RDWR)
        thread.join(20)
        for one in accepted:
            one.close()
    assert accepted
    assert done.returncode == 3
    is_shown(done.stdout + done.stderr)
    assert len(done.stderr) < 3000


def test_what_a_stranger_answers_is_shown_and_not_obeyed(run_hoop: Run) -> None:
    """A server that is none of Hoop's, whose refusal and events hold escapes."""
    import concurrent.futures

    escape = "\x1b]0;gone\x07\x1b[31m"

    def refuse(_: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.NOT_FOUND, escape + "x" * 5000)
        raise AssertionError("abort raises")

    def status(_: bytes, __: grpc.ServicerContext) -> bytes:
        member = pb.Member(device=pb.DeviceDescription(device_id=1, host=escape), state="alive", reason=escape)
        job = pb.Job(id=1, name=escape, status=escape, reason=escape)
        return pb.GetStatusResponse(devices=[member], jobs=[job]).SerializeToString()

    def events(_: bytes, __: grpc.ServicerContext) -> Any:
        yield pb.Event(sequence=1, kind=escape, text=escape, fields={escape: escape}).SerializeToString()

    for table in (
        {"GetStatus": grpc.unary_unary_rpc_method_handler(refuse)},
        {
            "GetStatus": grpc.unary_unary_rpc_method_handler(status),
            "WatchEvents": grpc.unary_stream_rpc_method_handler(events),
        },
    ):
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(COORDINATOR.full_name, table),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            for command in ("status", "events"):
                done = run_hoop(command, "--coordinator", f"127.0.0.1:{port}")
                assert "gone" in done.stdout + done.stderr
                is_shown(done.stdout + done.stderr)
        finally:
            server.stop(None)
