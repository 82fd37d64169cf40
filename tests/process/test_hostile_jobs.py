"""Jobs with hostile settings or error texts fail and disturb neither the cluster nor its commands.

This also holds after a restart on the journal, and for a journal that an older version wrote.
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
from lab_cluster import CALL_S, channel_to, refused

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
HOSTILE_SETTINGS = {
    "half a surrogate pair": r'{"optimizer":{"\ud800":1}}',
    "a file name that is not UTF-8": r'{"job":"\udcff\udcfe:job"}',
    "terminal escapes": r'{"\u001b]0;gone\u0007\u001b[31m\u009b2J":1}',
    "a text of 60 KiB": json.dumps({"job": "x" * 60 * KIB}),
}
INVALID_SETTINGS = {
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
    """Call StartJob without the checks of Hoop's client."""
    with channel_to(address, max_send_message_length=64 << 20) as channel:
        request = pb.StartJobRequest(settings=settings, device_ids=[1])
        return int(Stub(channel, COORDINATOR).StartJob(request, timeout=CALL_S).job_id)


def check_printable(text: str) -> None:
    """``text`` has no control characters and encodes as UTF-8."""
    assert all(character.isprintable() or character in "\n\t" for character in text), ascii(text)
    text.encode()


def check_cluster_works(address: str, run_hoop: Run, failed_jobs: list[int]) -> None:
    """``status``, ``events`` and ``attach`` work and report these jobs as failed."""
    options = ("--coordinator", address)
    text_status, json_status = run_hoop("status", *options), run_hoop("status", *options, "--json")
    assert (text_status.returncode, json_status.returncode) == (0, 0), text_status.stderr + json_status.stderr
    jobs = {job["id"]: job for job in json.loads(json_status.stdout)["jobs"]}
    for job_id in failed_jobs:
        assert jobs[job_id]["status"] == "failed"
        assert jobs[job_id]["reason"]
        check_printable(jobs[job_id]["job"] + jobs[job_id]["reason"])
    events = run_hoop("events", *options)
    assert events.returncode == 0, events.stderr
    attached = run_hoop("attach", failed_jobs[0], *options)
    assert attached.returncode in (2, 3), attached.stderr
    assert "a bug in Hoop" not in attached.stderr
    for output in (text_status, events, attached):
        check_printable(output.stdout + output.stderr)


@pytest.fixture
def restartable(start: Start, run_hoop: Run, tmp_path: Path) -> Callable[[Path], tuple[Any, Any]]:
    """Start a coordinator on a journal and one device; return the coordinator and a function that restarts it."""

    def start_cluster(journal: Path) -> tuple[Running, Callable[[], Running]]:
        first = start("coordinator", "--insecure", "--journal", journal)
        options = ("--join", first.address, "--memory", "64MiB", "--jobs", DRIVER.parent)
        start("device", "--insecure", *options).first_line  # noqa: B018 - it starts

        def restart() -> Running:
            first.kill()
            second = start(
                "coordinator", "--insecure", "--journal", journal, "--port", first.address.rpartition(":")[2]
            )
            assert second.address == first.address
            return second

        return first, restart

    return start_cluster


def wait_until_failed(address: str, job_id: int) -> None:
    """Wait for the job's error and check its text."""
    with hoop.connect(address) as cluster, pytest.raises(hoop.errors.HoopError) as caught:
        for _ in cluster.job(job_id).events():
            pass
    check_printable(str(caught.value))
    assert len(str(caught.value).encode()) <= 8192


@pytest.mark.timeout(1200)
def test_a_hostile_job_fails_without_disturbing_the_cluster(restartable: Any, run_hoop: Run, tmp_path: Path) -> None:
    """One job of each kind, then a restart of the coordinator, then an ordinary training on the same device."""
    coordinator, restart = restartable(tmp_path / "journal")
    options = ("--coordinator", coordinator.address)
    job_ids = [start_job(coordinator.address, settings) for settings in HOSTILE_SETTINGS.values()]
    for job_id in job_ids:
        wait_until_failed(coordinator.address, job_id)
    check_cluster_works(coordinator.address, run_hoop, job_ids)
    restart()
    check_cluster_works(coordinator.address, run_hoop, job_ids)
    trained = run_hoop("train", JOB, *options, "--json", within=400)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "journal").stat().st_size < 400 * KIB


def test_invalid_settings_are_refused_before_the_journal_is_written(
    restartable: Any, run_hoop: Run, connect: Callable[..., hoop.Cluster], tmp_path: Path
) -> None:
    coordinator, _ = restartable(tmp_path / "journal")
    size = (tmp_path / "journal").stat().st_size
    cluster = connect(coordinator.address)
    for settings, words in INVALID_SETTINGS.values():
        with refused("INVALID_ARGUMENT", match=f"settings: .*{words}") as messages:
            start_job(coordinator.address, settings)
        assert len(messages[0]) < 300
        with pytest.raises(InvalidArgument, match=f"settings: .*{words}"):
            cluster.start_job(settings, [1])
    assert (tmp_path / "journal").stat().st_size == size, "a communicator or a job was written to the journal"
    assert not cluster.status().jobs
    assert run_hoop("status", "--coordinator", coordinator.address).returncode == 0


def test_status_holds_job_names_and_get_job_the_settings(
    restartable: Any, connect: Callable[..., hoop.Cluster], tmp_path: Path
) -> None:
    """Sixteen ended jobs with settings of 60 KiB take a few KiB of the status."""
    coordinator, _ = restartable(tmp_path / "journal")
    cluster = connect(coordinator.address)
    settings = json.dumps({"job": "no.such:job", "strategy": "y" * 60 * KIB})
    job_ids = [cluster.start_job(settings, [1]).id for _ in range(16)]
    wait_until_failed(coordinator.address, job_ids[-1])
    status = cluster.status()
    assert [(job.name, job.settings) for job in status.jobs] == [("no.such:job", "")] * 16
    assert status.ByteSize() < 16 * 1100 + 4 * KIB
    assert cluster.job_settings(job_ids[3]) == settings
    with channel_to(coordinator.address) as channel, refused("NOT_FOUND", match="job_id: 999 is unknown"):
        Stub(channel, COORDINATOR).GetJob(pb.GetJobRequest(job_id=999), timeout=CALL_S)


# ---- journals of older versions


def journal_line(entry: dict[str, Any]) -> bytes:
    """A journal line as version 0.1.0 wrote it, without validation."""
    body = json.dumps(entry, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def old_job_line(job_id: int, settings: str, ended: bool = True, text: str = "") -> bytes:
    error = "InvalidArgument" if text else ""
    fields = {"kind": "job", "id": job_id, "settings": settings, "devices": [1], "run": "0123456789abcdef"}
    return journal_line({**fields, "ended": ended, "error": error, "text": text})


def old_communicator_line(communicator_id: int, reason: str = "", broken_by: int = 0) -> bytes:
    fields = {"kind": "communicator", "id": communicator_id, "members": [1], "generation": 1, "finalized": False}
    return journal_line({**fields, "broken_by": broken_by, "reason": reason})


def test_an_old_journal_with_hostile_jobs_is_read(start: Start, run_hoop: Run, tmp_path: Path) -> None:
    """The journal was written by version 0.1.0 and holds running jobs and failed jobs."""
    device = {"device_id": 1, "host": "h\x1b[31m", "pid": 1, "incarnation": "old", "keeps_memory": False}
    addresses = {name: {"host": "127.0.0.1", "port": 1} for name in ("address", "data_address")}
    device |= {**addresses, "min_address": 4096, "max_address": 8192, "shared_address": None}
    invalid = {2: "[" * 60_000, 3: '{"job":"' + "x" * (30 << 20) + '"}', 4: "[1]", 5: "\x1b"}
    data = journal_line({"kind": "device_joined", "info": device})
    data += old_communicator_line(1) + old_job_line(
        1, '{"optimizer":{"\\ud800":1}}', text="no setting \ud800\x1b[31m" * 9999
    )
    for job_id, settings in invalid.items():
        data += old_communicator_line(job_id) + old_job_line(job_id, settings, ended=False)
    data += old_communicator_line(6) + old_job_line(6, "[" * 100_000, text="it failed before")
    data += old_communicator_line(7, reason="device \ud800 is gone\x07", broken_by=1)
    journal = tmp_path / "journal"
    journal.write_bytes(data)
    coordinator = start("coordinator", "--insecure", "--journal", journal)
    check_cluster_works(coordinator.address, run_hoop, [1, *invalid, 6])
    status = json.loads(run_hoop("status", "--coordinator", coordinator.address, "--json").stdout)
    assert [record["id"] for record in status["communicators"]] == [7]
    for text in (status["communicators"][0]["reason"], status["devices"][0]["host"]):
        assert r"\ud800" in text or r"\x1b" in text
        check_printable(text)
    reasons = {record["id"]: record["reason"] for record in status["jobs"]}
    assert "nested too deep" in reasons[2]
    assert "bytes are more than the 65536" in reasons[3]
    assert reasons[6] == "it failed before"
    assert journal.stat().st_size < 40 * KIB, "the journal was not rewritten as a snapshot without the oversized fields"


# ---- other texts that the coordinator stores or a command prints


def test_invalid_names_in_requests_are_refused(start: Start) -> None:
    coordinator = start("coordinator", "--insecure")
    with channel_to(coordinator.address, max_send_message_length=64 << 20) as channel:
        stub = Stub(channel, COORDINATOR)
        for session in ("x" * (50 << 20), "0123456789abcde", "0123456789ABCDEF"):
            with refused("INVALID_ARGUMENT", match="session: .* is not 16 hexadecimal digits"):
                stub.CreateCommunicator(pb.CreateCommunicatorRequest(devices=1, session=session), timeout=CALL_S)
        with refused("INVALID_ARGUMENT", match="resume: 1048576 characters"):
            stub.StartJob(pb.StartJobRequest(settings="{}", device_ids=[1], resume="x" * (1 << 20)), timeout=CALL_S)
        valid = {"address": "127.0.0.1:1", "data_address": "127.0.0.1:1", "min_address": 1, "max_address": 2}
        for name, text in {
            "host": "\x1b[31m",
            "incarnation": "a\nb",
            "address": f"[fe80::1%{'x' * 999}]:1",
        }.items():
            device = {**valid, "incarnation": "one", name: text}
            with refused("INVALID_ARGUMENT", match=name) as messages:
                stub.Join(pb.JoinRequest(device=device), timeout=CALL_S)
            check_printable(messages[0])
        assert not stub.GetStatus(pb.GetStatusRequest(), timeout=CALL_S).devices


def test_the_text_of_a_goaway_frame_does_not_reach_the_terminal(run_hoop: Run) -> None:
    """HTTP/2's GOAWAY frame carries a text, which gRPC would log unchanged."""

    def frame(kind: int, payload: bytes = b"") -> bytes:
        return len(payload).to_bytes(3) + bytes([kind, 0]) + bytes(4) + payload

    goaway = bytes(4) + (11).to_bytes(4) + b"\x1b]0;gone\x07\x1b[31m" + b"x" * 15_000
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(listener.accept()[0])
                    accepted[-1].sendall(frame(4) + frame(7, goaway))

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        done = run_hoop("status", "--coordinator", address, "--connect-timeout", "1s")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(CALL_S)
        for connection in accepted:
            connection.close()
    assert accepted
    assert done.returncode == 3
    check_printable(done.stdout + done.stderr)
    assert len(done.stderr) < 3000


def test_escape_sequences_from_another_server_do_not_reach_the_terminal(run_hoop: Run) -> None:
    """The server is not Hoop's; its errors, status and events hold escape sequences."""
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

    for handlers in (
        {"GetStatus": grpc.unary_unary_rpc_method_handler(refuse)},
        {
            "GetStatus": grpc.unary_unary_rpc_method_handler(status),
            "WatchEvents": grpc.unary_stream_rpc_method_handler(events),
        },
    ):
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(COORDINATOR.full_name, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            for command in ("status", "events"):
                done = run_hoop(command, "--coordinator", f"127.0.0.1:{port}")
                assert "gone" in done.stdout + done.stderr
                check_printable(done.stdout + done.stderr)
        finally:
            server.stop(None)
