"""``hoop bench``: measures all-reduce side by side with Gloo and MPI."""

from __future__ import annotations

import json as json_module
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hoop.cli import options
from hoop.config import format_size, parse_duration, parse_size
from hoop.errors import InvalidArgument

if TYPE_CHECKING:
    from hoop.lab.bench.contest import BenchResult


def bench(
    contenders: Annotated[
        str, typer.Option(help="Any of arena, shm, tcp, torch (Hoop), gloo, openmpi, mpich; ratios are to the last.")
    ] = "arena,shm,tcp,gloo",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,4",
    sizes: Annotated[str, typer.Option(help="Sizes of the float32 vector.")] = "4,437544,4MiB,64MiB",
    seconds: Annotated[str, typer.Option(help="Time to measure each value.")] = "500ms",
    algorithm: Annotated[
        str, typer.Option(help="Algorithm of arena, shm and tcp: ring, tree, staged, …", show_default="chosen by cost")
    ] = "",
    openmpi: Annotated[Path | None, typer.Option(help="Open MPI's mpirun; the Python beside it has mpi4py.")] = None,
    mpich: Annotated[Path | None, typer.Option(help="MPICH's mpirun; the Python beside it has mpi4py.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time by size into this .svg file.")] = None,
    json: options.Json = False,
) -> None:
    """Measure all-reduce side by side: size, time, algbw, busbw, and the ratio to the last contender.

    [bold]arena[/bold] is a prepared all-reduce of vectors in device memory, [bold]shm[/bold] and [bold]tcp[/bold]
    of vectors anywhere, [bold]torch[/bold] goes through torch.distributed with Hoop's backend. 437544 bytes are the
    gradient of the 784-128-64-10 MLP. The limit is 2·N·S bytes over the copy bandwidth measured in the same run.
    """
    from hoop.lab.bench.contest import Contest, copy_bandwidth

    names = [name.strip() for name in contenders.split(",") if name.strip()]
    counts = [int(_whole(one, "--ranks")) for one in ranks.split(",")]
    amounts = [parse_size(one, "--sizes") for one in sizes.split(",")]
    paths = {name: path for name, path in (("openmpi", openmpi), ("mpich", mpich)) if path}
    contest = Contest(names, counts, amounts, parse_duration(seconds, "--seconds"), paths, algorithm)
    if plot is not None and plot.suffix.lower() != ".svg":
        raise InvalidArgument(f"--plot: {plot.name!r}: the plot is an SVG file; name it {plot.stem or 'plot'}.svg")
    if plot is not None and not plot.parent.is_dir():
        raise InvalidArgument(f"--plot: there is no folder {plot.parent}; make it first")
    limits = {count: copy_bandwidth(min(count, os.cpu_count() or 1)) for count in counts}
    rows: list[BenchResult] = []
    for row in contest.run():
        rows.append(row)
        typer.echo(
            f"{row.contender} on {row.ranks} ranks, {format_size(row.bytes)}: {row.seconds * 1e6:.1f} us", err=True
        )
    if json:
        plain = [
            {"contender": row.contender, "ranks": row.ranks, "bytes": row.bytes, "seconds": row.seconds}
            | {"algbw": row.algbw, "busbw": row.busbw, "algorithm": row.algorithm}
            for row in rows
        ]
        typer.echo(json_module.dumps({"rows": plain, "copy_bandwidth": limits}))
    else:
        typer.echo(as_table(rows, names, limits))
    if plot is not None:
        draw(rows, plot)


def _whole(text: str, field: str) -> int:
    if not text.strip().isdigit() or not int(text):
        raise InvalidArgument(f"{field}: {text!r} is not a number of ranks")
    return int(text)


def as_table(rows: list[BenchResult], names: list[str], limits: dict[int, float]) -> str:
    """A Markdown table, one line a size and rank count and contender."""
    yardstick = {(row.ranks, row.bytes): row.seconds for row in rows if row.contender == names[-1]}
    lines = [
        "| ranks | size | contender | time, us | algbw, GB/s | busbw, GB/s "
        f"| times {names[-1]} | of the limit | algorithm |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row.ranks, row.bytes, names.index(row.contender))):
        limit = 2 * row.ranks * row.bytes / limits[row.ranks]
        ratio = yardstick[row.ranks, row.bytes] / row.seconds
        lines.append(
            f"| {row.ranks} | {format_size(row.bytes)} | {row.contender} | {row.seconds * 1e6:.1f} | "
            f"{row.algbw / 1e9:.2f} | {row.busbw / 1e9:.2f} | {ratio:.1f}x | {100 * limit / row.seconds:.0f} % | "
            f"{row.algorithm} |"
        )
    return "\n".join(lines)


def draw(rows: list[BenchResult], path: Path) -> None:
    """Time by size, one line a contender, one panel a number of ranks."""
    from hoop.report.chart import Chart, ChartLine, Lines

    panels = []
    for count in sorted({row.ranks for row in rows}):
        lines = []
        for name in dict.fromkeys(row.contender for row in rows):
            mine = sorted((row.bytes, row.seconds * 1e6) for row in rows if (row.contender, row.ranks) == (name, count))
            lines.append(ChartLine(name, [size for size, _ in mine], [time for _, time in mine]))
        panels.append(Lines(f"us, {count} ranks", lines, kind="log"))
    path.write_text(Chart("All-reduce, median time", panels, x_label="bytes", x_kind="log").svg())
