"""The tab "Job": curves, progress, shards, stragglers, prediction, checkpoints and where the time went."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from bokeh.layouts import column, row
from bokeh.models import FactorRange, LayoutDOM, Select, Span

from hoop.dashboard.job_view import JobView
from hoop.dashboard.palette import BLUE, CYCLE, GREEN, GREY, ORANGE, RED
from hoop.dashboard.parts import (
    Source,
    bytes_text,
    chart,
    input_style,
    paragraph,
    seconds_text,
    set_factors,
    shown_with_rows,
    table,
    text_block,
)
from hoop.dashboard.updates import PageUpdates
from hoop.dashboard.view import ClusterView, DeviceView
from hoop.dashboard.work_panel import WorkPanel, ranges_text
from hoop.texts import counted

CURVES_S = 2.0
"""Seconds between two drawings of the curves, at least. The text above them has the newest values with every update."""
MAX_CURVES_S = 30.0
"""Seconds after which the curves are drawn in any case, if there are new points."""
CURVES_GROWTH = 1.02
"""Factor by which the curves must be longer to be drawn: less can hardly be seen, and a chart takes a browser 40 ms."""
NEWEST = "newest"
"""The choice that follows the newest running job."""


def facts(job: JobView) -> list[str]:
    """The job in sentences: also what the charts show, for screen readers."""
    found = []
    if job.steps:
        remaining = f", about {seconds_text(job.remaining_s)} left" if job.remaining_s is not None else ""
        found.append(f"Step {job.done} of {job.steps} ({job.done / job.steps:.0%}){remaining}.")
    figures = [f"loss {job.loss.last:.4f}"] if job.loss.last is not None else []
    figures += [f"test loss {job.test_loss.last:.4f}"] if job.test_loss.last is not None else []
    figures += [f"accuracy {job.accuracy.last:.2%}"] if job.accuracy.last is not None else []
    figures += [f"{job.samples_a_second:,.0f} samples a second"] if job.samples_a_second is not None else []
    figures += [f"learning rate {job.rate:.4g}"] if job.rate else []
    found += [f"{', '.join(figures).capitalize()}."] if figures else []
    found.append(prediction_text(job))
    slow = [f"rank {rank} ({times:.1f} times slower)" for rank, times in job.stragglers]
    found.append(f"Stragglers: {', '.join(slow)}." if slow else "No stragglers.")
    if job.recoveries:
        found.append(f"{counted(job.recoveries, 'recovery')}; the last pause took {seconds_text(job.last_pause_s)}.")
    return [one for one in found if one]


def prediction_text(job: JobView) -> str:
    """The measured time of a step beside the predicted one; empty if neither is known."""
    measured = recent_step_seconds(job)
    if measured is None:
        return ""
    text = f"A step takes {seconds_text(measured)}"
    if job.predicted_step_seconds:
        difference = measured / job.predicted_step_seconds - 1
        text += f"; the simulator predicted {seconds_text(job.predicted_step_seconds)} ({difference:+.0%})"
    return f"{text}."


def recent_step_seconds(job: JobView) -> float | None:
    """Mean of the last points of the curve."""
    last = job.step_seconds.y[-20:]
    return sum(last) / len(last) if last else None


def shard_rows(job: JobView, workers: Sequence[DeviceView]) -> list[dict[str, Any]]:
    """Shards by rank: which, as the devices report them; else how many, as the load balancer last reported."""
    slow = dict(job.stragglers)
    found = {
        one.rank: (len(one.activity.shards), ranges_text(one.activity.shards))
        for one in workers
        if one.activity is not None
    }
    known = found or {rank: (count, "") for rank, count in enumerate(job.shards)}
    return [
        {
            "rank": str(rank),
            "shards": count,
            "which": which,
            "colour": RED if rank in slow else CYCLE[0],
            "note": f"straggler, {slow[rank]:.1f} times slower" if rank in slow else "",
        }
        for rank, (count, which) in sorted(known.items())
    ]


class JobTab:
    """The tab of one browser."""

    shows_jobs = True

    def __init__(self, updates: PageUpdates) -> None:
        self._updates = updates
        self._drawn_job = 0
        """Id of the job whose curves are shown."""
        self._drawn_at, self._drawn_steps = -math.inf, 0
        """Time when they were drawn, and the steps that the job had done then."""
        self._choice = Select(
            title="Job",
            value=NEWEST,
            options=[(NEWEST, "the newest")],
            name="job-choice",
            width=260,
            stylesheets=[input_style()],
        )
        self._head = text_block("job-text")
        names = ("loss", "test-loss", "accuracy", "speed", "step-seconds")
        curves = [Source(name, "x", "y", updates=updates, paced=True) for name in names]
        self._loss, self._test, self._accuracy, self._speed, self._step = curves
        self._shards = Source("shards", "rank", "shards", "which", "colour", "note")
        self._splits = Source("splits", "rank", "compute", "communicate", "idle", "sent")
        self._checkpoints = Source("checkpoints", "step", "parts", "bytes", "kind", "time", updates=updates, paced=True)
        self._shard_ranks, self._split_ranks = FactorRange(), FactorRange()
        self._predicted = Span(
            location=0, dimension="width", line_color=RED, line_dash="dashed", line_width=2, visible=False
        )
        self._work = WorkPanel(updates)
        self.layout: LayoutDOM = column(
            self._choice,
            self._head,
            self._work.layout,
            row(*self._draw_curves(), sizing_mode="stretch_width", styles={"flex-wrap": "wrap"}),
            row(*self._draw_speeds(), sizing_mode="stretch_width", styles={"flex-wrap": "wrap"}),
            row(*self._draw_ranks(), sizing_mode="stretch_width", styles={"flex-wrap": "wrap"}),
            table(
                self._checkpoints,
                "checkpoint-table",
                {
                    "step": ("checkpoint after step", 120),
                    "parts": ("parts", 60),
                    "bytes": ("size", 80),
                    "kind": ("kind", 70),
                    "time": ("at", 80),
                },
                height=150,
            ),
            sizing_mode="stretch_width",
        )

    def _draw_curves(self) -> list[Any]:
        loss = chart("Loss by step", hover=[("step", "@x{0}"), ("loss", "@y{0.0000}")], min_width=340)
        loss.line("x", "y", source=self._loss.model, color=BLUE, line_width=2, legend_label="training")
        loss.scatter("x", "y", source=self._test.model, color=ORANGE, size=9, marker="diamond", legend_label="test")
        loss.legend.click_policy = "hide"
        self._loss.chart = self._test.chart = loss
        accuracy = chart("Accuracy by step", hover=[("step", "@x{0}"), ("accuracy", "@y{0.00%}")], min_width=340)
        accuracy.line("x", "y", source=self._accuracy.model, color=GREEN, line_width=2)
        accuracy.scatter("x", "y", source=self._accuracy.model, color=GREEN, size=7, marker="square")
        self._accuracy.chart = accuracy
        return [shown_with_rows(loss, self._loss, self._test), shown_with_rows(accuracy, self._accuracy)]

    def _draw_speeds(self) -> list[Any]:
        hover = [("step", "@x{0}"), ("samples a second", "@y{0,0}")]
        speed = chart("Samples a second by step", hover=hover, min_width=340)
        speed.line("x", "y", source=self._speed.model, color=BLUE, line_width=2)
        hover = [("step", "@x{0}"), ("milliseconds", "@y{0.00}")]
        step = chart("Milliseconds of a step (dashed: predicted)", hover=hover, min_width=340)
        step.line("x", "y", source=self._step.model, color=BLUE, line_width=2)
        step.add_layout(self._predicted)
        self._speed.chart, self._step.chart = speed, step
        return [shown_with_rows(speed, self._speed), shown_with_rows(step, self._step)]

    def _draw_ranks(self) -> list[Any]:
        hover = [("rank", "@rank"), ("shards", "@shards"), ("which", "@which"), ("", "@note")]
        shards = chart("Shards by rank", hover=hover, tools="reset,save", x_range=self._shard_ranks, min_width=340)
        shards.vbar(x="rank", top="shards", width=0.7, source=self._shards.model, color="colour")
        shards.y_range.start = 0
        hover = [("rank", "@rank"), ("compute", "@compute{0.0} s"), ("communicate", "@communicate{0.0} s")]
        hover += [("idle", "@idle{0.0} s"), ("sent", "@sent")]
        split = chart(
            "Seconds by rank, when the job has ended",
            hover=hover,
            tools="reset,save",
            x_range=self._split_ranks,
            min_width=340,
        )
        split.vbar_stack(
            ["compute", "communicate", "idle"], x="rank", width=0.7, source=self._splits.model,
            color=[BLUE, ORANGE, GREY], legend_label=["compute", "communicate", "idle"],
        )  # fmt: skip
        split.y_range.start = 0
        return [shown_with_rows(shards, self._shards), shown_with_rows(split, self._splits)]

    def update(self, view: ClusterView) -> None:
        """Shows the chosen job of the view."""
        options = [(NEWEST, "the newest"), *((str(one.id), f"job {one.id}: {one.name}") for one in view.jobs)]
        if options != self._choice.options:
            self._choice.options = options
        chosen = self._choice.value
        job = view.current_job if chosen == NEWEST else view.job(int(chosen))
        if job is None:
            text = paragraph("No job", tag="h2") + paragraph("Start one: hoop train --coordinator …")
            self._updates.change_text(self._head, text)
            return
        self._show_text(job)
        workers = view.workers(job.id)
        self._work.update(job, workers)
        self._show_ranks(job, workers)
        if self._curves_due(job):
            self._drawn_job, self._drawn_at, self._drawn_steps = job.id, time.monotonic(), job.done
            self._show_curves(job)

    def _curves_due(self, job: JobView) -> bool:
        """Whether enough has changed to draw the curves: another job, its end, or a visible part of their length."""
        if job.id != self._drawn_job:
            return True
        waited = time.monotonic() - self._drawn_at
        if waited < CURVES_S:
            return False
        return job.done >= CURVES_GROWTH * self._drawn_steps or waited >= MAX_CURVES_S or job.status != "running"

    def _show_curves(self, job: JobView) -> None:
        for source, curve in ((self._loss, job.loss), (self._test, job.test_loss), (self._accuracy, job.accuracy)):
            source.show_columns({"x": list(curve.x), "y": list(curve.y)})
        scale = job.batch_size or 1
        self._speed.show_columns({"x": list(job.speed.x), "y": [scale * one for one in job.speed.y]})
        self._step.show_columns({"x": list(job.step_seconds.x), "y": [1e3 * one for one in job.step_seconds.y]})
        if self._predicted.visible != bool(job.predicted_step_seconds):
            self._predicted.visible = bool(job.predicted_step_seconds)
        if job.predicted_step_seconds and self._predicted.location != 1e3 * job.predicted_step_seconds:
            self._predicted.location = 1e3 * job.predicted_step_seconds

    def _show_text(self, job: JobView) -> None:
        title = f"Job {job.id}: {job.name}"
        about = [job.status, job.strategy, counted(len(job.devices), "device")]
        about += [f"generation {job.generation}"] if job.generation else []
        about += [f"{job.parameters:,} parameters"] if job.parameters else []
        done = f'<progress max="{max(1, job.steps)}" value="{job.done}" aria-label="progress"></progress>'
        paragraphs = [
            paragraph(title, tag="h2"),
            paragraph(" · ".join(filter(None, about)), "muted"),
            *([done] if job.steps else []),
            *([paragraph(job.notice, "problem")] if job.notice else []),
            *([paragraph(job.reason, "problem")] if job.reason else []),
            *(paragraph(one) for one in facts(job)),
        ]
        self._updates.change_text(self._head, "".join(paragraphs))

    def _show_ranks(self, job: JobView, workers: Sequence[DeviceView]) -> None:
        rows = shard_rows(job, workers)
        set_factors(self._shard_ranks, [row["rank"] for row in rows])
        self._shards.show(rows)
        set_factors(self._split_ranks, [str(one.rank) for one in job.splits])
        self._splits.show(
            [
                {
                    "rank": str(one.rank),
                    "compute": one.compute,
                    "communicate": one.communicate,
                    "idle": one.idle,
                    "sent": bytes_text(one.bytes_sent),
                }
                for one in job.splits
            ]
        )
        self._checkpoints.show(
            [
                {
                    "step": str(one.step),
                    "parts": f"{one.parts} of {one.of_parts}",
                    "bytes": bytes_text(one.bytes),
                    "kind": "final" if one.final else "",
                    "time": time.strftime("%H:%M:%S", time.localtime(one.time)),
                }
                for one in reversed(job.checkpoints)
            ]
        )
