"""``hoop reproduce``: a paper's experiment, run here, with its figures beside ours."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hoop.cli import options
from hoop.cli.output import plain
from hoop.errors import InvalidArgument
from hoop.files import make_folder
from hoop.launch.processes import hoop_command
from hoop.resources import available_cores

if TYPE_CHECKING:
    from hoop.lab.papers.catalog import Study


LINE_S = 10.0
"""Seconds between lines of progress, if there is no terminal."""


def reproduce(
    name: Annotated[str | None, typer.Argument(help="A study (--list), or all.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Less of everything, under a minute; the report says what was left out.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The folder for the report; otherwise runs/papers/NAME.")] = None,
    accelerator: Annotated[str, typer.Option(help="What devices compute on: cpu, or cuda.")] = "cpu",
    mpirun: Annotated[
        Path | None, typer.Option(help="MPI's mpirun, with mpi4py's Python beside it; otherwise the one on the path.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the studies.")] = False,
    json: options.Json = False,
) -> None:
    """Run a paper's experiment here, and write its figures beside ours: one HTML page, Markdown, CSV and JSON.

    [bold]hoop reproduce mnist-pipeline --quick[/bold] takes under a minute. Every claim gets a verdict, and every
    figure says whether it was measured on real devices or simulated. Ctrl-C ends every device and writes nothing.
    """
    # Before PyTorch is loaded: a device must own its cores, and devices are forked from this process.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from hoop.lab.papers.catalog import STUDIES, study_named
    from hoop.report import strict_json
    from hoop.report.page_files import NEEDS_BOKEH, can_draw

    if list_:
        found = {one.name: {"paper": one.paper, "question": one.question} for one in STUDIES.values()}
        lines = [f"{one.name:<16} {one.paper}\n{'':<16} {one.question}" for one in STUDIES.values()]
        typer.echo(strict_json.dumps(found) if json else "\n".join(lines))
        return
    if name is None:
        raise InvalidArgument("study: none given; try: hoop reproduce --list")
    if name == "all":
        _each(list(STUDIES))
        return
    study = study_named(name)
    if mpirun is None and (on_path := shutil.which("mpirun")):
        mpirun = Path(on_path)
    folder = make_folder(out or Path("runs/papers") / name, "--out")
    with StudyView() as view:
        report = _run(study, quick, accelerator, mpirun, folder, view)
    if not can_draw():
        typer.echo(NEEDS_BOKEH, err=True)
    if json:
        typer.echo(strict_json.dumps(report))
        return
    _show(report)
    typer.echo(f"kept in {folder}; open {folder / ('report.html' if can_draw() else 'report.md')}")


def _run(
    study: Study, quick: bool, accelerator: str, mpirun: Path | None, folder: Path, view: StudyView
) -> dict[str, Any]:
    from hoop.lab.papers.experiment import Experiment
    from hoop.report.page_files import write_page

    began = time.monotonic()
    lab = Experiment(quick, accelerator, mpirun, view.say, view.note)
    found = study.run(lab)
    if lab.busy:
        found.limits.insert(
            0,
            f"**The machine was busy** with other work ({lab.other_busy_cores:.1f} of {lab.cores} cores when this began"
            "): times are shown and decide nothing; simulated figures rest on costs that were measured then.",
        )
    said = (["--quick"] if quick else []) + ([f"--accelerator {accelerator}"] if accelerator != "cpu" else [])
    facts = {
        "command": " ".join(["hoop reproduce", study.name, *said]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{_machine(accelerator)}, {lab.other_busy_cores:.1f} of them busy with other work before",
        "took": f"{time.monotonic() - began:.0f} s",
    }
    page = found.page(f"{study.name}: the paper's figures beside ours", _lead(study, quick), facts)
    write_page(page, folder)
    return page.plain()


def _lead(study: Study, quick: bool) -> str:
    part = " This is a **quick** run: fewer epochs, a part of the data." if quick else ""
    return (
        f"{study.paper}.\n\n{study.question} **Measured** figures come from real devices of this machine, "
        f"**simulated** ones from the same plans in virtual time.{part}"
    )


def _machine(accelerator: str) -> str:
    import torch

    graphics = f", {torch.cuda.get_device_name()}" if accelerator == "cuda" else ""
    system = f"{platform.system()} {platform.machine()}, {available_cores()} cores{graphics}"
    return f"{system}, Python {platform.python_version()}, torch {torch.__version__}"


def _each(names: list[str]) -> None:
    """Every study in a process of its own: one that has been connected to a cluster cannot fork devices."""
    given = [word for word in sys.argv[1:] if word not in ("reproduce", "all")]
    if "--out" in " ".join(given):
        raise InvalidArgument("--out: of all studies each has a folder of its own, runs/papers/NAME")
    for one in names:
        with subprocess.Popen(hoop_command("reproduce", one, *given)) as child:
            try:
                code = child.wait()
            except BaseException:  # Ctrl-C: the child got the signal too, and cleans up
                child.terminate()
                raise
        if code:
            raise typer.Exit(code)


def _show(report: dict[str, Any]) -> None:
    from hoop.lab.papers.experiment import stored_claims

    for one in stored_claims(report):
        typer.echo(f"{one['verdict']:<14} {one['claim']}")
        typer.echo(f"{'':<14} paper: {one['the paper']} · ours: {one['ours']} ({one['how']})")


class StudyView:
    """Lines that stay, and one that lives where there is a terminal; all on standard error."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("") if self._console.is_terminal else None
        self._began = self._printed = time.monotonic()

    def __enter__(self) -> StudyView:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        self._printed = time.monotonic()
        self._console.print(plain(f"{self._printed - self._began:6.1f} s  {text}"))
        if self._status is not None:
            self._status.update("")

    def note(self, text: str) -> None:
        if self._status is not None:
            self._status.update(plain(text))
        elif time.monotonic() - self._printed > LINE_S:
            self.say(text)
