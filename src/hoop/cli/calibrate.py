"""``hoop calibrate``: measures the costs of a job and of this machine's links, for the simulator."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from hoop.cli import options
from hoop.config import format_size, parse_size
from hoop.errors import InvalidArgument
from hoop.files import make_folder, write_text


def calibrate(
    job: Annotated[str, typer.Argument(help="A recipe, or your own job: file.py:name.")] = "mnist",
    out: Annotated[Path, typer.Option(help="Where the file is written.")] = Path("calibration.json"),
    batch_size: Annotated[int | None, typer.Option(metavar="N", min=1, help="Samples an update.")] = None,
    shards: Annotated[int | None, typer.Option(metavar="N", min=1, help="Parts of a batch.")] = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", "-n", metavar="N", min=1, help="That measure at once.", show_default="one a core"),
    ] = None,
    accelerator: Annotated[
        str, typer.Option(help="cpu: measure on a core. cuda: measure a data parallel step on a GPU.")
    ] = "cpu",
    memory: options.Memory = "1GiB",
    json: options.Json = False,
) -> None:
    """Measure a job's costs on this machine, for --costs of hoop simulate, hoop plan and hoop train.

    It runs two steps, each on that number of devices with --memory; before the step all devices measure at the same
    time, as before every run: every block's forward and backward at two batch sizes, loading, update, copying, adding,
    messages, barriers, a sum of gradients. Cores share caches, memory and clocks: choose as many devices as will train.
    It takes seconds; the machine should be idle. With --accelerator cuda it measures the graphs of a step on the GPU
    instead, on one device.
    """
    kinds = ("cpu", "cuda", "emulated")
    if accelerator not in kinds:
        raise InvalidArgument(f"--accelerator: {accelerator!r} is not one of {', '.join(kinds)}")
    size = parse_size(memory, "--memory")
    # Before PyTorch is loaded: one thread computes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from hoop.resources import available_cores
    from hoop.runs.calibration_run import calibrated_on_devices, calibrated_on_gpu
    from hoop.runs.clean_process import LoadWatch
    from hoop.runs.job_lookup import load_job, with_absolute_path

    make_folder(out.parent, "--out")
    changes = {"batch_size": batch_size, "shards": shards, "accelerator": accelerator}
    with contextlib.closing(LoadWatch(executes=":" in job)) as watch:
        watch.begin()
        name = with_absolute_path(job)
        known = load_job(name).defaults(name)
        settings = known.replaced({key: value for key, value in changes.items() if value is not None}).check()
        if accelerator == "cpu":
            count = devices or available_cores()
            typer.echo(f"measuring {job} on {count} device{'s' * (count > 1)} …", err=True)
            costs = calibrated_on_devices(settings, count, size, watch.choose())
        else:
            typer.echo(f"measuring a step of {job} on the GPU …", err=True)
            costs = calibrated_on_gpu(settings, size, watch.choose())
    write_text(out, costs.to_json())
    if json:
        typer.echo(costs.to_json())
        return
    rows = costs.rows
    for index, one in enumerate(costs.blocks):
        typer.echo(
            f"block {index:>3} {one.name:<16} forward {1e3 * one.forward.at(rows):8.3f} ms  "
            f"backward {1e3 * one.backward.at(rows):8.3f} ms  weights {format_size(one.weight_bytes)}"
        )
    typer.echo(
        f"{rows} samples a micro-batch; a message {1e6 * costs.machine.message_s:.0f} us for each end, "
        f"copying {1e-9 / costs.machine.copy_s:.1f} GB/s; the slowest device of a step computes for "
        f"{costs.machine.crowding:.2f} times as long as a usual one"
    )
    if costs.gpu is not None:
        gpu, memory_text = costs.gpu, format_size(costs.gpu.memory or 0)
        typer.echo(
            f"a step of {settings.batch_size} samples on {costs.about['gpu']} ({memory_text}): "
            f"{1e3 * gpu.compute.at(settings.batch_size):.3f} ms of graphs, {1e6 * gpu.finish_s:.0f} us of sums and "
            f"updates, {1e6 * gpu.step_s:.0f} us more; reading another device's memory there "
            f"{1e-9 / gpu.read_s:.0f} GB/s"
        )
    typer.echo(f"written to {out}; try: hoop simulate {job} --costs {out} --devices 16")
