"""``hoop bench``: measures all-reduce side by side with Gloo and MPI."""

from __future__ import annotations

import json as json_module
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hoop.cli import options
from hoop.config import format_size, parse_duration, parse_size
from hoop.errors import InvalidArgument

if TYPE_CHECKING:
    from hoop.lab.bench.contest import BenchResult
    from hoop.report.page import Page


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
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with charts of time and bandwidth by size: FILE.html."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Measure all-reduce side by side: size, time, algbw, busbw, and the ratio to the last contender.

    [bold]arena[/bold] is a prepared all-reduce of vectors in device memory, [bold]shm[/bold] and [bold]tcp[/bold]
    of vectors anywhere, [bold]torch[/bold] goes through torch.distributed with Hoop's backend. 437544 bytes are the
    gradient of the 784-128-64-10 MLP. The limit is 2·N·S bytes over the copy bandwidth measured in the same run.
    """
    from hoop.lab.bench.contest import Contest, copy_bandwidth
    from hoop.report.page_files import NEEDS_BOKEH, can_draw, write_html

    names = [name.strip() for name in contenders.split(",") if name.strip()]
    counts = [int(_whole(one, "--ranks")) for one in ranks.split(",")]
    amounts = [parse_size(one, "--sizes") for one in sizes.split(",")]
    paths = {name: path for name, path in (("openmpi", openmpi), ("mpich", mpich)) if path}
    contest = Contest(names, counts, amounts, parse_duration(seconds, "--seconds"), paths, algorithm)
    if plot is not None and plot.suffix.lower() != ".html":
        raise InvalidArgument(
            f"--plot: {plot.name!r}: it is an HTML page, whose charts can be saved as PNG and SVG; "
            f"name it {plot.stem or 'plot'}.html"
        )
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
        if can_draw():
            write_html(bench_page(rows, names, limits), plot)
        else:
            typer.echo(NEEDS_BOKEH, err=True)


def _whole(text: str, field: str) -> int:
    if not text.strip().isdigit() or not int(text):
        raise InvalidArgument(f"{field}: {text!r} is not a number of ranks")
    return int(text)


def as_table(rows: list[BenchResult], names: list[str], limits: dict[int, float]) -> str:
    """A Markdown table, one line a size and rank count and contender."""
    lines = [
        "| ranks | size | contender | time, us | algbw, GB/s | busbw, GB/s "
        f"| times {names[-1]} | of the limit | algorithm |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row, ratio, share in _compared(rows, names, limits):
        lines.append(
            f"| {row.ranks} | {format_size(row.bytes)} | {row.contender} | {row.seconds * 1e6:.1f} | "
            f"{row.algbw / 1e9:.2f} | {row.busbw / 1e9:.2f} | {ratio:.1f}x | {100 * share:.0f} % | "
            f"{row.algorithm} |"
        )
    return "\n".join(lines)


def _compared(
    rows: list[BenchResult], names: list[str], limits: dict[int, float]
) -> Iterator[tuple[BenchResult, float, float]]:
    """Rows by ranks, size and contender, with the ratio to the last contender and the share of the limit."""
    yardstick = {(row.ranks, row.bytes): row.seconds for row in rows if row.contender == names[-1]}
    for row in sorted(rows, key=lambda row: (row.ranks, row.bytes, names.index(row.contender))):
        limit = 2 * row.ranks * row.bytes / limits[row.ranks]
        yield row, yardstick[row.ranks, row.bytes] / row.seconds, limit / row.seconds


def bench_page(rows: list[BenchResult], names: list[str], limits: dict[int, float]) -> Page:
    """Time and bandwidth by size, a line a contender, a section a number of ranks; and the table."""
    from hoop.report.chart import Chart, ChartLine, Lines
    from hoop.report.page import Page, Section
    from hoop.report.tables import Column, Table

    sections = []
    for count in sorted({row.ranks for row in rows}):
        times, widths = [], []
        for name in names:
            mine = sorted(
                (row for row in rows if (row.contender, row.ranks) == (name, count)), key=lambda row: row.bytes
            )
            sizes = [row.bytes for row in mine]
            times.append(ChartLine(name, sizes, [row.seconds * 1e6 for row in mine]))
            widths.append(ChartLine(name, sizes, [row.busbw / 1e9 for row in mine]))
        panels = [Lines("time (us)", times, kind="log"), Lines("busbw (GB/s)", widths)]
        title, about = f"All-reduce of {count} ranks", f"medians; copy bandwidth {limits[count] / 1e9:.1f} GB/s"
        chart = Chart(f"all-reduce-{count}-ranks", title, panels, x_label="bytes", x_kind="log", subtitle=about)
        sections.append(Section(f"{count} ranks", [chart]))
    columns = [Column("ranks"), Column("bytes"), Column("contender"), Column("time", "us", 1)]
    columns += [Column("algbw", "GB/s", 2), Column("busbw", "GB/s", 2), Column(f"times {names[-1]}", digits=1)]
    columns += [Column("of the limit", "%", 0), Column("algorithm")]
    table = [
        [
            row.ranks,
            row.bytes,
            row.contender,
            row.seconds * 1e6,
            row.algbw / 1e9,
            row.busbw / 1e9,
            ratio,
            100 * share,
            row.algorithm,
        ]
        for row, ratio, share in _compared(rows, names, limits)
    ]
    sections.append(Section("All values", [Table(columns, table)]))
    return Page("hoop bench: all-reduce", sections)
