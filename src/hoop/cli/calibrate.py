"""``hoop calibrate``: measures the costs of a job and of this machine's links, for the simulator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hoop.cli import options
from hoop.config import format_size
from hoop.files import make_folder, write_text


def calibrate(
    job: Annotated[str, typer.Argument(help="A recipe, or your own job: file.py:name.")] = "mnist",
    out: Annotated[Path, typer.Option(help="Where the file is written.")] = Path("calibration.json"),
    batch_size: Annotated[int | None, typer.Option(metavar="N", min=1, help="Samples an update.")] = None,
    shards: Annotated[int | None, typer.Option(metavar="N", min=1, help="Parts of a batch.")] = None,
    json: options.Json = False,
) -> None:
    """Measure a job's costs on this machine, for --costs of hoop simulate, hoop plan and hoop train.

    It measures every block's forward and backward on one core at two batch sizes; loading, update, copying, adding; a
    message and a barrier between two processes; and how busy cores slow each other down. It takes seconds; the machine
    should be idle.
    """
    # Before PyTorch is loaded: one thread computes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from hoop.lab.bench.links import contention_factor, link_seconds
    from hoop.runs.job_lookup import job_named, resolved
    from hoop.runs.prediction import between, calibrated, machine_of

    make_folder(out.parent, "--out")
    typer.echo("measuring links …", err=True)
    machine = machine_of(link_seconds("shm", more=between))
    typer.echo(f"loading {job} and measuring its blocks …", err=True)
    found = job_named(resolved(job), load=False)
    changes = {"batch_size": batch_size, "shards": shards}
    settings = found.defaults(resolved(job)).replaced({k: v for k, v in changes.items() if v is not None}).check()
    costs = calibrated(found, settings, machine, contention_factor)
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
    typer.echo(f"written to {out}; try: hoop simulate {job} --costs {out} --devices 16")
