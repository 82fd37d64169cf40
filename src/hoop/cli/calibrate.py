"""``hoop calibrate``: measures the costs of a job and of this machine's links, for the simulator."""

from __future__ import annotations

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
    accelerator: Annotated[
        str, typer.Option(help="cpu: measure on a core. cuda: measure a data parallel step on a GPU.")
    ] = "cpu",
    memory: options.Memory = "1GiB",
    json: options.Json = False,
) -> None:
    """Measure a job's costs on this machine, for --costs of hoop simulate, hoop plan and hoop train.

    It measures every block's forward and backward on one core at two batch sizes; loading, update, copying, adding; a
    message and a barrier between two processes; and how busy cores slow each other down. It takes seconds; the machine
    should be idle. With --accelerator cuda it measures the graphs of a step on the GPU instead, in a run of one step on
    one device with --memory.
    """
    kinds = ("cpu", "cuda", "emulated")
    if accelerator not in kinds:
        raise InvalidArgument(f"--accelerator: {accelerator!r} is not one of {', '.join(kinds)}")
    size = parse_size(memory, "--memory")
    # Before PyTorch is loaded: one thread computes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from hoop.lab.bench.links import contention_factor, link_seconds
    from hoop.runs.calibration import between, calibrated, machine_of
    from hoop.runs.job_lookup import job_named, resolved
    from hoop.runs.simulation_report import calibrated_on_gpu

    make_folder(out.parent, "--out")
    found = job_named(resolved(job), load=False)
    changes = {"batch_size": batch_size, "shards": shards, "accelerator": accelerator}
    settings = found.defaults(resolved(job)).replaced({k: v for k, v in changes.items() if v is not None}).check()
    if accelerator == "cpu":
        typer.echo("measuring links …", err=True)
        machine = machine_of(link_seconds("shm", more=between))
        typer.echo(f"loading {job} and measuring its blocks …", err=True)
        costs = calibrated(found, settings, machine, contention_factor)
    else:
        typer.echo(f"measuring a step of {job} on the GPU …", err=True)
        costs = calibrated_on_gpu(settings, size)
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
        f"copying {1e-9 / costs.machine.copy_s:.1f} GB/s, all cores at once {costs.machine.crowding:.2f}x as long"
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
