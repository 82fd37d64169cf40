"""``hoop doctor``: verdicts and remedies of single checks."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from hoop.environment import ARITHMETIC, PROCESSOR
from hoop.resources import Resources
from hoop.runs import doctor
from hoop.runs.doctor import Check, Examination, MachineOptions, Verdict
from hoop.topology import PortRange
from hoop.wire.generated import hoop_pb2 as pb

GIB = 1 << 30


def test_devices_that_do_not_fit_are_a_problem_with_the_arithmetic() -> None:
    memory, shared = doctor._check_memory(MachineOptions(8, GIB), Resources(memory=4 * GIB, shared_memory=16 * GIB))
    assert memory.verdict is Verdict.PROBLEM
    assert memory.found == "8 devices of 1 GiB; 4 GiB available"
    assert memory.remedy.startswith("--devices: 8 of 1 GiB cannot fit on this machine: ")
    assert shared == Check("/dev/shm", Verdict.OK, "16 GiB free")


def test_a_small_dev_shm_is_a_warning_with_the_command_that_enlarges_it() -> None:
    """The default of Docker is 64 MiB."""
    _, shared = doctor._check_memory(MachineOptions(4, GIB), Resources(memory=64 * GIB, shared_memory=64 << 20))
    assert shared.verdict is Verdict.WARNING
    assert shared.found == "64 MiB free; 4 devices of 1 GiB need 4 GiB"
    assert "mount -o remount,size=5G /dev/shm, docker run --shm-size" in shared.remedy


def test_devices_that_run_need_memory_only_to_train() -> None:
    memory, _ = doctor._check_memory(MachineOptions(4, 0), Resources(memory=GIB, shared_memory=0))
    assert memory.verdict is Verdict.PROBLEM, "4 x 256 MiB and the coordinator"
    memory, shared = doctor._check_memory(MachineOptions(2, 0), Resources(memory=GIB, shared_memory=0))
    assert memory.verdict is Verdict.OK
    assert shared.verdict is Verdict.OK, "their arenas are somewhere already"


def test_a_port_in_use_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wanted, other = doctor._check_ports(MachineOptions(port=PortRange(port, port)))
        assert wanted.verdict is Verdict.PROBLEM
        assert wanted.found == f"127.0.0.1, {port}: cannot be listened on"
        assert "ss -ltnp" in wanted.remedy
        assert other == Check("data port", Verdict.OK, "127.0.0.1, any: free")


def test_versions_and_processors_that_differ_are_named_once_a_host() -> None:
    old = {"hoop": "0.1.0", "torch": "2.13.0", PROCESSOR: "old"}
    new = {"hoop": "0.2.0", "torch": "2.13.0", PROCESSOR: "new"}
    places = [("device 1", "a", new), ("device 2", "b", old), ("device 3", "b", old), ("device 4", "a", new)]
    version, processor = doctor._check_equal(places)
    assert version.verdict is Verdict.PROBLEM
    assert version.host == "b"
    assert version.found == "device 2 has Hoop 0.1.0, device 1 on a has Hoop 0.2.0"
    assert version.remedy == "install the same version of Hoop on every machine"
    assert processor.verdict is Verdict.WARNING
    assert processor.found == "device 2 has the processor old, device 1 on a has the processor new"
    assert "--require-same-bits refuses it" in processor.remedy


def test_equal_devices_are_one_line() -> None:
    found = {"hoop": "0.2.0", "torch": "2.13.0"}
    (check,) = doctor._check_equal([("device 1", "a", found), ("device 2", "b", found)])
    assert check == Check("versions", Verdict.OK, "equal: Hoop 0.2.0, PyTorch 2.13.0")
    assert list(doctor._check_equal([])) == []


@pytest.mark.parametrize(("ahead", "error", "verdict"), [(0.9, 0.0, "ok"), (-1.5, 0.0, "warning"), (1.5, 0.6, "ok")])
def test_a_clock_is_compared_with_what_the_call_took(ahead: float, error: float, verdict: str) -> None:
    check = doctor._clock(ahead, error, "its clock", "the coordinator's", "b")
    assert check.verdict == verdict
    assert (check.found == "its clock is 1.5 s behind the coordinator's") == (verdict == "warning")


def host(name: str, **facts: str) -> pb.HostExamination:
    found = Examination((Check("memory", Verdict.OK, "enough"),), {"host": name, **facts})
    return pb.HostExamination(host=name, device_ids=[1], json=found.to_json())


def test_the_checks_of_every_host_are_listed_and_their_data_compared() -> None:
    hosts = [host("a", data="11", **{ARITHMETIC: "x"}), host("b", data="22", **{ARITHMETIC: "y"})]
    checks = list(doctor._check_hosts([*hosts, pb.HostExamination(host="c", failure="it is gone")]))
    by_name = {(one.name, one.host): one for one in checks}
    assert by_name["memory", "a"].verdict is by_name["memory", "b"].verdict is Verdict.OK
    assert by_name["clock", "b"].verdict is Verdict.OK
    assert by_name["processor", "b"].verdict is Verdict.WARNING
    assert by_name["host", "c"] == Check("host", Verdict.PROBLEM, "it is gone", by_name["host", "c"].remedy, "c")
    assert by_name["job and data", ""].found == "the hosts have different data (a: 11, b: 22)"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"checks": [7, {"verdict": "fine"}], "facts": 3}'])
def test_what_a_host_sends_is_checked(text: str) -> None:
    facts, checks = doctor.read_examination(text)
    assert facts == {}
    assert all(one.verdict is Verdict.PROBLEM for one in checks)


def test_a_missing_job_is_a_problem_with_its_error(tmp_path: Path) -> None:
    check, fingerprint = doctor._check_job(MachineOptions(job="nowhere:job", jobs=tmp_path))
    assert (check.verdict, fingerprint) == (Verdict.PROBLEM, "")
    assert f"there is no {tmp_path}/nowhere.py; put your file there" in check.remedy


def test_the_json_form_says_whether_all_is_well() -> None:
    good, bad = Check("a", Verdict.WARNING, "x", "y"), Check("b", Verdict.PROBLEM, "x")
    assert json.loads(Examination((good,)).to_json())["ok"] is True
    found = json.loads(Examination((good, bad)).to_json())
    assert found["ok"] is False
    assert found["checks"][0] == {"name": "a", "verdict": "warning", "found": "x", "remedy": "y", "host": ""}
