"""The report of a run: one HTML page with its charts, made from the files of a run folder (``--out``).

``RunRecorder.finish`` writes it as ``report.html``; ``hoop report`` makes it from any run folder, also of a run that
was killed: a section whose file is missing or damaged says so. Every text of the files is escaped.

This module imports Bokeh: import it only where a report is written (``pip install 'hoop[dashboard]'``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bokeh.models import ColumnDataSource
from bokeh.plotting import figure

from hoop import job_events as ev
from hoop.config import format_size
from hoop.errors import FailedPrecondition, NotFound
from hoop.files import write_text
from hoop.report import strict_json
from hoop.report.chart import IDLE, MAX_SPANS
from hoop.report.components import (
    Axis,
    Mark,
    MarkKind,
    Series,
    add_mark_lines,
    curve,
    duration,
    mark_columns,
    run_marks,
    time_split,
    timeline,
)
from hoop.report.html_page import html_page
from hoop.report.metrics import MetricsRow, read_metrics
from hoop.report.page import Drawn, Facts, Page, Section
from hoop.report.run_events import NAME as EVENTS
from hoop.report.run_events import LoggedEvent, read_run_events
from hoop.report.spans import COMPUTE, Span, by_track, kind_of, shares, window
from hoop.report.tables import Column, Table
from hoop.report.trace import read_spans
from hoop.texts import counted, printable_json

CONFIG, METRICS, LEDGER, RESULT, TRACE = "config.json", "metrics.jsonl", "ledger.jsonl", "result.json", "trace.json"
NAME = "report.html"
MAX_TRACE_BYTES = 256 << 20
MAX_FURTHER_METRICS = 6
MAX_MARK_ROWS = 200
"""Maximum number of marks in the table; the chart has all."""
_NO_METRICS = ("step", "seconds", "epoch")
_SPLITS = {"": "training", "train": "training, evaluated", "test": "test"}


@dataclass(frozen=True)
class RunFiles:
    """What could be read of a run folder. ``problems``: a text for each file that is damaged."""

    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[MetricsRow] = ()
    events: Sequence[LoggedEvent] = ()
    ledger: Sequence[Mapping[str, Any]] = ()
    result: Mapping[str, Any] = field(default_factory=dict)
    spans: Sequence[Span] = ()
    problems: Sequence[str] = ()

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Raises NotFound if the folder has none of a run's files."""
        present = [name for name in (CONFIG, METRICS, EVENTS, LEDGER, RESULT, TRACE) if (folder / name).is_file()]
        if not present:
            raise NotFound(
                f"{folder}: no files of a run ({CONFIG}, {METRICS} …) are there; name the folder that --out named"
            )
        problems: list[str] = []
        metrics: Sequence[MetricsRow] = ()
        try:
            metrics = read_metrics(folder / METRICS)
        except FailedPrecondition as error:
            problems.append(str(error))
        events, lines = read_run_events(folder / EVENTS)
        problems += lines[:10]
        spans: Sequence[Span] = ()
        if TRACE in present:
            try:
                if (size := (folder / TRACE).stat().st_size) > MAX_TRACE_BYTES:
                    raise FailedPrecondition(f"{TRACE}: {size >> 20} MiB are too much for a page; open it in Perfetto")
                spans = [one for one in read_spans(folder / TRACE) if _is_drawable(one)]
            except FailedPrecondition as error:
                problems.append(str(error))
        config, result = (_read_object(folder / name, problems) for name in (CONFIG, RESULT))
        ledger = [] if events else list(_ledger_marks(folder / LEDGER))
        return cls(config, metrics, events, ledger, result, spans, problems)

    @property
    def started(self) -> ev.Started | None:
        """The newest start of training."""
        return next((one.event for one in reversed(self.events) if isinstance(one.event, ev.Started)), None)

    @property
    def devices(self) -> int:
        found = self.result.get("devices", self.config.get("devices", 0))
        return found if isinstance(found, int) else 0


def _is_drawable(span: Span) -> bool:
    return math.isfinite(span.start_us) and math.isfinite(span.duration_us) and span.duration_us >= 0


def _read_object(path: Path, problems: list[str]) -> Mapping[str, Any]:
    """A JSON object with printable texts; empty if there is no such file, or it is damaged."""
    if not path.is_file():
        return {}
    try:
        found = printable_json(strict_json.loads(path.read_bytes()))
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: cannot be read: {error}")
        return {}
    return found


def _ledger_marks(path: Path) -> Iterator[Mapping[str, Any]]:
    """Losses, recoveries and starts in the ledger, with the step before them: for folders without an events file.

    The hashes are not checked: that is the work of ``hoop audit``.
    """
    step = 0
    for line in path.read_bytes().split(b"\n")[:-1] if path.is_file() else ():
        try:
            entry = strict_json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            step = next((entry[key] for key in ("step", "begin") if isinstance(entry.get(key), int)), step)
            if not isinstance(entry.get("step"), int):
                yield {**entry, "done": step}


# ---- marks


def marks_of(files: RunFiles) -> list[Mark]:
    """What happened in the run, in order; from the ledger if there is no events file."""
    if not files.events:
        return [mark for entry in files.ledger for mark in _mark_of_entry(entry)]
    begin = min(one.observed.time for one in files.events)
    found: list[Mark] = []
    for one in files.events:
        try:
            found += _marks_of_event(one, one.observed.time - begin)
        except (TypeError, ValueError, AttributeError):  # the file is not this version's, or was changed
            text = f"{EVENTS}: an event {one.event.kind!r} has values of other types; left out"
            found.append(Mark(MarkKind.WARNING, one.done, one.observed.time - begin, text))
    return found


def _mark_of_entry(entry: Mapping[str, Any]) -> Iterator[Mark]:
    if "lost" in entry:
        yield Mark(MarkKind.LOST, entry["done"], 0.0, f"device {entry['lost']}")
    elif isinstance(step := entry.get("recovered"), int):
        yield Mark(MarkKind.RECOVERED, step, 0.0, "the ranks went on", None, _repeated(entry.get("missing")))
    elif entry.get("begin"):
        yield Mark(MarkKind.RESUMED, entry["done"], 0.0, f"resumed after step {entry['begin']}")


def _marks_of_event(one: LoggedEvent, seconds: float) -> Iterator[Mark]:
    event, device, done = one.event, one.observed.device, one.done
    match event:
        case ev.Started() if event.done and done <= event.done:
            yield Mark(MarkKind.RESUMED, int(event.done), seconds, f"resumed after step {event.done}")
        case ev.FaultInjected():
            before = f" before {event.before}" if event.before else ""
            yield Mark(MarkKind.FAULT, int(event.step or done), seconds, f"{event.fault}{before}, on device {device}")
        case ev.DeviceLost():
            yield Mark(MarkKind.LOST, done, seconds, _named(f"device {event.device}", event.text))
        case ev.Recovered() | ev.Resized():
            kind = MarkKind.RECOVERED if isinstance(event, ev.Recovered) else MarkKind.RESIZED
            text = f"{event.text} ({counted(event.ranks, 'rank')}, generation {event.generation})"
            yield Mark(kind, int(event.step), seconds, text, float(event.pause_s), _repeated(event.missing))
        case ev.StateLoaded():
            yield Mark(
                MarkKind.JOINED, int(event.step), seconds, f"device {event.device} has the state, {event.source}"
            )
        case ev.Left():
            yield Mark(MarkKind.LEFT, done, seconds, _named(f"device {device}", event.text))
        case ev.Straggler() if event.slow:
            text = f"rank {event.straggler}: a shard takes {event.times:.1f} times longer there"
            yield Mark(MarkKind.STRAGGLER, int(event.step), seconds, text)
        case ev.CheckpointWritten():
            text = f"{Path(event.file).name}, {format_size(event.bytes)}"
            yield Mark(MarkKind.CHECKPOINT, int(event.steps), seconds, text)
        case ev.Hung():
            yield Mark(MarkKind.WARNING, done, seconds, event.text)
        case ev.Failed() | ev.Refused() | ev.WaitingForRestart() | ev.Damaged() | ev.RoundingDiffers() | ev.Warned():
            yield Mark(MarkKind.WARNING, done, seconds, event.text)
        case ev.CoordinatorLost() | ev.CoordinatorBack():
            yield Mark(MarkKind.WARNING, done, seconds, event.text)
        case ev.JobEnded() if event.error:
            yield Mark(MarkKind.WARNING, done, seconds, f"the job failed: {event.text}")


def _named(name: str, text: str) -> str:
    return f"{name}: {text}" if text else name


def _repeated(shards: Any) -> str:
    if not shards:
        return "nothing"
    return f"shard{'s' * (len(shards) > 1)} {', '.join(map(str, shards))}" if isinstance(shards, list) else str(shards)


# ---- charts


def curves(rows: Sequence[MetricsRow]) -> dict[str, list[Series]]:
    """Series by metric: loss, accuracy (%), the further ones of the loss function, and the time of a step (ms)."""
    points: dict[str, dict[str, tuple[list[int], list[float]]]] = {"loss": {}, "accuracy": {}}
    for row in rows:
        for key, value in row.items():
            if key not in _NO_METRICS and isinstance(value, int | float) and not isinstance(value, bool):
                split, _, name = key.partition("_") if key.startswith(("train_", "test_")) else ("", "", key)
                steps, values = points.setdefault(name, {}).setdefault(_SPLITS[split], ([], []))
                steps.append(row["step"])
                values.append(100 * value if name == "accuracy" else value)
    seconds = [(row["step"], row["seconds"]) for row in rows if isinstance(row.get("seconds"), int | float)]
    found = {name: [Series.of(split, *one) for split, one in splits.items()] for name, splits in points.items()}
    found = dict([(name, one) for name, one in found.items() if one][: 2 + MAX_FURTHER_METRICS])
    if seconds:
        found["step time"] = [Series.of("step time", [s for s, _ in seconds], [1000 * t for _, t in seconds])]
    return found


_LABELS = {"accuracy": "accuracy (%)", "step time": "step time (ms)"}


def whole_run_split(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of ``time_split``: computing, communicating and idle, in percent of each device's time in the run."""
    ids, parts = result.get("device_ids"), result.get("shares")
    if not isinstance(ids, list) or not isinstance(parts, list):
        return []
    return [
        {"device": f"device {device}"} | {str(kind): 100 * share for kind, share in one.items()}
        for device, one in zip(ids, parts, strict=False)
        if isinstance(one, dict) and all(isinstance(share, int | float) for share in one.values())
    ]


def traced_split(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Rows of ``time_split``: kinds of instructions, in percent of the traced time.

    Communication that computation hides counts as computation; waiting within a send or a sum counts as communication.
    """
    start, end = window(spans)
    whole = end - start
    rows = []
    exposed = shares(spans)
    for device, own in by_track(spans).items() if whole > 0 else ():
        sums = dict.fromkeys(COMPUTE, 0.0)
        for span in own:
            if (kind := kind_of(span.category)) in sums:
                sums[str(kind)] += 100 * span.duration_us / whole
        share = exposed[device]
        rows.append({"device": device, **sums, "communicate": 100 * share.communicate, IDLE: 100 * share.idle})
    return rows


def _used_kinds(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    order = ("load", "forward", "backward", "compute", "communicate", "update", IDLE)
    return [kind for kind in order if any(row.get(kind, 0) > 0 for row in rows)]


def _few_steps_ms(spans: Sequence[Span], devices: int) -> float | None:
    """The time until each device has done about three updates: enough to see the pattern of a step."""
    updates = sorted(span.end_us for span in spans if span.category == "update")
    first = min((span.start_us for span in spans), default=0.0)
    return (updates[min(len(updates), 3 * devices) - 1] - first) / 1000 if updates else None


@dataclass(frozen=True)
class _Charts:
    """Charts of one section: its figures in order, with a sentence for each."""

    heading: str
    figures: Sequence[tuple[figure, str]]
    missing: str
    """Text of the section if it has no figures."""
    tables: Sequence[Table] = ()


def _charts(files: RunFiles, marks: Sequence[Mark]) -> list[_Charts]:
    source = ColumnDataSource(mark_columns(marks))
    shown: list[tuple[figure, str]] = []
    for name, series in curves(files.metrics).items():
        x_range = shown[0][0].x_range if shown else None
        label = _LABELS.get(name, name)
        found = curve(series, Axis(label), x_range=x_range, height=300 if not shown else 230)
        add_mark_lines(found, source, (MarkKind.LOST, MarkKind.RECOVERED, MarkKind.RESUMED))
        shown.append((found, f"{label} by step{_last_values(series)}."))
    marked = []
    if marks:
        text = f"{len(marks)} marks by step; hover tells what happened. The table has the same."
        marked = [(run_marks(source, shown[0][0].x_range if shown else None), text)]
    split = []
    if whole := whole_run_split(files.result):
        text = "The whole run, by device. Time in which a device waits for another counts as idle."
        split.append((time_split(whole, _used_kinds(whole)), text))
    lines = []
    if traced := traced_split(files.spans):
        text = "The traced steps, by device. Waiting within a message or a sum counts as communication."
        split.append((time_split(traced, _used_kinds(traced)), text))
        devices = list(by_track(files.spans))
        text = f"{counted(len(devices), 'device')}, instruction by instruction; drag to zoom, hover tells more."
        if len(files.spans) > MAX_SPANS:
            text += f" The first {MAX_SPANS:,} of {len(files.spans):,} instructions; {TRACE} has all (Perfetto)."
        lines = [(timeline(files.spans, devices, _few_steps_ms(files.spans, len(devices))), text)]
    unfinished = "is written when a run ends"
    return [
        _Charts("Curves", shown, f"No step was reported: {METRICS} is missing or empty."),
        _Charts(
            "Faults, recoveries and other marks",
            marked,
            f"Nothing is noted in {EVENTS} or {LEDGER}.",
            [_marks_table(marks)] if marks else [],
        ),
        _Charts("Where the time went", split, f"Not known: {RESULT} {unfinished}."),
        _Charts("Timeline", lines, f"Not known: {TRACE} {unfinished}, and has no instructions with trace_steps=0."),
    ]


def _last_values(series: Sequence[Series]) -> str:
    """The text alternative of a curve: its last values."""
    texts = [
        f"{one.name} {one.source.data['y'][-1]:.4g} at step {one.source.data['x'][-1]:.0f}"
        for one in series
        if len(one.source.data["y"])
    ]
    return f"; last: {', '.join(texts)}" if texts else ""


# ---- tables


def _summary(files: RunFiles, marks: Sequence[Mark]) -> dict[str, str]:
    result, config = files.result, files.config
    done = max((row["step"] for row in files.metrics), default=0)
    pauses = [mark.pause_s for mark in marks if mark.kind is MarkKind.RECOVERED and mark.pause_s is not None]
    recovered = sum(mark.kind is MarkKind.RECOVERED for mark in marks)
    steps = result.get("steps", done)
    status = "stopped early" if result.get("stopped") else "finished"
    facts: dict[str, Any] = {
        "Job": result.get("job", config.get("job")),
        "Strategy": result.get("strategy", config.get("strategy")),
        "Devices": files.devices or None,
        "Status": status if "weights_sha256" in result else f"did not finish: there is no whole {RESULT}",
        "Steps": f"{steps:,}" if isinstance(steps, int) else None,
        "Epochs": result.get("epochs"),
    }
    split = "training data" if result.get("split") == "train" else "test data"
    if isinstance(accuracy := result.get("accuracy"), int | float):
        facts[f"Accuracy ({split})"] = f"{100 * accuracy:.2f} %"
    if isinstance(loss := result.get("loss"), int | float):
        facts[f"Loss ({split})"] = f"{loss:.5g}"
    for label, key, form in (
        ("Training time", "seconds", duration),
        ("Samples a second", "samples_per_second", "{:,.0f}".format),
        ("Idle", "idle_fraction", "{:.1%}".format),
        ("Sent between devices", "bytes_sent", lambda value: format_size(int(value))),
    ):
        if isinstance(value := result.get(key), int | float):
            facts[label] = form(value)
    longest = f", longest pause {duration(max(pauses))}" if pauses else ""
    facts["Recoveries"] = f"{recovered}{longest}"
    facts["Weights (sha256)"] = result.get("weights_sha256") or None
    return {name: str(value) for name, value in facts.items() if value is not None}


def _marks_table(marks: Sequence[Mark]) -> Table:
    rows = [
        [
            round(mark.seconds, 1),
            mark.step,
            mark.kind.value,
            mark.text,
            None if mark.pause_s is None else round(1000 * mark.pause_s, 1),
            mark.repeated or None,
        ]
        for mark in marks[:MAX_MARK_ROWS]
    ]
    columns = [Column("time", "s", 1), Column("step"), Column("what"), Column("details"), Column("pause", "ms", 1)]
    left_out = f" (the first {MAX_MARK_ROWS} of {len(marks):,})" if len(marks) > MAX_MARK_ROWS else ""
    return Table([*columns, Column("repeated")], rows, f"Marks{left_out}")


def _environment(files: RunFiles) -> dict[str, str]:
    started = files.started
    if started is None:
        return {}
    facts: dict[str, Any] = dict(started.environment) if isinstance(started.environment, dict) else {}
    facts |= {"parameters": started.parameters, "training samples": started.samples}
    facts |= {"checksum of the training data": started.data}
    if isinstance(started.stages, list):
        facts |= {f"stage {index}": text for index, text in enumerate(started.stages[:64])}
    return {str(name): f"{value:,}" if type(value) is int else str(value) for name, value in facts.items()}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else strict_json.dumps(value)


# ---- the page


def run_page(folder: Path) -> Page:
    """The report of a run folder. NotFound if the folder has none of a run's files."""
    files = RunFiles.read(folder)
    marks = marks_of(files)
    sections = []
    for section in _charts(files, marks):
        name = section.heading.split(",")[0].lower().replace(" ", "-")
        drawn = [Drawn(f"{name}-{index}", one, text) for index, (one, text) in enumerate(section.figures, start=1)]
        sections.append(Section(section.heading, [*drawn, *section.tables] if drawn else [section.missing]))
    environment, settings = _environment(files), dict(_flat(files.config))
    absent = f"Not known: {EVENTS} has no start of the training.", f"Not known: {CONFIG} is missing or damaged."
    sections.append(Section("Environment", [Facts(environment) if environment else absent[0]]))
    sections.append(Section("Settings", [Facts(settings) if settings else absent[1]]))
    job = str(files.result.get("job", files.config.get("job", folder.resolve().name)))
    return Page(f"{job}: report of a run", sections, facts=_summary(files, marks), notes=files.problems)


def run_report(folder: Path) -> str:
    """The report of a run folder, as HTML."""
    return html_page(run_page(folder))


def write_run_report(folder: Path, to: Path | None = None) -> Path:
    """Writes the report of a run folder, atomically; by default as ``report.html`` in it. Returns its path."""
    path = folder / NAME if to is None else to
    write_text(path, run_report(folder))
    return path
