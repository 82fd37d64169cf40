"""The tab "Simulator": choose strategy, devices and link; the predicted step beside today's measured one."""

from __future__ import annotations

from typing import Any

from bokeh.layouts import column, row
from bokeh.models import Button, FactorRange, LayoutDOM, Select, Spinner

from hoop.dashboard.job_tab import recent_step_seconds
from hoop.dashboard.job_view import JobView
from hoop.dashboard.palette import BLUE, ORANGE, PART_COLOURS
from hoop.dashboard.parts import (
    Source,
    bytes_text,
    chart,
    input_style,
    paragraph,
    seconds_text,
    set_factors,
    set_text,
    text_block,
)
from hoop.dashboard.simulator import MAX_DEVICES, Answer, Question, Simulator
from hoop.dashboard.view import ClusterView
from hoop.texts import counted

STRATEGIES = (
    "data",
    "ps:bsp",
    "ps:asp",
    "ring:sync",
    "ring:async",
    "pipeline:1f1b",
    "pipeline:gpipe",
    "pipeline:zero-bubble",
    "hybrid:replicas=2",
)
LINKS = {
    "1Gbps,0.5ms": "1 Gbit/s, 0.5 ms",
    "10Gbps,0.05ms": "10 Gbit/s, 0.05 ms",
    "100Gbps,0.01ms": "100 Gbit/s, 0.01 ms",
    "100Mbps,10ms": "100 Mbit/s, 10 ms",
}
MAX_BARS = 64


def answer_texts(question: Question, answer: Answer | None, job: JobView) -> list[str]:
    """The prediction in sentences, beside what the job's steps take now."""
    devices = counted(question.devices, "device")
    what = f"{question.strategy} on {devices}, {question.per_host} a host, {LINKS[question.link]}"
    if answer is None:
        return [f"{what}: simulating …"]
    if answer.problem:
        return [f"{what}: {answer.problem}"]
    measured = recent_step_seconds(job)
    beside = ""
    if measured is not None:
        factor = answer.step_seconds / measured if measured else 0.0
        beside = f"; job {job.id} takes {seconds_text(measured)} now, so {factor:.2f} times that"
    found = [f"{what}: a step takes {seconds_text(answer.step_seconds)}{beside}."]
    sent = bytes_text(answer.bytes_a_step)
    found.append(f"{answer.speedup:.2f} times as fast as one device; {sent} are sent in a step.")
    return found


def bar_rows(answer: Answer) -> list[dict[str, Any]]:
    """Milliseconds of a step by rank."""
    return [
        {"rank": f"rank {rank}", "compute": 1e3 * compute, "communicate": 1e3 * communicate, "idle": 1e3 * idle}
        for rank, (compute, communicate, idle) in enumerate(answer.shares[:MAX_BARS])
    ]


class SimulatorTab:
    """The tab of one browser."""

    shows_jobs = True

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        style = {"stylesheets": [input_style()], "width": 170}
        self._strategy = Select(
            title="Strategy", value=STRATEGIES[0], options=list(STRATEGIES), name="sim-strategy", **style
        )
        self._devices = Spinner(title="Devices", value=8, low=1, high=MAX_DEVICES, name="sim-devices", **style)
        self._per_host = Spinner(title="Devices a host", value=4, low=1, high=MAX_DEVICES, name="sim-hosts", **style)
        self._link = Select(
            title="Link between hosts", value=next(iter(LINKS)), options=list(LINKS.items()), name="sim-link", **style
        )
        self._button = Button(label="Simulate", button_type="primary", width=110, name="simulate")
        self._button.on_click(self._clicked)
        self._head, self._text = text_block("simulator-text"), text_block("simulator-answer")
        self._question: Question | None = None
        self._refused = ""
        self._job: JobView | None = None
        self._bars = Source("simulated", "rank", "compute", "communicate", "idle")
        self._ranks = FactorRange()
        self._chart = self._draw()
        self.layout: LayoutDOM = column(
            self._head,
            row(
                self._strategy, self._devices, self._per_host, self._link, self._button,
                styles={"flex-wrap": "wrap", "align-items": "end"}, sizing_mode="stretch_width",
            ),
            self._text,
            self._chart,
            sizing_mode="stretch_width",
        )  # fmt: skip

    def _draw(self) -> Any:
        parts = ["compute", "communicate", "idle"]
        plot = chart(
            "Predicted step by rank, in ms",
            hover=[("rank", "@rank"), *((part, f"@{part}{{0.000}} ms") for part in parts)],
            tools="xwheel_zoom,xpan,reset,save",
            y_range=self._ranks,
        )
        plot.hbar_stack(
            parts, y="rank", height=0.7, source=self._bars.model, color=[BLUE, ORANGE, PART_COLOURS["idle"]],
            legend_label=parts,
        )  # fmt: skip
        plot.x_range.start = 0
        legend = plot.legend[0]
        legend.orientation, legend.location = "horizontal", "left"
        plot.add_layout(legend, "above")
        return plot

    def _clicked(self) -> None:
        """Called by Bokeh on the server's thread: it only asks."""
        if self._job is None:
            self._refused = "no job whose costs could be used"
            return
        values = (self._devices.value, self._per_host.value)
        devices, per_host = (int(one) if isinstance(one, int | float) and one == one else 0 for one in values)
        strategy, link = str(self._strategy.value), str(self._link.value)
        if strategy not in STRATEGIES or link not in LINKS:
            return
        question = Question(self._job.id, strategy, devices, per_host, link)
        self._refused = self._simulator.ask(question)
        self._question = None if self._refused else question

    def update(self, view: ClusterView) -> None:
        """Shows the answer, when it is there."""
        job = self._job = view.current_job
        texts = [paragraph("Simulator", tag="h2")]
        if job is None:
            texts.append(paragraph("It predicts with the costs that a job measures before its first step: start one."))
        else:
            texts.append(paragraph(f"With the costs that job {job.id} ({job.name}) measured before its first step."))
        set_text(self._head, *texts)
        if self._refused or self._question is None or job is None:
            set_text(self._text, *([paragraph(self._refused, "problem")] if self._refused else []))
            return
        answer = self._simulator.answer(self._question)
        set_text(self._text, *(paragraph(one) for one in answer_texts(self._question, answer, job)))
        rows = bar_rows(answer) if answer is not None else []
        if set_factors(self._ranks, [row["rank"] for row in reversed(rows)]):
            self._chart.height = 150 + 22 * max(2, len(rows))
        self._bars.show(rows)
