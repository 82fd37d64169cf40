"""The tab "Plan": the instructions of each rank of a job's strategy, as a grid by time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bokeh.layouts import column
from bokeh.models import FactorRange, LayoutDOM

from hoop.dashboard.job_view import JobView
from hoop.dashboard.palette import CATEGORY_COLOURS
from hoop.dashboard.parts import Source, chart, paragraph, set_factors, set_text, text_block
from hoop.dashboard.view import ClusterView
from hoop.errors import HoopError
from hoop.plan.instructions import CATEGORY, Instruction, InstructionKind
from hoop.plan.unit_clock import timeline
from hoop.strategies.catalog import adapt_to_devices, parse
from hoop.texts import counted

MAX_INSTRUCTIONS = 6000
"""Of a plan that is drawn."""
MAX_LABELLED = 400
"""With more instructions their texts would overlap; the pointer tells them."""
MAX_TEXT_ROWS = 16
"""Ranks whose instructions are listed below the chart."""
MAX_TEXT = 600
"""Characters of such a list."""
UNITS = {
    InstructionKind.FORWARD: 1.0,
    InstructionKind.BACKWARD: 2.0,
    InstructionKind.BACKWARD_INPUT: 1.0,
    InstructionKind.BACKWARD_WEIGHT: 1.0,
    InstructionKind.REDUCE: 1.0,
    InstructionKind.UPDATE: 0.5,
}
"""Lengths in the grid; other instructions, which move data, are drawn with ``MOVE_UNITS``."""
MOVE_UNITS = 0.25


@dataclass(frozen=True)
class PlanGrid:
    """The grid of one plan."""

    rows: tuple[dict[str, Any], ...] = ()
    """One an instruction: rank, start and end in units, text, category and colour."""
    ranks: int = 0
    lists: tuple[str, ...] = ()
    """For the first ranks, their instructions as text."""
    note: str = ""


def _units(rank: int, instruction: Instruction) -> float:
    return UNITS.get(instruction.kind, MOVE_UNITS)


@lru_cache(maxsize=16)
def plan_grid(strategy: str, devices: int, num_microbatches: int) -> PlanGrid:
    """The grid of the plan that the engine makes for a strategy; ``note`` says why there is none, or what it is not.

    Cached: all pages show the same plan, twice a second.
    """
    try:
        chosen = adapt_to_devices(parse(strategy), devices)
        # Estimated before it is made: another process wrote the numbers.
        if devices * num_microbatches * 5 > 20 * MAX_INSTRUCTIONS:
            return PlanGrid(note=f"{devices} devices and {num_microbatches} shards are too many to draw.")
        plan = chosen.plan(devices, num_microbatches)
    except HoopError as error:
        return PlanGrid(note=str(error))
    count = sum(map(len, plan.ranks))
    if count > MAX_INSTRUCTIONS:
        return PlanGrid(ranks=plan.size, note=f"{count} instructions are too many to draw.")
    found = timeline(plan, _units)
    rows = [
        {
            "rank": f"rank {rank}",
            "left": start,
            "right": end,
            "middle": (start + end) / 2,
            "text": str(one),
            "label": str(one) if count <= MAX_LABELLED and end - start >= 1 else "",
            "category": CATEGORY[one.kind],
            "colour": CATEGORY_COLOURS[CATEGORY[one.kind]],
            "ink": "#ffffff" if CATEGORY[one.kind] == "forward" else "#000000",
        }
        for rank, instructions in enumerate(plan.ranks)
        for one, (start, end) in zip(instructions, found.spans[rank], strict=False)
    ]
    note = "" if chosen.rule(plan, 0) is None else "Ranks decide the order when messages arrive; this is one of them."
    lists = tuple(_shortened(" ".join(map(str, one))) for one in plan.ranks[:MAX_TEXT_ROWS])
    return PlanGrid(tuple(rows), plan.size, lists, note)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def grid_of(job: JobView | None) -> PlanGrid:
    """The grid of a job's current strategy and number of devices."""
    if job is None or not job.strategy or not job.num_microbatches or not job.devices:
        return PlanGrid(note="No job yet, or its settings are not known.")
    return plan_grid(job.strategy, len(job.devices), job.num_microbatches)


class PlanTab:
    """The tab of one browser."""

    shows_jobs = True

    def __init__(self) -> None:
        self._head, self._lists = text_block("plan-text"), text_block("plan-lists")
        self._cells = Source("plan", "rank", "left", "right", "middle", "text", "label", "category", "colour", "ink")
        self._ranks = FactorRange()
        self._shown: PlanGrid | None = None
        plot = chart(
            "Instructions by time, in units",
            hover=[("", "@text"), ("rank", "@rank"), ("what", "@category"), ("from", "@left"), ("to", "@right")],
            y_range=self._ranks,
        )
        plot.hbar(
            y="rank", left="left", right="right", height=0.8, source=self._cells.model, color="colour",
            line_color="#ffffff", line_width=0.5, legend_field="category",
        )  # fmt: skip
        plot.text(
            "middle", "rank", text="label", source=self._cells.model, text_align="center", text_baseline="middle",
            text_font_size="11px", text_color="ink",
        )  # fmt: skip
        legend = plot.legend[0]
        legend.orientation, legend.ncols, legend.location = "horizontal", 3, "left"
        legend.label_text_font_size, legend.spacing, legend.padding = "12px", 6, 4
        plot.add_layout(legend, "above")
        self._chart = plot
        self.layout: LayoutDOM = column(self._head, plot, self._lists, sizing_mode="stretch_width")

    def update(self, view: ClusterView) -> None:
        """Shows the plan of the newest job."""
        job = view.current_job
        grid = grid_of(job)
        about = ""
        if job is not None and grid.ranks:
            shards = counted(job.num_microbatches, "shard")
            about = f"Job {job.id}: {job.strategy} on {counted(grid.ranks, 'device')}, {shards} a step."
        legend = (
            "0F3 is the forward of stage 0 on shard 3; B is a backward, L a load, A a sum of gradients, U an update. "
            "Drag the chart to move it, turn the wheel to zoom."
        )
        set_text(
            self._head,
            paragraph("Plan", tag="h2"),
            *([paragraph(about), paragraph(legend, "muted")] if about else []),
            *([paragraph(grid.note)] if grid.note else []),
        )
        if grid is self._shown:
            return
        self._shown = grid
        if set_factors(self._ranks, [f"rank {rank}" for rank in reversed(range(grid.ranks))]):
            self._chart.height = 170 + 28 * max(2, min(64, grid.ranks))
        self._cells.show(grid.rows)
        set_text(self._lists, *(paragraph(f"Rank {rank}: {text}", "muted") for rank, text in enumerate(grid.lists)))
