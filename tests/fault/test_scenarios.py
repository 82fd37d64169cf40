"""``hoop chaos --runs``: short trainings under a fault each, drawn from a seed: their verdicts, and what is left."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import preloaded
import pytest
from typer.testing import CliRunner

from hoop.cli.commands import command_line
from hoop.errors import InvalidArgument
from hoop.lab.chaos import leaks, network, scenario_run, small_disk
from hoop.lab.chaos.campaign import Campaign, CampaignConfig, summary, tables
from hoop.lab.chaos.leaks import MAX_MEMORY_GROWTH, Footprint, ManyJobs, Usage, usage
from hoop.lab.chaos.scenario import FAULTS, STRATEGIES, Scenario, check_names, draw_scenario
from hoop.lab.chaos.scenario_faults import ScenarioFaults
from hoop.lab.chaos.scenario_run import FAILED, NOT_RUN, RESUMED, SAME, Outcome, Reference, run_scenario

TIMEOUT_S = 1000.0
HOOP = [sys.executable, "-m", "hoop"]


def scenario(fault: str = "kill", strategy: str = "data", **values: float) -> Scenario:
    fractions = {"moment": 0.5, "victim": 0.5, "variant": 0.5, "arena_draw": 0.5, **values}
    return Scenario(7, strategy, fault, 4, 100, **fractions)


# ---- what is drawn


def test_a_seed_determines_the_scenario_and_a_row_of_seeds_covers_every_fault() -> None:
    drawn = [draw_scenario(seed, 4, 200) for seed in range(20 * len(FAULTS))]
    assert drawn == [draw_scenario(seed, 4, 200) for seed in range(20 * len(FAULTS))]
    assert Counter(one.fault for one in drawn) == dict.fromkeys(FAULTS, 20)
    assert {one.strategy for one in drawn} == set(STRATEGIES)
    assert {one.victims[0] for one in drawn} == {one.victims[1] for one in drawn} == {1, 2, 3, 4}
    assert all(one.victims[0] != one.victims[1] for one in drawn)
    assert all(2 <= one.step <= 190 for one in drawn)
    assert {one.arenas for one in drawn} == {False, True}


@pytest.mark.parametrize("seed", range(40))
def test_the_command_of_an_outcome_repeats_its_scenario(seed: int) -> None:
    drawn = draw_scenario(seed, 3, 120)
    words = shlex.split(drawn.command())
    options = dict(zip(words[2::2], words[3::2], strict=True))
    again = draw_scenario(
        int(options["--seed"]),
        int(options["--devices"]),
        int(options["--steps"]),
        [options["--faults"]],
        [options["--strategies"]],
    )
    assert (words[:2], options["--runs"]) == (["hoop", "chaos"], "1")
    assert again == drawn


def test_every_fault_can_be_injected() -> None:
    scenarios = set(FAULTS) - {"many-jobs"}
    assert not [name for name in scenarios if not hasattr(ScenarioFaults, "_" + name.replace("-", "_"))]


def test_state_may_be_lost_only_where_no_copy_can_be_left() -> None:
    without, with_files = {"arena_draw": 0.9}, {"arena_draw": 0.1}
    assert scenario("kill-two", "pipeline:1f1b", **without).may_lose_state
    assert not scenario("kill-two", "pipeline:1f1b", **with_files).may_lose_state
    assert not scenario("kill-two", "data", **without).may_lose_state
    assert scenario("kill-all", "ring", **without).may_lose_state
    assert not scenario("kill-all", "ring", **with_files).may_lose_state
    assert scenario("kill-all", "data", **with_files).may_lose_state, "within an update"
    may_lose = {fault for fault in FAULTS if scenario(fault, "ring").may_lose_state}
    assert {fault for fault in may_lose if "kill-" not in fault} <= {"arena-deleted"}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="--faults: flood: unknown; there are kill, stop"):
        check_names(["flood"], [])
    with pytest.raises(InvalidArgument, match="--strategies: ps:asp: its weights depend on timing"):
        check_names([], ["ps:asp"])
    invoked = CliRunner().invoke(command_line(), ["chaos", "--faults", "kill"])
    assert "kinds of faults need --runs N" in str(invoked.exception)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--runs", "1", "--kinds", "kill"], "--kinds: it has no effect with --runs; use --faults"),
        (["--runs", "1", "-s", "ring"], "--strategy: it has no effect with --runs; use --strategies"),
        (["--runs", "1", "--pace", "8"], "--pace: it has no effect with --runs"),
        (["--keep", "failed"], "--keep: it has no effect without --runs"),
    ],
)
def test_options_without_effect_are_refused(options: list[str], text: str) -> None:
    assert str(CliRunner().invoke(command_line(), ["chaos", *options]).exception) == text


# ---- what is reported


def test_a_fault_that_cannot_be_injected_here_is_not_run_and_does_not_count_as_passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(network, "unavailable_reason", lambda: "namespaces need root")
    monkeypatch.setattr(small_disk, "unavailable_reason", lambda: "a small disk needs root to mount one")
    reference = Reference(tmp_path, "", 100)
    found = Campaign(CampaignConfig(3))
    for name in ("packet-loss", "disk-full"):
        found.outcomes.append(run_scenario(scenario(name), reference))
    assert [one.verdict for one in found.outcomes] == [NOT_RUN, NOT_RUN]
    assert "0 disturbed runs" in summary(found)
    assert "not run: packet-loss: namespaces need root" in summary(found)
    assert "not run: disk-full: a small disk needs root" in summary(found)
    assert found.count(SAME) == 0


def test_the_summary_counts_verdicts_and_has_the_command_of_each_failure() -> None:
    lost = scenario("kill-all", "ring", arena_draw=0.9)
    found = Campaign(
        CampaignConfig(3),
        [
            Outcome(scenario(), SAME, "device 3 killed at step 46", load=2.0),
            Outcome(lost, RESUMED, "all devices killed at step 46", load=9.0),
            Outcome(scenario("stop"), FAILED, reason="hoop train ended with code 3"),
        ],
    )
    by_fault, by_strategy = tables(found)
    assert [row[:2] for row in by_fault.rows] == [["kill", 1], ["stop", 1], ["kill-all", 1]]
    assert [row[:4] for row in by_strategy.rows] == [["data", 2, 1, 0], ["ring", 1, 0, 1]]
    text = summary(found)
    assert text.startswith("3 disturbed runs, load average 0.0 to 9.0: 1 with the same weights, 1 with")
    assert f"failed: hoop train ended with code 3\n  again: {scenario('stop').command()}" in text
    assert json.loads(json.dumps(found.as_dict()))["verdicts"] == {
        "same": 1,
        "resumed": 1,
        "refused": 0,
        "missed": 0,
        "not run": 0,
        "failed": 1,
    }


def test_growth_is_measured_after_the_warm_up() -> None:
    found = ManyJobs(["w"] * 30)
    for number in range(30):
        found.note("coordinator", Usage(min(number, 9) * MAX_MEMORY_GROWTH, 10 + min(number, 9), 5))
        found.note("device 1", Usage(0, 10 + number, 5))
    assert found.growth("coordinator") == (0, 0, 0)
    assert found.problem() == "the device 1 grew by 20 descriptors from job 10 to job 30, above 4"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_usage_counts_descriptors() -> None:
    before = usage(os.getpid())
    with socket.socket():
        assert usage(os.getpid()).descriptors == before.descriptors + 1
    assert before.memory > 1 << 20
    assert before.threads >= 1


# ---- what is left behind

LISTENER = """
import socket, sys
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux")
def test_processes_ports_and_files_of_the_run_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, shared = tmp_path / "tmp", tmp_path / "shm"
    temporary.mkdir()
    shared.mkdir()
    monkeypatch.setattr(leaks, "SHARED_MEMORY", shared)
    footprint = Footprint("a-test")
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **footprint.environment},
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        footprint.observe({4711})
        (shared / f"sem.hoop-{process.pid:08x}-1").touch()
        (shared / "hoop-4711-x.arena").touch()
        (shared / "hoop-4712-of-another-run.arena").touch()
        (temporary / "x").touch()
        found = footprint.leftovers(temporary, grace_s=0)
        assert any(one.startswith(f"process {process.pid} (") for one in found)
        assert f"port {port}" in found
        assert sorted(one for one in found if one.startswith("file")) == sorted(
            f"file {path}"
            for path in (shared / "hoop-4711-x.arena", shared / f"sem.hoop-{process.pid:08x}-1", temporary / "x")
        )
        process.communicate("")
    for path in (*shared.iterdir(), *temporary.iterdir()):
        path.unlink()
    assert footprint.leftovers(temporary) == []


@pytest.mark.skipif(bool(small_disk.unavailable_reason()), reason=small_disk.unavailable_reason())
def test_a_small_disk_can_be_filled_and_freed(tmp_path: Path) -> None:
    with small_disk.small_disk(tmp_path, 1 << 20) as disk:
        assert disk.fill() == 1 << 20
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "more").write_bytes(b"x" * 4096)
        disk.free()
        (tmp_path / "more").write_bytes(b"x" * 4096)
    assert list(tmp_path.iterdir()) == []


DATAGRAMS = 1000
SENDER = f"""
import contextlib, socket, sys
with socket.socket(type=socket.SOCK_DGRAM) as sender:
    for _ in range({DATAGRAMS}):
        with contextlib.suppress(PermissionError):  # of a packet that is dropped as it leaves
            sender.sendto(b"x", (sys.argv[1], 9))
"""


@pytest.mark.skipif(bool(network.unavailable_reason()), reason=network.unavailable_reason())
def test_lost_packets_are_counted_and_the_network_is_removed() -> None:
    with network.private_network(2) as private:
        name = f"{network.PREFIX}{os.getpid()}"
        private.lose(1, 20)
        subprocess.run([*private.exec_prefix(1), sys.executable, "-c", SENDER, private.address(2)], check=True)
        assert 1 <= private.dropped(1) < DATAGRAMS
        private.heal(1)
        assert private.dropped(1) == 0
        assert Path(f"/run/netns/{name}-1").exists()
    assert not list(Path("/run/netns").glob(f"{name}-*"))
    assert not Path(f"/sys/class/net/{name}").exists()


# ---- whole runs


def chaos(temporary: Path, *options: str) -> dict[str, object]:
    """Runs the command as where no session manager has set XDG_RUNTIME_DIR: tokens are in the folder ``temporary``."""
    environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    environment["TMPDIR"] = str(temporary)
    run = preloaded.run(
        [*HOOP, "chaos", *options, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, object] = json.loads(run.stdout)
    return found


def check(found: dict[str, object], runs: int) -> None:
    """Every run fired its fault and kept the weights, or says why it could not run here."""
    outcomes = found["outcomes"]
    assert isinstance(outcomes, list)
    assert len(outcomes) == runs
    for one in outcomes:
        assert one["verdict"] in (SAME, RESUMED) if one["fired"] else one["verdict"] in ("missed", NOT_RUN), one
        assert one["leftovers"] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_disturbed_runs_end_with_the_same_weights(tmp_path: Path) -> None:
    """The short mode: a fault of one process, and of two at once."""
    options = "--runs", "2", "--seed", "4", "--devices", "2", "--steps", "40", "--strategies", "pipeline:1f1b"
    found = chaos(tmp_path, *options, "--faults", "kill,coordinator-and-device")
    check(found, 2)
    assert found["verdicts"] == {**dict.fromkeys(scenario_run.VERDICTS, 0), SAME: 2}


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault(fault: str, tmp_path: Path) -> None:
    check(chaos(tmp_path, "--runs", "2", "--devices", "3", "--steps", "120", "--faults", fault), 2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(network.unavailable_reason()), reason=network.unavailable_reason())
def test_a_signal_removes_processes_and_network() -> None:
    """A fixture of tests/conftest.py checks for processes and files left behind."""
    options = ["--runs", "1", "--devices", "2", "--steps", "5000", "--faults", "packet-loss"]
    with subprocess.Popen([*HOOP, "chaos", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        name, deadline = f"{network.PREFIX}{run.pid}", time.monotonic() + TIMEOUT_S
        while not Path(f"/sys/class/net/{name}-3").exists():
            assert run.poll() is None
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        run.send_signal(signal.SIGTERM)
        assert run.wait(TIMEOUT_S) == 143
    assert not list(Path("/run/netns").glob(f"{name}-*"))
    assert not Path(f"/sys/class/net/{name}").exists()
