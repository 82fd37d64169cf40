"""A device that ends before the job begins: the run begins with the others, as it would go on without it later."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fault_cluster import running_cluster, undisturbed

from hoop import job_events as ev
from hoop.client.cluster import Cluster
from hoop.job_events import Observed
from hoop.runs import training
from hoop.runs.run_recorder import saved_settings
from hoop.runs.training import Launch, Training
from hoop.topology import Address

LIMIT = ("--set", "max_steps=20")


@pytest.mark.parametrize("moment", ["before devices are chosen", "while the job is started"])
def test_a_run_begins_with_the_devices_that_are_left(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = saved_settings(Path(undisturbed(*LIMIT)["out"]))
    with running_cluster(3, tmp_path) as processes:
        killed = processes.devices[2]

        def kill() -> None:
            if killed.poll() is None:
                processes.kill(killed)
                events = processes.cluster.events(follow=True)
                next(event for event in events if event.kind == "device_dead")

        choose = training.choose_devices

        def choose_and_kill(cluster: Cluster, count: int | None, least: int = 1) -> list[int]:
            """Kills the device before or after it is chosen."""
            if moment == "before devices are chosen":
                kill()
            chosen = choose(cluster, count, least)
            kill()
            return chosen

        monkeypatch.setattr(training, "choose_devices", choose_and_kill)
        run = Training(Launch(settings, devices=3, out=tmp_path / "out"))
        address = Address.parse(processes.address)
        observed: list[Observed] = list(run._follow(address, 3, lambda _: None, None))
        assert killed.returncode == -signal.SIGKILL
    warnings = [one.event.text for one in observed if isinstance(one.event, ev.Warned)]
    assert "3 devices were started, and 1 ended before the job began: it begins with 2" in warnings
    assert isinstance(observed[-1].event, ev.Finished)
    assert observed[-1].event.result["weights_sha256"] == undisturbed(*LIMIT)["weights_sha256"]
