"""``hoop doctor --coordinator``: the coordinator runs ``hoop doctor`` on every host, through one device of each.

    client ── ExamineHosts ──▶ coordinator ── Describe ──▶ a device of each host     (1) its clock
                               coordinator ── Examine ───▶ the same device           (2) runs ``hoop doctor --json``

The doctor is a process of its own: it loads PyTorch and a job's data, which must not stay in the device.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path

import grpc

from hoop.errors import DeadlineExceeded, FailedPrecondition, HoopError, InvalidArgument
from hoop.events import wall_clock
from hoop.servers.coordinator import Coordinator
from hoop.texts import printable
from hoop.topology import DeviceInfo
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.service import status_of

DOCTOR_S = 540.0
"""Seconds that the doctor of a host may take: it loads PyTorch and data, on a machine that may be busy."""
DESCRIBE_S = 10.0
MAX_JOB_LENGTH = 500
MAX_OUTPUT_BYTES = 1 << 20


async def run_doctor(job: str, devices: int, jobs: Path) -> str:
    """Runs ``hoop doctor --json`` for this number of devices of this host, and for a job unless its name is empty.

    Returns the JSON object that it prints. ``jobs``: folder with the code of jobs.
    """
    if len(job) > MAX_JOB_LENGTH or not job.isprintable():
        raise InvalidArgument(f"job: {job[:80]!r} has {len(job)} characters; at most {MAX_JOB_LENGTH}, all printable")
    # Their arenas are there already: only the processes grow when they train.
    command = [sys.executable, "-P", "-m", "hoop", "doctor", "--json", f"--devices={devices}", "--memory=0"]
    command += [f"--job={job}", f"--jobs={jobs}"] if job else []
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(DOCTOR_S):
            output, errors = await process.communicate()
    except TimeoutError:
        raise DeadlineExceeded(f"hoop doctor did not end within {DOCTOR_S:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    text = output[:MAX_OUTPUT_BYTES].decode(errors="replace").strip()
    with contextlib.suppress(ValueError):
        if isinstance(json.loads(text), dict):
            return text
    reason = printable(errors.decode(errors="replace").strip()[-500:] or "it printed nothing")
    raise FailedPrecondition(f"hoop doctor ended with code {process.returncode}: {reason}")


async def examine_hosts(coordinator: Coordinator, job: str) -> list[pb.HostExamination]:
    """The result of the doctor, and the clock, of every host that has a usable device."""
    hosts: dict[str, list[DeviceInfo]] = {}
    for member in coordinator.state.members.values():
        if member.usable:
            info = member.info
            hosts.setdefault(info.shared_address.host if info.shared_address else info.host, []).append(info)
    return list(await asyncio.gather(*(_examine(coordinator, devices, job) for devices in hosts.values())))


async def _examine(coordinator: Coordinator, devices: list[DeviceInfo], job: str) -> pb.HostExamination:
    found = pb.HostExamination(host=devices[0].host, device_ids=[one.device_id for one in devices])
    try:
        # Not by ``Coordinator.call``: a host that is slow here is no evidence for the failure detector.
        device = coordinator.device(devices[0].device_id)
        began, clock = time.monotonic(), wall_clock()
        answer = await device.Describe(pb.DescribeRequest(), timeout=DESCRIBE_S)  # (1)
        found.clock_error_s = (time.monotonic() - began) / 2
        found.clock_ahead_s = answer.time - clock - found.clock_error_s
        request = pb.ExamineRequest(job=job, devices=len(devices))
        found.json = (await device.Examine(request, timeout=DOCTOR_S + DESCRIBE_S)).json  # (2)
    except grpc.RpcError as error:
        found.failure = status_of(error)
    except HoopError as error:
        found.failure = printable(str(error), 1000)
    return found
