"""The manifests in examples/kubernetes are valid, and say the same as Hoop about names, numbers and ports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hoop.schedulers.catalog import find_placement
from hoop.schedulers.kubernetes import PORT, WORLD_SIZE

MISSING = "kubernetes-validate is not installed; it is in the extra dev"
validator = pytest.importorskip("kubernetes_validate", reason=MISSING)
yaml = pytest.importorskip("yaml", reason=MISSING)
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
VERSIONS = ("1.31", "1.33")
"""Of the API: successPolicy is in 1.31 and later."""
MANIFESTS = [(path.name, one) for path in sorted(FOLDER.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]
IDS = [f"{name} {one['kind']} {one['metadata']['name']}" for name, one in MANIFESTS]


def named(kind: str, name: str) -> dict[str, Any]:
    return next(one for _, one in MANIFESTS if (one["kind"], one["metadata"]["name"]) == (kind, name))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", [one for _, one in MANIFESTS], ids=IDS)
def test_a_manifest_fits_the_schema(manifest: dict[str, Any], version: str) -> None:
    validator.validate(manifest, version, strict=True)


def test_a_mistake_would_be_found() -> None:
    wrong = {**named("PodDisruptionBudget", "hoop-device"), "spec": {"maxUnavailabe": 1}}
    with pytest.raises(validator.ValidationError, match="maxUnavailabe"):
        validator.validate(wrong, VERSIONS[0], strict=True)


def test_the_pods_of_the_job_meet_at_its_service() -> None:
    job, service = named("Job", "digits"), named("Service", "digits")
    template = job["spec"]["template"]["spec"]
    (container,) = template["containers"]
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    assert int(given[WORLD_SIZE]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert job["spec"]["completionMode"] == "Indexed"
    pod = {"HOSTNAME": "digits-3", "JOB_COMPLETION_INDEX": "3", "KUBERNETES_SERVICE_HOST": "10.96.0.1", **given}
    placement = find_placement(pod)
    assert placement is not None
    assert (placement.rank, placement.world_size) == (3, 4)
    assert str(placement.meeting_point) == f"digits-0.{template['subdomain']}:{PORT}"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["ports"][0]["port"] == PORT


def test_the_devices_of_the_cluster_join_its_coordinator() -> None:
    coordinator, devices = named("StatefulSet", "hoop-coordinator"), named("StatefulSet", "hoop-device")
    (server,) = coordinator["spec"]["template"]["spec"]["containers"]
    (device,) = devices["spec"]["template"]["spec"]["containers"]
    assert device["command"][:4] == ["hoop", "device", "--join", f"hoop-coordinator-0.hoop-coordinator:{PORT}"]
    assert server["command"][server["command"].index("--port") + 1] == str(PORT)
    assert coordinator["spec"]["serviceName"] == named("Service", "hoop-coordinator")["metadata"]["name"]
    assert server["readinessProbe"]["exec"]["command"][:2] == ["hoop", "status"]


@pytest.mark.parametrize("manifest", [one for _, one in MANIFESTS if "template" in one["spec"]])
def test_every_pod_has_the_token_requests_and_shared_memory(manifest: dict[str, Any]) -> None:
    template = manifest["spec"]["template"]["spec"]
    (container,) = template["containers"]
    secrets = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one}
    assert secrets == {"HOOP_TOKEN": {"name": "hoop-token", "key": "token"}}
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    if "coordinator" not in manifest["metadata"]["name"]:
        assert any(one["mountPath"] == "/dev/shm" for one in container["volumeMounts"])


@pytest.mark.parametrize("manifest", [one for _, one in MANIFESTS if "template" in one["spec"]])
def test_the_commands_exist(manifest: dict[str, Any]) -> None:
    import typer

    from hoop.cli.commands import command_line

    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    words = [*container["command"], *container.get("args", [])]
    command: Any = typer.main.get_command(command_line())
    options = {name for option in command.commands[words[1]].params for name in option.opts}
    assert {word for word in words if word.startswith("--")} <= options
