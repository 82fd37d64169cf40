"""``hoop train``: trains a job on devices, with progress and a summary."""

from __future__ import annotations

import contextlib
import json as json_module
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hoop import job_events as ev
from hoop import torch_versions
from hoop.cli import options
from hoop.cli.output import echo
from hoop.cli.running import ENDING, not_ignored
from hoop.config import parse_duration, parse_size
from hoop.errors import FailedPrecondition, HoopError, InvalidArgument
from hoop.membership.replication import check_replicas
from hoop.resources import TRAINING, Request, admit
from hoop.schedulers.catalog import NAMES, RAY, find_placement
from hoop.simulate.cost_model import read_costs
from hoop.strategies.catalog import parse
from hoop.topology import Address, Addresses, DeviceRange, PortRange

if TYPE_CHECKING:
    from hoop.cli.run_dashboard import RunDashboard
    from hoop.cli.training_view import PlainView
    from hoop.engine.settings import Settings
    from hoop.launch.ray_cluster import Ray
    from hoop.runs.training import Launch
    from hoop.schedulers.base import Placement
    from hoop.wire.auth import Credentials

SCHEDULERS = "Schedulers"


def train(
    job: Annotated[
        str | None, typer.Argument(help="A recipe (--list), or your own job: file.py:name or package.module:name.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            "-n",
            metavar="N|N:MOST",
            help="How many devices. 4:16: begin when 4 are there, and take in more as they come, up to 16.",
            show_default="one a GPU or core, or all",
        ),
    ] = None,
    min_devices: Annotated[
        int | None,
        typer.Option(
            "--min",
            metavar="N",
            min=1,
            help="Wait for devices when fewer than this are left, in place of going on.",
            show_default="1",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            "-s",
            help="data, ps (bsp, asp, ssp), ring (sync, async), pipeline (1f1b, gpipe, interleaved, zero-bubble) or "
            "hybrid (replicas); e.g. ps:asp, pipeline:gpipe, hybrid:replicas=2",
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(metavar="N", min=0, help="Passes over the data.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Samples an update, over all devices.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw.")] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Of weights, order, dropout, augmentation.")
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Parts of a batch; the result depends on it, not on the number of devices."
        ),
    ] = None,
    replicate: Annotated[
        bool | None,
        typer.Option(
            "--replicate/--no-replicate",
            help="Replicate each device's part of the model on another device, to survive its loss.",
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(metavar="N", help=options.REPLICAS_HELP, show_default="1"),
    ] = None,
    require_same_bits: Annotated[
        bool | None,
        typer.Option(
            "--require-same-bits", help="Refuse devices whose processors round differently, in place of a warning."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting, name=value; e.g. momentum=0.9. All are in docs/training.md"),
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda (devices share the GPUs there are), or auto: cuda if every device has it.",
            show_default="auto",
        ),
    ] = None,
    memory: options.Memory = "256MiB",
    threads_per_device: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Cores a device computes on.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep config, metrics, checkpoints, trace and plots in this folder.")
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Checkpoints that stay in --out, the newest.", show_default="3"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out that is whole, to the bit.")
    ] = False,
    auto_resume: Annotated[
        bool,
        typer.Option(
            "--auto-resume",
            help="As --resume if --out has a checkpoint, else begin: for a command that a scheduler runs again.",
        ),
    ] = False,
    max_restarts: options.MaxRestarts = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            help="Predict a step from what hoop calibrate wrote.", show_default="from a profile before the first step"
        ),
    ] = None,
    coordinator: Annotated[
        str | None, typer.Option("--coordinator", "-c", help="Train on the cluster at host:port instead of here.")
    ] = None,
    token_file: options.TokenFile = None,
    tls: options.Tls = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="With --coordinator: start it, print its number and go; see hoop attach.")
    ] = False,
    address_file: options.AddressFile = None,
    dashboard: Annotated[
        int | None,
        typer.Option(metavar="[PORT]", help="Show the run live in the browser, on loopback; 8787 without a port."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"What starts the processes of this run: {', '.join(NAMES)} (docs/clusters.md).",
            show_default="found in the environment",
            rich_help_panel=SCHEDULERS,
        ),
    ] = None,
    meet: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            envvar="HOOP_MEET",
            help="Where the ranks meet: rank 0's host, and a free port there.",
            show_default="from the scheduler",
            rich_help_panel=SCHEDULERS,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=65535,
            help="The port of the meeting point; the same in all ranks.",
            show_default="from the scheduler's number of the job",
            rich_help_panel=SCHEDULERS,
        ),
    ] = None,
    meet_timeout: Annotated[
        str,
        typer.Option(
            help="How long the ranks wait for each other, and --devices 4:16 for the first 4.",
            rich_help_panel=SCHEDULERS,
        ),
    ] = "300s",
    device_ports: Annotated[
        str | None,
        typer.Option(
            metavar="LOW-HIGH",
            help="Ports on which the ranks of a host listen, for calls and data links; 2 for each rank.",
            show_default="any free ones",
            rich_help_panel=SCHEDULERS,
        ),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Network interface whose address the ranks listen on, e.g. eth1.",
            show_default="the one towards rank 0",
            rich_help_panel=SCHEDULERS,
        ),
    ] = None,
    ray_address: options.RayAddress = None,
    ray_cpus: options.RayCpus = None,
    ray_gpus: options.RayGpus = None,
    ray_placement: options.RayPlacement = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="What is to go wrong where, e.g. kill@rank=2,step=7,instruction=reduce (docs/chaos.md).",
            rich_help_panel="Testing",
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
    json: options.Json = False,
) -> None:
    """Train a model on several devices.

    [bold]hoop train mnist[/bold] needs nothing but what is installed. The trained weights do not depend on
    how many devices there are. Ctrl-C stops after a step and keeps a checkpoint in --out; again, at once. On a cluster
    (--coordinator) a job goes on if this command is killed or its terminal closed: see [bold]hoop attach[/bold].
    Started by srun, mpirun, torchrun or Kubernetes, each process is one device of the run, and rank 0 prints. With
    [bold]--on ray[/bold] the devices are actors of a Ray cluster.
    """
    started = time.monotonic()
    from hoop.cli.training_view import PlainView, View, show_recipes
    from hoop.wire.auth import find_credentials
    from hoop.wire.roles import Role

    # Before PyTorch is loaded: a device must own its cores, and devices are forked from this process.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if list_:
        show_recipes(json)
        return
    if auto_resume:
        resume = _can_resume(out)
    if job is None and not (resume and out is not None):
        raise InvalidArgument("job: none given; try: hoop train mnist, or hoop train --list")
    given = {
        "strategy": strategy,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "optimizer": optimizer,
        "seed": seed,
        "shards": shards,
        "keep": keep,
        "accelerator": accelerator,
        "replicate": replicate,
        "replicas": replicas,
        "threads_per_device": threads_per_device,
        "min_devices": min_devices,
        "require_same_bits": require_same_bits or None,
        "faults": ";".join(fault) if fault else None,
    }
    changes = {key: value for key, value in given.items() if value is not None} | _settings(set_ or [])
    wanted = DeviceRange.parse(devices, "--devices") if devices is not None else None
    if wanted is not None and (wanted.most or "max_devices" not in changes):
        changes["max_devices"] = wanted.most
    size = parse_size(memory, "--memory")
    priced = read_costs(costs) if costs else None
    if strategy is not None:
        parse(strategy)
    there = Addresses.parse(coordinator, "--coordinator") if coordinator else None
    placement = _placement(on, meet, port, wanted, there)
    ray = _ray(on, wanted, meet_timeout, ray_address, ray_cpus, ray_gpus, ray_placement)
    if max_restarts is not None:
        from hoop.runs.training import check_restarts

        check_restarts(max_restarts, there or placement or ray)
    if there is None and ((token_file and placement is None) or tls):
        raise InvalidArgument("--token-file, --tls: for a cluster that is up, with --coordinator")
    _check_detach(detach, there, out, resume)
    page = _dashboard(dashboard, address_file, detach or ray is not None, token_file, tls)
    if page is not None:
        address_file = page.address_file
    listening = _listening(placement, interface, device_ports)
    first, timeout_s = wanted.first if wanted else None, parse_duration(meet_timeout, "--meet-timeout")
    if placement is not None:
        from hoop.runs.meeting import rank_credentials

        first = wanted.first if wanted else placement.world_size
        credentials = rank_credentials(placement, token_file)
        if placement.local_rank == 0:
            admit(Request(placement.local_world_size, size, TRAINING, options=("processes on this host", "--memory")))
        if placement.rank:
            raise typer.Exit(_run_rank(placement, job, changes, listening, size, credentials, timeout_s))
    elif there is None and ray is None and first is not None:
        admit(Request(first, size, options=("--devices", "--memory")))
    view = PlainView() if json else View()
    # What a user's own code prints goes to standard error: standard output holds the result and nothing else.
    with view, contextlib.redirect_stdout(sys.stderr):
        view.say("loading PyTorch and the data …")
        here = there is None and ray is None
        launch = _launch(job, changes, first, size, out, resume, there, address_file, auto_resume, load=here)
        launch = replace(launch, costs=priced, meet_timeout_s=timeout_s, max_restarts=max_restarts)
        if launch.device_reason:
            admit(Request(launch.devices or 1, size, options=("--devices", "--memory")))
            several = "s" * (launch.devices != 1)
            view.say(f"{launch.devices} device{several}: {launch.device_reason}; --devices sets another number")
        if there is not None:
            launch = replace(launch, credentials=find_credentials(Role.CLIENT, token_file=token_file, tls=tls))
        if placement is not None:
            launch = replace(launch, credentials=credentials, placement=placement)
            launch = replace(launch, device_host=listening[0], device_ports=listening[1])
            view.say(f"{placement}: the ranks meet at {placement.meeting_point} …")
        if ray is not None:
            from hoop.runs.device_count import DEFAULT_DEVICES

            launch = replace(launch, ray=ray.with_range(DeviceRange(launch.devices or DEFAULT_DEVICES)))
        if detach:
            _detach(launch, json, token_file, tls, view)
            return
        result, number = _follow(launch, view, started, page)
    if json:
        typer.echo(json_module.dumps(result))
    else:
        view.summary(result, out)
    if number:
        raise typer.Exit(128 + number)
    if out is not None and result["checkpoint"] is None:
        raise FailedPrecondition(f"--out: the trained weights are not kept in {out}; what is wrong is said above")


def _can_resume(out: Path | None) -> bool:
    """Whether ``--auto-resume`` goes on with a run, or begins one."""
    if out is None:
        raise InvalidArgument("--auto-resume: it needs --out, the folder of the run to go on with")
    return any((out / "checkpoints").glob("*.safetensors"))


def _placement(
    on: str | None, meet: str | None, port: int | None, devices: DeviceRange | None, there: Addresses | None
) -> Placement | None:
    """The place of this process in a run that a scheduler started; None: it is a run of its own, or a client."""
    if there is not None:
        if on is not None:
            raise InvalidArgument(
                "--on: with --coordinator the devices are those of that cluster; leave out one of them"
            )
        return None
    placement = find_placement(os.environ, on, Address.parse(meet, "--meet") if meet else None, port)
    if placement is None or devices is None:
        return placement
    size = placement.world_size
    if devices.first > size or (devices.most or devices.first) < size:
        raise InvalidArgument(
            f"--devices: {devices}, where {placement.scheduler} has started {size} processes, each of "
            f"which is a device; leave it out, give a range such as 1:{size}, or add --on local for a run of this "
            "process alone"
        )
    return placement


def _listening(placement: Placement | None, interface: str | None, ports: str | None) -> tuple[str, PortRange]:
    """The address and the ports that this rank's device listens on; an empty address: all, or loopback."""
    if placement is None:
        if interface is not None or ports is not None:
            raise InvalidArgument(
                f"{'--interface' if interface is not None else '--device-ports'}: for ranks that a scheduler started; "
                "devices of this machine use loopback, and hoop device has --interface, --port and --data-port"
            )
        return "", PortRange()
    chosen = PortRange.parse(ports, "--device-ports") if ports is not None else PortRange()
    if interface is None:
        return "", chosen
    from hoop.servers.advertised_address import interface_address

    assert placement.meeting_point is not None, "checked by find_placement"
    if placement.meeting_point.is_loopback:
        raise InvalidArgument(f"--interface: {interface}, where all ranks are on this host and meet on loopback")
    return interface_address(interface), chosen


def _ray(
    on: str | None,
    devices: DeviceRange | None,
    timeout: str,
    address: str | None,
    cpus: float | None,
    gpus: float | None,
    placement: str | None,
) -> Ray | None:
    """The options of a run on Ray; None: it is not on Ray, and must have none of them."""
    given = {"address": address, "cpus": cpus, "gpus": gpus, "placement": placement}
    found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if on != RAY:
        if found:
            raise InvalidArgument(f"{', '.join(f'--ray-{name}' for name in found)}: for --on {RAY}, which is missing")
        return None
    from hoop.launch.ray_cluster import Ray, import_ray

    import_ray()
    where = Ray(timeout_s=parse_duration(timeout, "--meet-timeout"), **found)
    return where if devices is None else where.with_range(devices)


def _run_rank(
    placement: Placement,
    job: str | None,
    changes: dict[str, Any],
    listening: tuple[str, PortRange],
    memory: int,
    credentials: Credentials,
    timeout_s: float,
) -> int:
    """Loads the job and its data, and runs the device of a rank other than 0; returns the exit code.

    Errors name the rank and its host: the job's code or data may be missing on one of many.
    """
    torch_versions.check_version(torch_versions.installed_version())  # before these imports load it
    from hoop.cli.rank_device import run_rank
    from hoop.engine.entrypoint import train_rank
    from hoop.runs.job_lookup import job_named, resolved
    from hoop.runs.meeting import rank_device

    point = placement.meeting_point
    assert point is not None, "checked by find_placement"
    # What a user's own code prints goes to standard error, as in rank 0.
    with contextlib.redirect_stdout(sys.stderr):
        config = rank_device(placement, memory, credentials, timeout_s, *listening)
        try:
            if job is not None:  # else rank 0 takes it from its run
                name = resolved(job)
                job_named(name).defaults(name).replaced(changes).check()
            return run_rank(point, config, partial(train_rank, jobs=options.check_jobs(None)))
        except HoopError as error:
            raise type(error)(f"{placement} on {socket.gethostname()}: {error}") from None


def _check_detach(detach: bool, there: Addresses | None, out: Path | None, resume: bool) -> None:
    if detach and there is None:
        raise InvalidArgument("--detach: it needs --coordinator, a cluster that outlives this command")
    if detach and out is not None and not resume:
        raise InvalidArgument(
            "--out: the command that follows a job writes its files; use hoop attach JOB --out FOLDER"
        )


def _detach(launch: Launch, json: bool, token_file: Path | None, tls: Path | None, view: PlainView) -> None:
    """Starts the job and returns; ``hoop attach`` follows it."""
    from hoop.cli.attach import attach_command
    from hoop.client.cluster import connect
    from hoop.runs.device_count import check_range, wait_for_devices
    from hoop.runs.job_follower import JobFollower
    from hoop.runs.training import choose_devices

    assert launch.coordinator is not None, "checked before"
    for text in filter(None, (*launch.warnings, check_range(launch.devices, launch.settings))):
        view.note(ev.Warned(text))
    with connect(launch.coordinator, credentials=launch.credentials) as cluster:
        if launch.settings.max_devices and launch.devices:
            for observed in wait_for_devices(cluster, launch.devices, launch.meet_timeout_s, lambda: False):
                view.note(observed.event)
        devices = choose_devices(cluster, launch.devices, launch.settings.min_devices)
        number = JobFollower(cluster, launch.settings, devices, resume=launch.resume).job.id
    # Straight to the descriptor: standard output is given to whatever the job's code prints.
    text = json_module.dumps({"job_id": number}) if json else f"job {number}"
    typer.echo(text, file=sys.__stdout__)
    if not json:
        typer.echo(f"come back with: {attach_command(number, launch.coordinator, token_file, tls)}", err=True)


def _settings(given: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals:
            raise InvalidArgument(f"--set: {item!r} is not name=value, e.g. --set momentum=0.9")
        try:
            found[name] = json_module.loads(value)
        except ValueError:
            found[name] = value
    return found


def _launch(
    job: str | None,
    changes: dict[str, Any],
    devices: int | None,
    memory: int,
    out: Path | None,
    resume: bool,
    coordinator: Addresses | None,
    address_file: Path | None,
    begin_again: bool = False,
    load: bool = True,
) -> Launch:
    """Checks everything that can be wrong before anything runs. ``begin_again``: ``out`` may hold a run without a
    checkpoint. ``load``: devices are forked from this process, and share the data that is loaded now."""
    untested = torch_versions.check_version(torch_versions.installed_version())  # before these imports load it
    from hoop.engine.trainer import check_faults
    from hoop.runs.checkpoint_store import newest_checkpoint
    from hoop.runs.device_count import default_device_count
    from hoop.runs.job_lookup import job_named, resolved
    from hoop.runs.run_recorder import saved_settings
    from hoop.runs.training import Launch

    found = None
    if resume:
        if out is None:
            raise InvalidArgument("--resume: it needs --out, the folder of the run to go on with")
        saved, count = saved_settings(out)
        if job is not None and resolved(job) != saved.job:
            raise InvalidArgument(f"--resume: the run in {out} is of {saved.job}, not {job}")
        name, devices, found = saved.job, devices or count, newest_checkpoint(out)
    else:
        assert job is not None, "checked by the caller"
        if out is not None and (out / "checkpoints").is_dir() and not begin_again:
            raise FailedPrecondition(f"--out: {out} holds a run; go on with it by --resume, or name another")
        name, saved = resolved(job), None
    known = job_named(name, load)
    settings: Settings = (saved or known.defaults(name)).replaced(changes).check()
    reason = ""
    if devices is None and load:
        default = default_device_count(settings)
        devices, reason = default.devices, default.reason
    if devices is not None:
        parse(settings.strategy).plan(devices, settings.num_microbatches)
        check_replicas(settings.replicas, devices)
    if settings.faults and devices is not None and load:  # on a cluster the devices do: they have the data
        check_faults(settings, devices, len(known.data().train))
    warnings = (untested,) if untested else ()
    launch = Launch(
        settings,
        devices,
        memory,
        out,
        warnings=warnings,
        coordinator=coordinator,
        address_file=address_file,
        device_reason=reason,
    )
    if found is None:
        return launch
    return replace(launch, resume=found.path, warnings=(*warnings, *found.warnings))


def _dashboard(
    port: int | None, address_file: Path | None, impossible: bool, token_file: Path | None, tls: Path | None
) -> RunDashboard | None:
    """The dashboard of this run, not started yet; None: there is none."""
    if port is None:
        return None
    if impossible:
        raise InvalidArgument(
            "--dashboard: not with --detach or --on ray; show the cluster with: hoop dashboard --coordinator HOST:PORT"
        )
    from hoop.cli.run_dashboard import RunDashboard

    given = {"--token-file": token_file, "--tls": tls}
    return RunDashboard(port, address_file, [str(word) for pair in given.items() if pair[1] for word in pair])


def _follow(
    launch: Launch, view: PlainView, started: float, page: RunDashboard | None = None
) -> tuple[dict[str, Any], int]:
    """Shows the job's events; the first Ctrl-C asks it to stop, the second ends it.

    A terminal that is closed stops a job of this machine. A job on a cluster goes on: this command just ends.
    Returns the result, and the signal that stopped it or 0.
    """
    from hoop.runs.training import Training

    training = Training(launch)
    events = training.events()
    result: dict[str, Any] = {}
    start_seconds: float | None = None
    signals = not_ignored(*ENDING)
    received = 0

    def stop(number: int, _: object) -> None:
        nonlocal received
        if received:
            raise KeyboardInterrupt
        received = number
        view.say("stopping after this step; Ctrl-C again ends it at once")
        training.stop()

    before = [signal.signal(number, stop) for number in signals]
    if launch.coordinator is not None and signal.SIGHUP in signals:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # unwinding would stop the job
    try:
        for observed in events:
            event = observed.event
            if page is not None and not isinstance(event, ev.Warned):  # warnings come before the devices are forked
                page.start(partial(echo, err=True))
            if isinstance(event, ev.Started):  # as the user sees it: from the command to the first step
                event = replace(event, seconds=time.monotonic() - started)
                start_seconds = event.seconds
            if isinstance(event, ev.Finished):
                result = {**event.result, "start_seconds": start_seconds}
            view.note(event)
    except HoopError as error:
        if not received or start_seconds is not None:
            raise
        view.say(str(error))
        raise typer.Exit(128 + received) from None
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
        events.close()  # type: ignore[attr-defined]
        if page is not None:
            page.close()
    return result, received if result["stopped"] else 0
