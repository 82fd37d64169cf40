"""``hoop train``: trains a job on devices, with progress and a summary."""

from __future__ import annotations

import contextlib
import json as json_module
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hoop import job_events as ev
from hoop import torch_versions
from hoop.cli import options
from hoop.cli.device_source import SchedulerOptions, find_devices, run_rank_of_scheduler
from hoop.cli.output import echo
from hoop.cli.running import ENDING, not_ignored
from hoop.config import parse_size
from hoop.engine.job_names import check_job_name
from hoop.engine.settings import Settings
from hoop.errors import FailedPrecondition, HoopError, InvalidArgument
from hoop.membership.replication import check_replicas
from hoop.resources import LEAST_GROWING, Request, admit
from hoop.schedulers.catalog import NAMES
from hoop.simulate.cost_model import read_costs
from hoop.strategies.catalog import parse
from hoop.texts import counted
from hoop.topology import DeviceRange

if TYPE_CHECKING:
    from hoop.cli.device_source import DeviceSource
    from hoop.cli.run_dashboard import RunDashboard
    from hoop.report.progress_view import QuietView
    from hoop.runs.clean_process import CleanProcess, LoadWatch
    from hoop.runs.training import Launch
    from hoop.topology import Addresses

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
    memory: options.JobMemory = None,
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
    # Before PyTorch is loaded: a device must own its cores, and devices are forked from this process.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from hoop.cli.training_view import check_kept, find_view, show_recipes, show_result
    from hoop.runs.clean_process import LoadWatch

    if list_:
        show_recipes(json)
        return
    folder = RunFolder(out, resume or (auto_resume and _has_checkpoint(out)), auto_resume)
    if job is None and not (folder.resume and out is not None):
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
    wanted = DeviceRange.parse(devices, "--devices") if devices is not None else None
    changes = _changes(given, set_ or [], wanted)
    size = None if memory is None else parse_size(memory, "--memory")
    priced = read_costs(costs) if costs else None
    scheduler = SchedulerOptions(on, meet, port, meet_timeout, interface, device_ports)
    on_ray = {"address": ray_address, "cpus": ray_cpus, "gpus": ray_gpus, "placement": ray_placement}
    source = find_devices(scheduler, on_ray, coordinator, wanted)
    source.check_restarts(max_restarts)
    source = source.with_credentials(token_file, tls)
    _check_detach(detach, source.coordinator, folder)
    page = _dashboard(dashboard, address_file, detach or source.ray is not None, token_file, tls)
    source.admit(size)
    if source.placement is not None and source.placement.rank:
        raise typer.Exit(run_rank_of_scheduler(source, job, changes, size))
    if job is not None:
        check_job_name(job)
    view = find_view(json)
    # What a user's own code prints goes to standard error: standard output holds the result and nothing else.
    with view, contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as ends:
        view.say("loading PyTorch and the data …")
        watch = ends.enter_context(contextlib.closing(LoadWatch(source.forked and (job is None or ":" in job))))
        launch = _launch(job, changes, size, folder, source, watch)
        watched = page.address_file if page is not None else address_file
        launch = replace(launch, costs=priced, max_restarts=max_restarts, address_file=watched)
        _say_devices(launch, view)
        if detach:
            _detach(launch, json, token_file, tls, view)
            return
        result, number = _follow(launch, view, started, page, watch.choose())
    show_result(result, out, json)
    if number:
        raise typer.Exit(128 + number)
    check_kept(result, out)


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and whether this run begins there or goes on."""

    path: Path | None
    """The folder of ``--out``; None: no files are kept."""
    resume: bool
    """True if the run goes on from the newest checkpoint in the folder."""
    begin_again: bool
    """True if a run may begin in the folder of a run that has no checkpoint (``--auto-resume``)."""


def _has_checkpoint(out: Path | None) -> bool:
    """Whether ``--auto-resume`` goes on with a run, or begins one."""
    if out is None:
        raise InvalidArgument("--auto-resume: it needs --out, the folder of the run to go on with")
    return any((out / "checkpoints").glob("*.safetensors"))


def _changes(given: Mapping[str, Any], set_: list[str], devices: DeviceRange | None) -> dict[str, Any]:
    """Settings that the command line changes: by options of their own, and by ``--set``."""
    changes = {key: value for key, value in given.items() if value is not None} | _settings(set_)
    if devices is not None and (devices.most or "max_devices" not in changes):
        changes["max_devices"] = devices.most
    if given["strategy"] is not None:
        parse(given["strategy"])
    if given["optimizer"] is not None:
        Settings().replaced({"optimizer": given["optimizer"]}).check()
    Settings().replaced(changes)  # raises for a name that no setting has; the job's defaults follow with PyTorch
    return changes


def _say_devices(launch: Launch, view: QuietView) -> None:
    """Says how many devices Hoop has chosen, after a check that they fit, or where the ranks of a scheduler meet."""
    if launch.device_reason:
        admit(Request(launch.devices or 1, launch.memory or LEAST_GROWING, options=("--devices", "--memory")))
        devices = counted(launch.devices or 1, "device")
        view.say(f"{devices}: {launch.device_reason}; --devices sets another number")
    if launch.placement is not None:
        view.say(f"{launch.placement}: the ranks meet at {launch.placement.meeting_point} …")


def _check_detach(detach: bool, there: Addresses | None, folder: RunFolder) -> None:
    if detach and there is None:
        raise InvalidArgument("--detach: it needs --coordinator, a cluster that outlives this command")
    if detach and folder.path is not None and not folder.resume:
        raise InvalidArgument(
            "--out: the command that follows a job writes its files; use hoop attach JOB --out FOLDER"
        )


def _detach(launch: Launch, json: bool, token_file: Path | None, tls: Path | None, view: QuietView) -> None:
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
                view.show(observed.event)
        devices = choose_devices(cluster, launch.devices, launch.settings.min_devices)
        number = JobFollower.start(cluster, launch.settings, devices, resume=launch.resume).job.id
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
    memory: int | None,
    folder: RunFolder,
    source: DeviceSource,
    watch: LoadWatch,
) -> Launch:
    """Checks everything that can be wrong before anything runs."""
    untested = torch_versions.check_version(torch_versions.installed_version())  # before these imports load it
    from hoop.engine.job import is_given
    from hoop.engine.trainer import check_faults
    from hoop.runs.checkpoint_store import newest_checkpoint
    from hoop.runs.device_count import default_device_count
    from hoop.runs.job_lookup import load_job, with_absolute_path
    from hoop.runs.run_recorder import saved_settings
    from hoop.runs.training import Launch

    newest, out, devices = None, folder.path, source.devices
    # Devices of this machine share the data that is loaded now, unless the job's code has left traces here.
    load = source.forked
    if folder.resume:
        if out is None:
            raise InvalidArgument("--resume: it needs --out, the folder of the run to go on with")
        saved, count = saved_settings(out)
        name = with_absolute_path(job) if job is not None else saved.job
        if is_given(saved.job):  # of hoop.train: the user says which file has the same model, data and loss
            saved = _named(saved, name, out)
        elif name != saved.job:
            raise InvalidArgument(f"--resume: the run in {out} is of {saved.job}, not {job}")
        devices, newest = devices or count, newest_checkpoint(out)
    else:
        assert job is not None, "checked by the caller"
        if out is not None and (out / "checkpoints").is_dir() and not folder.begin_again:
            raise FailedPrecondition(f"--out: {out} holds a run; go on with it by --resume, or name another")
        name, saved = with_absolute_path(job), None
    watch.begin()
    known = load_job(name, load)
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
    launch = source.place(Launch(settings, devices, memory, out, warnings=warnings, device_reason=reason))
    if newest is None:
        return launch
    return replace(launch, resume=newest.path, warnings=(*warnings, *newest.warnings))


def _named(saved: Settings, job: str, out: Path) -> Settings:
    """The settings of a run of live objects, for a job of that name. Raises if none was named."""
    from hoop.engine.job import is_given

    if is_given(job):
        raise FailedPrecondition(
            f"--resume: the run in {out} was started by hoop.train with the objects of a program; go on there, with "
            "resume=True, or write the same model, data and loss as a hoop.Job into a file and name it: "
            f"hoop train file.py:name --resume --out {out}"
        )
    return saved.replaced({"job": job})


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
    launch: Launch, view: QuietView, started: float, page: RunDashboard | None, clean: CleanProcess | None
) -> tuple[dict[str, Any], int]:
    """Shows the job's events; the first Ctrl-C asks it to stop, the second ends it. ``clean``: as in ``Training``.

    A terminal that is closed stops a job of this machine. A job on a cluster goes on: this command just ends.
    Returns the result, and the signal that stopped it or 0.
    """
    from hoop.runs.training import Training

    training = Training(launch, clean=clean)
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
            view.show(event)
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
