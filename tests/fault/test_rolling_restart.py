"""All devices of a job are replaced one after the other; the weights equal those of an undisturbed run.

Each replacement is started before a device goes: by SIGTERM and by ``hoop drain`` while the replacement may still be
loading the job, by SIGKILL when it has a rank.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fault_cluster import (
    JOB,
    TIMEOUT_S,
    ClusterProcesses,
    all_events,
    result_of,
    running_cluster,
    undisturbed,
    wait_for_job,
    wait_for_step,
)
from reported_rows import check_same

from hoop import job_events as ev
from hoop.client.cluster import DrainProgress
from hoop.errors import DeadlineExceeded

LONG = ["--set", "epochs=1000", "--set", "slowdown=[30, 30, 30, 30, 30]"]
"""The test stops the job. Slow steps keep the number of compared steps small."""


class Roller:
    """Replaces the devices of a job, always the oldest one."""

    def __init__(self, processes: ClusterProcesses, job: int) -> None:
        self._processes, self._job = processes, job
        self.devices = dict(enumerate(processes.devices, 1))

    def start_replacement(self) -> int:
        """Returns when the new device is a member of the cluster; it begins to load the job then."""
        number = max(self.devices) + 1
        process = self.devices[number] = self._processes.start_device("--id", str(number))
        assert process.stdout is not None, "a pipe"
        assert process.stdout.readline().startswith(f"device {number} ")
        return number

    def take_oldest(self) -> tuple[int, subprocess.Popen[str]]:
        number = min(self.devices)
        return number, self.devices.pop(number)

    def wait_for_ranks(self, present: int, absent: int = 0) -> None:
        """Waits until the ranks run steps with one device and without the other."""
        generation = 0
        for observed in self._processes.cluster.job(self._job).events():
            match observed.event:
                case ev.Reassigned() as event:
                    generation = event.generation if present in event.devices and absent not in event.devices else 0
                case ev.Resized() | ev.Recovered() as event if event.generation == generation:
                    return
        raise AssertionError(f"the job was over before device {present} had a rank and device {absent} had none")

    def by_sigterm(self) -> None:
        new, (old, process) = self.start_replacement(), self.take_oldest()
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
        self.wait_for_ranks(new, old)

    def by_sigkill(self) -> None:
        new, (old, process) = self.start_replacement(), self.take_oldest()
        self.wait_for_ranks(new)
        process.kill()
        self.wait_for_ranks(new, old)

    def by_drain(self) -> None:
        new, (old, process) = self.start_replacement(), self.take_oldest()
        drain = self._processes.start("drain", str(old), "--coordinator", self._processes.address)
        output, _ = drain.communicate(timeout=TIMEOUT_S)
        assert (drain.returncode, output) == (0, f"device {old} has left\n")
        assert process.wait(TIMEOUT_S) == 0
        self.wait_for_ranks(new, old)


SIGNALS = (Roller.by_sigterm, Roller.by_sigkill)
DRAIN = (Roller.by_drain,)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("strategy", "devices", "ways"),
    [
        pytest.param("pipeline", 2, SIGNALS[:1], id="pipeline, by SIGTERM", marks=pytest.mark.slow),
        pytest.param("pipeline", 2, SIGNALS[1:] + DRAIN, id="pipeline", marks=pytest.mark.slow),
        pytest.param("data", 2, SIGNALS + DRAIN, id="data", marks=pytest.mark.slow),
        pytest.param("ring", 2, SIGNALS + DRAIN, id="ring", marks=pytest.mark.slow),
        pytest.param("ps", 2, SIGNALS + DRAIN, id="ps", marks=pytest.mark.slow),
        pytest.param("hybrid:replicas=2", 4, SIGNALS + DRAIN, id="hybrid", marks=pytest.mark.slow),
    ],
)
def test_replacing_all_devices_does_not_change_the_weights(
    tmp_path: Path, strategy: str, devices: int, ways: Sequence[Callable[[Roller], None]]
) -> None:
    """All devices are replaced once in each way."""
    with running_cluster(devices, tmp_path) as processes:
        out = tmp_path / "out"
        options = (*JOB, *LONG, "--strategy", strategy, "--coordinator", processes.address, "--out", str(out))
        run = processes.start("train", *options, "--json")
        job = wait_for_job(processes.cluster)
        wait_for_step(processes.cluster, job, 1)
        roller = Roller(processes, job)
        killed = set()
        for replace in ways:
            killed |= set(roller.devices) if replace is Roller.by_sigkill else set()
            for _ in range(devices):
                replace(roller)
        processes.cluster.job(job).stop()
        result = result_of(run, out)
        events = all_events(processes.cluster, job)
    check_same(result, undisturbed("--set", "epochs=1000", "--set", f"max_steps={result['steps']}"))
    lost = {event.device for event in events if isinstance(event, ev.DeviceLost)}
    assert lost >= killed
    assert set(result["device_ids"]) <= set(roller.devices)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_only_device_of_a_job_is_kept_until_another_has_taken_over(tmp_path: Path) -> None:
    """Without a replacement the drain fails, Ctrl-C cancels it; the job goes on both times, and then on device 2."""
    with running_cluster(1, tmp_path) as processes:
        out, cluster = tmp_path / "out", processes.cluster
        options = (*JOB, *LONG, "--coordinator", processes.address, "--out", str(out))
        run = processes.start("train", *options, "--json")
        job = wait_for_job(cluster)
        wait_for_step(cluster, job, 1)
        with pytest.raises(DeadlineExceeded, match=r"device 1 was not drained, .* job 1 has no other device"):
            cluster.drain(1, timeout=0.0)
        stages: list[str] = []

        def interrupt(progress: DrainProgress) -> None:
            stages.append(progress.stage)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            cluster.drain(1, progress=interrupt)
        assert stages == ["waiting"]
        kept = (event for event in cluster.events(follow=True) if event.kind == "device_kept")
        assert [next(kept).fields["device"] for _ in range(2)] == ["1", "1"]
        roller = Roller(processes, job)
        roller.by_drain()
        cluster.job(job).stop()
        result = result_of(run, out)
    check_same(result, undisturbed("--set", "epochs=1000", "--set", f"max_steps={result['steps']}"))
    assert result["device_ids"] == [2]
